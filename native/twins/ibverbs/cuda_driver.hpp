// The functions of the CUDA driver with which the verbs twin accesses device memory. The twin never loads the driver,
// because a process that has not loaded it has no device memory. The declarations are copied from cuda.h, so that the
// build does not need that header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace gdrkit::twin::verbs {

class CudaDriver {
public:
    using Result = int;   // CUresult; 0 is success
    using Handle = void*; // CUcontext or CUstream

    // Return the driver that is loaded in this process, or nullptr.
    static const CudaDriver* find_loaded();

    // Return whether the address is device memory. Managed memory is not counted as device memory, because it can
    // migrate.
    [[nodiscard]] bool is_device_memory(std::uint64_t address) const;
    // Return the ordinal of the device to which the memory at this address belongs; nullopt if it belongs to no device.
    [[nodiscard]] std::optional<int> find_device_of_address(std::uint64_t address) const;
    // Return the buffer id of the allocation at this address, or nullopt if there is no allocation. If the memory is
    // freed and a later allocation gets the same address, the later allocation has another id.
    [[nodiscard]] std::optional<std::uint64_t> query_buffer_id(std::uint64_t address) const;
    // Return the end of the allocation (for VMM memory: of the mapping) that contains the address; nullopt if the
    // driver does not report it.
    [[nodiscard]] std::optional<std::uint64_t> find_allocation_end(std::uint64_t address) const;

    Result (*cuPointerGetAttribute)(void*, int, std::uint64_t) = nullptr;
    Result (*cuMemGetAddressRange_v2)(std::uint64_t*, std::size_t*, std::uint64_t) = nullptr;
    Result (*cuDevicePrimaryCtxRetain)(Handle*, int) = nullptr;
    Result (*cuDevicePrimaryCtxRelease_v2)(int) = nullptr;
    Result (*cuCtxPushCurrent_v2)(Handle) = nullptr;
    Result (*cuCtxPopCurrent_v2)(Handle*) = nullptr;
    Result (*cuStreamCreate)(Handle*, unsigned) = nullptr;
    Result (*cuStreamDestroy_v2)(Handle) = nullptr;
    Result (*cuStreamSynchronize)(Handle) = nullptr;
    Result (*cuMemcpyHtoDAsync_v2)(std::uint64_t, const void*, std::size_t, Handle) = nullptr;
    Result (*cuMemcpyDtoHAsync_v2)(void*, std::uint64_t, std::size_t, Handle) = nullptr;

private:
    // Set all function pointers. Return false if the library lacks one of the functions.
    bool find_functions(void* library);
};

} // namespace gdrkit::twin::verbs
