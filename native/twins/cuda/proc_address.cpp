// The function table of cuGetProcAddress: maps a public name and a CUDA version to an exported function.
#include <cstring>
#include <string_view>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// Declared without arguments: only the addresses are needed, so this file includes no other declarations of them.
#define X(name, since, symbol, kind) extern "C" int symbol();
#include "cuda/functions.def"
#undef X

bool find_entry(std::string_view name, int version, void** entry);

namespace {

struct Function {
    std::string_view name;
    int since;
    int (*entry)();
};

constexpr Function functions[] = {
#define X(name, since, symbol, kind) {#name, since, &symbol},
#include "cuda/functions.def"
#undef X
};

} // namespace

// Return whether the name is known and store the newest form that `version` supports; null if all forms are newer.
bool find_entry(std::string_view name, int version, void** entry) {
    bool known = false;
    int newest = 0;
    *entry = nullptr;
    for (const Function& function : functions) {
        if (function.since == 0 || function.since > driver_version || function.name != name) {
            continue;
        }
        known = true;
        if (function.since <= version && function.since > newest) {
            newest = function.since;
            *entry = reinterpret_cast<void*>(function.entry);
        }
    }
    return known;
}

} // namespace gdrkit::twin::cuda
