// Device memory of a registered region. The twin copies from and to it through the CUDA driver that the process has
// loaded, because only the driver can access it.

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "ibverbs/cuda_driver.hpp"
#include "ibverbs/memory.hpp"

namespace gdrkit::twin::verbs {
namespace {

// The part [begin, end) of the region that belongs to one allocation, and the buffer id that the allocation had when
// the region was registered.
struct AllocationRange {
    std::uint64_t begin, end; // addresses
    std::uint64_t buffer_id;
};

// Makes a CUDA context the current one of this thread for the lifetime of the object. The object converts to
// false if the driver refuses the context.
class CurrentContext {
public:
    CurrentContext(const CudaDriver& driver, CudaDriver::Handle context) : driver_(driver) {
        is_pushed_ = driver_.cuCtxPushCurrent_v2(context) == 0;
    }
    ~CurrentContext() {
        CudaDriver::Handle previous_context = nullptr;
        if (is_pushed_) {
            driver_.cuCtxPopCurrent_v2(&previous_context);
        }
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    explicit operator bool() const { return is_pushed_; }

private:
    const CudaDriver& driver_;
    bool is_pushed_ = false;
};

// The device memory of one region. A real NIC pins GPU pages, so it accesses these pages even after the memory was
// freed. It never accesses a later allocation at the same address (observed on an H200). The twin copies through the
// driver, which accesses whatever is allocated at the address now. So when the buffer id at an address has changed, the
// region uses host memory of its own instead (detached_memory_).
class CudaMemory : public Memory {
public:
    CudaMemory(const CudaDriver& driver, std::uint64_t address, std::uint64_t length_bytes)
        : driver_(driver), address_(address), length_bytes_(length_bytes) {}
    ~CudaMemory() override;

    // Retain the primary context of the device, find the allocations and create the stream. Return 0 or an errno.
    int open();
    int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t bounce_offset, std::size_t size_bytes) override;
    int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t bounce_offset,
              std::size_t size_bytes) override;

private:
    // Find the allocations that the region covers. Return 0, or EINVAL if a part of the region is not device memory.
    int find_allocations();
    // Copy between the device memory at `offset` and the host memory. Return 0 or EIO.
    int copy(std::uint64_t offset, std::byte* host_address, std::size_t size_bytes, bool is_to_device);
    // Return whether each allocation in the address range [begin, end) still has the buffer id of the registration.
    [[nodiscard]] bool are_allocations_unchanged(std::uint64_t begin, std::uint64_t end) const;
    // Allocate detached_memory_ if device memory in the range was freed. Return 0 or an errno.
    int detach_if_freed(std::uint64_t offset, std::size_t size_bytes);

