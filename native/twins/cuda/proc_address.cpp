// cuGetProcAddress: the public name and a CUDA version give the entry of that form.
#include <cstring>
#include <string_view>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// Declared without their arguments: only the addresses are wanted here, so this file includes no other declaration.
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

// Whether the name is known; *entry is null when no form of it is as old as this version.
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
