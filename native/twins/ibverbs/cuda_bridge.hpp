// The few entries of the CUDA driver that the twin needs to reach device memory. The driver is never loaded for it: a
// process without one has no device memory. Names and numbers are those of cuda.h, which the build does not need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace gdrkit::twin::verbs {

class CudaDriver {
public:
    using Result = int;
    using Handle = void*;

    // The driver that this process has loaded, nullptr when it has none.
    static const CudaDriver* loaded();

    // Whether the address is memory of a device, and not managed memory, which has no fixed place.
    [[nodiscard]] bool is_device_memory(std::uint64_t address) const;
    [[nodiscard]] std::optional<int> device_of(std::uint64_t address) const;
    // The identity of the allocation under this address: another after a free, also when the address comes back.
    [[nodiscard]] std::optional<std::uint64_t> buffer_id(std::uint64_t address) const;
    // The end of the allocation (of VMM memory: the mapping) that holds the address; nullopt when the driver does not
    // say.
    [[nodiscard]] std::optional<std::uint64_t> end_of_allocation(std::uint64_t address) const;

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
    bool resolve(void* library);
};

} // namespace gdrkit::twin::verbs