    const CudaDriver& driver_;
    const std::uint64_t address_;
    const std::uint64_t length_bytes_;
    std::mutex mutex_;
    std::vector<AllocationRange> allocations_;
    int device_ordinal_ = -1;
    CudaDriver::Handle context_ = nullptr;
    CudaDriver::Handle stream_ = nullptr;
    std::byte* detached_memory_ = nullptr;
};

CudaMemory::~CudaMemory() {
    if (detached_memory_ != nullptr) {
        munmap(detached_memory_, length_bytes_);
    }
    if (stream_ != nullptr) {
        const CurrentContext current_context(driver_, context_);
        driver_.cuStreamDestroy_v2(stream_);
    }
    if (context_ != nullptr) {
        driver_.cuDevicePrimaryCtxRelease_v2(device_ordinal_);
    }
}

int CudaMemory::find_allocations() {
    const std::uint64_t end = address_ + length_bytes_;
    for (std::uint64_t begin = address_; begin < end;) {
        const auto buffer_id = driver_.query_buffer_id(begin);
        if (!driver_.is_device_memory(begin) || !buffer_id) {
            return EINVAL;
        }
        // Some drivers do not report where a VMM mapping (cuMemMap) ends. With such a driver, the rest of the region
        // must belong to the allocation at `begin`, so its last byte must have the same buffer id.
        const std::uint64_t allocation_end = std::min(driver_.find_allocation_end(begin).value_or(end), end);
        if (driver_.query_buffer_id(allocation_end - 1) != buffer_id) {
            return EINVAL;
        }
        allocations_.push_back({begin, allocation_end, *buffer_id});
        begin = allocation_end;
    }
    return 0;
}

int CudaMemory::open() {
    if (!driver_.is_device_memory(address_)) {
        return EINVAL;
    }
    const auto device_ordinal = driver_.find_device_of_address(address_);
    if (!device_ordinal) {
        return EINVAL;
    }
    device_ordinal_ = *device_ordinal;
    if (driver_.cuDevicePrimaryCtxRetain(&context_, device_ordinal_) != 0) {
        context_ = nullptr;
        return ENODEV;
    }
    // The driver reports the ends of mappings only to a thread with a current context.
    const CurrentContext current_context(driver_, context_);
    if (!current_context) {
        return ENODEV;
    }
    if (const int error = find_allocations(); error != 0) {
        return error;
    }
    // Like a NIC, a non-blocking stream does not wait for the application's work on the device.
    constexpr unsigned non_blocking = 1; // CU_STREAM_NON_BLOCKING
    if (driver_.cuStreamCreate(&stream_, non_blocking) != 0) {
        stream_ = nullptr;
        return ENOMEM;
    }
    return 0;
}

bool CudaMemory::are_allocations_unchanged(std::uint64_t begin, std::uint64_t end) const {
    for (const AllocationRange& range : allocations_) {
        if (range.begin < end && begin < range.end && driver_.query_buffer_id(range.begin) != range.buffer_id) {
            return false;
        }
    }
    return true;
}

int CudaMemory::detach_if_freed(std::uint64_t offset, std::size_t size_bytes) {
    if (detached_memory_ != nullptr || are_allocations_unchanged(address_ + offset, address_ + offset + size_bytes)) {
        return 0;
    }
    void* const host_memory =
        mmap(nullptr, length_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (host_memory == MAP_FAILED) {
        return errno;
    }
    detached_memory_ = static_cast<std::byte*>(host_memory);
    return 0;
}

int CudaMemory::copy(std::uint64_t offset, std::byte* host_address, std::size_t size_bytes, bool is_to_device) {
    const CurrentContext current_context(driver_, context_);
    if (!current_context) {
        return EIO;
    }
    const int copy_result = is_to_device
                                ? driver_.cuMemcpyHtoDAsync_v2(address_ + offset, host_address, size_bytes, stream_)
                                : driver_.cuMemcpyDtoHAsync_v2(host_address, address_ + offset, size_bytes, stream_);
    return copy_result == 0 && driver_.cuStreamSynchronize(stream_) == 0 ? 0 : EIO;
}

int CudaMemory::read(std::uint64_t offset, BounceBuffer* bounce, std::size_t bounce_offset, std::size_t size_bytes) {
    std::lock_guard lock(mutex_);
    if (const int error = detach_if_freed(offset, size_bytes); error != 0) {
        return error;
    }
    if (detached_memory_ != nullptr) {
        std::memcpy(bounce->data_at(bounce_offset), detached_memory_ + offset, size_bytes);
        return 0;
    }
    return copy(offset, bounce->data_at(bounce_offset), size_bytes, false);
}

int CudaMemory::write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t bounce_offset,
                      std::size_t size_bytes) {
    std::lock_guard lock(mutex_);
    if (const int error = detach_if_freed(offset, size_bytes); error != 0) {
        return error;
    }
    if (detached_memory_ != nullptr) {
        std::memcpy(detached_memory_ + offset, bounce.data_at(bounce_offset), size_bytes);
        return 0;
    }
    return copy(offset, bounce.data_at(bounce_offset), size_bytes, true);
}

} // namespace

int make_cuda_memory(std::uint64_t address, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory) {
    const CudaDriver* const driver = CudaDriver::find_loaded();
    if (driver == nullptr || address + length_bytes < address) {
        return EINVAL;
    }
    auto cuda_memory = std::make_unique<CudaMemory>(*driver, address, length_bytes);
    if (const int error = cuda_memory->open(); error != 0) {
        return error;
    }
    *memory = std::move(cuda_memory);
    return 0;
}

} // namespace gdrkit::twin::verbs
