// The function table of cuGetProcAddress: maps a public name and a CUDA version to an exported function.
#include <cstring>
#include <string_view>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// Declare every exported function without arguments, because this file needs only the addresses. With these
// declarations this file cannot define an exported function, so proc_address_entries.cpp defines cuGetProcAddress.
#define X(name, since, symbol, kind) extern "C" int symbol();
#include "cuda/functions.def"
#undef X

// Return whether a function has this name. Set *entry to the address of the newest signature that CUDA
// `requested_version` has, or to null if all signatures of the function are newer.
bool find_entry(std::string_view name, int requested_version, void** entry);

namespace {

struct Function {
    std::string_view name;
    // First CUDA version with this signature, for example 12080 for CUDA 12.8; 0 if cuGetProcAddress never returns it.
    int since;
    int (*entry)();
};

constexpr Function functions[] = {
#define X(name, since, symbol, kind) {#name, since, &symbol},
#include "cuda/functions.def"
#undef X
};

} // namespace

bool find_entry(std::string_view name, int requested_version, void** entry) {
    bool is_known = false;
    int newest_version = 0;
    *entry = nullptr;
    for (const Function& function : functions) {
        if (function.since == 0 || function.since > driver_version || function.name != name) {
            continue;
        }
        is_known = true;
        if (function.since <= requested_version && function.since > newest_version) {
            newest_version = function.since;
            *entry = reinterpret_cast<void*>(function.entry);
        }
    }
    return is_known;
}

} // namespace gdrkit::twin::cuda
