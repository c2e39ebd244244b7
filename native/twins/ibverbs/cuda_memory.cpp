// Memory of a region that only the CUDA driver can access: copies go through the driver that the process has loaded.

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

// A part of the region that is one allocation, with the allocation's identity at registration.
struct AllocationRange {
    std::uint64_t begin, end;
    std::uint64_t buffer_id;
};

// Makes a primary context current on this thread for the lifetime of the object.
class CurrentContext {
public:
    CurrentContext(const CudaDriver& driver, CudaDriver::Handle context) : driver_(driver) {
        pushed_ = driver_.cuCtxPushCurrent_v2(context) == 0;
    }
    ~CurrentContext() {
        CudaDriver::Handle popped = nullptr;
        if (pushed_) {
            driver_.cuCtxPopCurrent_v2(&popped);
        }
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    explicit operator bool() const { return pushed_; }

private:
    const CudaDriver& driver_;
    bool pushed_ = false;
};

// A NIC that has pinned GPU pages accesses them even after the memory was freed, and never accesses the allocation that
// gets the address next (observed on an H200). The driver can only access the present allocation at an address. So once
// the identity has changed, writes of peers go to separate memory of this region, and reads come from there.
class CudaMemory : public Memory {
public:
    CudaMemory(const CudaDriver& driver, std::uint64_t address, std::uint64_t length_bytes)
        : driver_(driver), address_(address), length_bytes_(length_bytes) {}
    ~CudaMemory() override;

    int open();
    int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t at, std::size_t size) override;
    int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t at, std::size_t size) override;

private:
    int find_allocations();
    int copy(std::uint64_t offset, std::byte* host, std::size_t size, bool to_device);
    [[nodiscard]] bool allocations_unchanged(std::uint64_t begin, std::uint64_t end) const;
    int detach_if_freed(std::uint64_t offset, std::size_t size);

    const CudaDriver& driver_;
    const std::uint64_t address_;
    const std::uint64_t length_bytes_;
    std::mutex mutex_;
    std::vector<AllocationRange> allocations_;
    int device_ = -1;
    CudaDriver::Handle context_ = nullptr;
    CudaDriver::Handle stream_ = nullptr;
    std::byte* detached_memory_ = nullptr;
};

CudaMemory::~CudaMemory() {
    if (detached_memory_ != nullptr) {
        munmap(detached_memory_, length_bytes_);
    }
    if (stream_ != nullptr) {
        const CurrentContext current(driver_, context_);
        driver_.cuStreamDestroy_v2(stream_);
    }
    if (context_ != nullptr) {
        driver_.cuDevicePrimaryCtxRelease_v2(device_);
    }
}

int CudaMemory::find_allocations() {
    const std::uint64_t end = address_ + length_bytes_;
    for (std::uint64_t at = address_; at < end;) {
        const auto id = driver_.buffer_id(at);
        if (!driver_.is_device_memory(at) || !id) {
            return EINVAL;
        }
        // A driver may not report where a VMM mapping ends. Then the last byte must belong to the same allocation.
        const std::uint64_t part_end = std::min(driver_.end_of_allocation(at).value_or(end), end);
        if (driver_.buffer_id(part_end - 1) != id) {
            return EINVAL;
        }
        allocations_.push_back({at, part_end, *id});
        at = part_end;
    }
    return 0;
}

int CudaMemory::open() {
    if (!driver_.is_device_memory(address_)) {
        return EINVAL;
    }
    const auto device = driver_.device_of(address_);
    if (!device) {
        return EINVAL;
    }
    device_ = *device;
    if (driver_.cuDevicePrimaryCtxRetain(&context_, device_) != 0) {
        context_ = nullptr;
        return ENODEV;
    }
    // The driver reports the ends of mappings only to a thread with a current context.
    const CurrentContext current(driver_, context_);
    if (!current) {
        return ENODEV;
    }
    if (const int error = find_allocations(); error != 0) {
        return error;
    }
    // A non-blocking stream does not wait for the application's work, as a NIC does not.
    constexpr unsigned non_blocking = 1;
    if (driver_.cuStreamCreate(&stream_, non_blocking) != 0) {
        stream_ = nullptr;
        return ENOMEM;
    }
    return 0;
}

bool CudaMemory::allocations_unchanged(std::uint64_t begin, std::uint64_t end) const {
    for (const AllocationRange& part : allocations_) {
        if (part.begin < end && begin < part.end && driver_.buffer_id(part.begin) != part.buffer_id) {
            return false;
        }
    }
    return true;
}

int CudaMemory::detach_if_freed(std::uint64_t offset, std::size_t size) {
    if (detached_memory_ != nullptr || allocations_unchanged(address_ + offset, address_ + offset + size)) {
        return 0;
    }
    void* const memory =
        mmap(nullptr, length_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return errno;
    }
    detached_memory_ = static_cast<std::byte*>(memory);
    return 0;
}

int CudaMemory::copy(std::uint64_t offset, std::byte* host, std::size_t size, bool to_device) {
    const CurrentContext current(driver_, context_);
    if (!current) {
        return EIO;
    }
    const int copied = to_device ? driver_.cuMemcpyHtoDAsync_v2(address_ + offset, host, size, stream_)
                                 : driver_.cuMemcpyDtoHAsync_v2(host, address_ + offset, size, stream_);
    return copied == 0 && driver_.cuStreamSynchronize(stream_) == 0 ? 0 : EIO;
}

int CudaMemory::read(std::uint64_t offset, BounceBuffer* bounce, std::size_t at, std::size_t size) {
    std::lock_guard lock(mutex_);
    if (const int error = detach_if_freed(offset, size); error != 0) {
        return error;
    }
    if (detached_memory_ != nullptr) {
        std::memcpy(bounce->at(at), detached_memory_ + offset, size);
        return 0;
    }
    return copy(offset, bounce->at(at), size, false);
}

int CudaMemory::write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t at, std::size_t size) {
    std::lock_guard lock(mutex_);
    if (const int error = detach_if_freed(offset, size); error != 0) {
        return error;
    }
    if (detached_memory_ != nullptr) {
        std::memcpy(detached_memory_ + offset, bounce.at(at), size);
        return 0;
    }
    return copy(offset, bounce.at(at), size, true);
}

} // namespace

int make_cuda_memory(std::uint64_t address, std::uint64_t length_bytes, std::unique_ptr<Memory>* memory) {
    const CudaDriver* const driver = CudaDriver::loaded();
    if (driver == nullptr || address + length_bytes < address) {
        return EINVAL;
    }
    auto created = std::make_unique<CudaMemory>(*driver, address, length_bytes);
    if (const int error = created->open(); error != 0) {
        return error;
    }
    *memory = std::move(created);
    return 0;
}

} // namespace gdrkit::twin::verbs
