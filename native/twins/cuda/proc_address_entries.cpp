// cuGetProcAddress and cuGetProcAddress_v2. They look functions up in the table of proc_address.cpp. That file cannot
// define them, because it declares every exported function with other parameters.
#include "cuda/entry.hpp"

namespace gdrkit::twin::cuda {

// proc_address.cpp defines and describes this function.
bool find_entry(std::string_view name, int requested_version, void** entry);

namespace {

Result get_proc_address(const char* name, void** entry, int requested_version, std::uint64_t flags, int* status) {
    // The flags select the legacy or the per-thread form of a function. The twin returns the same function for both, so
    // it only checks the flags.
    const bool has_valid_flags = (flags & ~std::uint64_t{proc_legacy_stream | proc_per_thread_stream}) == 0;
    if (name == nullptr || entry == nullptr || !has_valid_flags || requested_version > driver_version) {
        return invalid_value;
    }
    const bool is_known = find_entry(name, requested_version, entry);
    if (status != nullptr) {
        *status = !is_known ? proc_symbol_not_found : *entry == nullptr ? proc_version_not_sufficient : proc_success;
    }
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuGetProcAddress(const char* name, void** entry, int requested_version, std::uint64_t flags) {
    return run_entry_before_init("cuGetProcAddress", [&] {
        const Result result = get_proc_address(name, entry, requested_version, flags, nullptr);
        return result == success && *entry == nullptr ? not_found : result;
    });
}

GDRKIT_CUDA_ENTRY Result cuGetProcAddress_v2(const char* name, void** entry, int requested_version, std::uint64_t flags,
                                             int* status) {
    return run_entry_before_init("cuGetProcAddress_v2",
                                 [&] { return get_proc_address(name, entry, requested_version, flags, status); });
}

} // namespace gdrkit::twin::cuda
