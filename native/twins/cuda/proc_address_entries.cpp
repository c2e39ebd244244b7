// The two forms of cuGetProcAddress. The table is in proc_address.cpp.
#include "cuda/entry.hpp"

namespace gdrkit::twin::cuda {

bool find_entry(std::string_view name, int version, void** entry);

namespace {

Result look_up(const char* name, void** entry, int version, std::uint64_t flags, int* status) {
    // Per-thread forms are asked for by a flag; the twin has one form for both.
    const bool known_flags = (flags & ~std::uint64_t{proc_legacy_stream | proc_per_thread_stream}) == 0;
    if (name == nullptr || entry == nullptr || !known_flags || version > driver_version) {
        return invalid_value;
    }
    const bool known = find_entry(name, version, entry);
    if (status != nullptr) {
        *status = !known ? proc_symbol_not_found : *entry == nullptr ? proc_version_not_sufficient : proc_success;
    }
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuGetProcAddress(const char* name, void** entry, int version, std::uint64_t flags) {
    return entry_before_init("cuGetProcAddress", [&] {
        const Result result = look_up(name, entry, version, flags, nullptr);
        return result == success && *entry == nullptr ? not_found : result;
    });
}

GDRKIT_CUDA_ENTRY Result cuGetProcAddress_v2(const char* name, void** entry, int version, std::uint64_t flags,
                                             int* status) {
    return entry_before_init("cuGetProcAddress_v2", [&] { return look_up(name, entry, version, flags, status); });
}

} // namespace gdrkit::twin::cuda
