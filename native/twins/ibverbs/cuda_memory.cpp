#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "ibverbs/cuda_bridge.hpp"
#include "ibverbs/memory.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A part of the range that is one allocation, and who it was when it was registered.
struct Part {
    std::uint64_t begin, end;
    std::uint64_t buffer_id;
};

// A primary context that is current on this thread as long as the object lives.
class Current {
public:
    Current(const CudaDriver& driver, CudaDriver::Handle context) : driver_(driver) {
        pushed_ = driver_.cuCtxPushCurrent_v2(context) == 0;
    }
    ~Current() {
        CudaDriver::Handle popped = nullptr;
        if (pushed_) {
            driver_.cuCtxPopCurrent_v2(&popped);
        }
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    explicit operator bool() const { return pushed_; }

private:
    const CudaDriver& driver_;
    bool pushed_ = false;
};

// A NIC that holds a GPU's pages reaches them also after the memory was freed, and never what got the address next (as
// was seen on an H200). Here the driver can only reach what the address means now: so once the identity changes, what a
// peer writes goes to memory of the region's own, and what it reads comes from there.
class CudaMemory : public Memory {
public:
    CudaMemory(const CudaDriver& driver, std::uint64_t address, std::uint64_t length_bytes)
        : driver_(driver), address_(address), length_bytes_(length_bytes) {}
    ~CudaMemory() override;

    int open();
    int read(std::uint64_t offset, Bounce* bounce, std::size_t at, std::size_t size) override;
    int write(std::uint64_t offset, const Bounce& bounce, std::size_t at, std::size_t size) override;

private:
    int find_parts();
    int copy(std::uint64_t offset, std::byte* host, std::size_t size, bool to_device);
    [[nodiscard]] bool intact(std::uint64_t begin, std::uint64_t end) const;
    int orphan_or_intact(std::uint64_t offset, std::size_t size);

    const CudaDriver& driver_;
    const std::uint64_t address_;
    const std::uint64_t length_bytes_;
    std::mutex mutex_;
    std::vector<Part> parts_;
    int device_ = -1;
    CudaDriver::Handle context_ = nullptr;
    CudaDriver::Handle stream_ = nullptr;
    std::byte* orphan_ = nullptr;
};

CudaMemory::~CudaMemory() {
    if (orphan_ != nullptr) {
        munmap(orphan_, length_bytes_);
    }
    if (stream_ != nullptr) {
        const Current current(driver_, context_);
        driver_.cuStreamDestroy_v2(stream_);
    }
    if (context_ != nullptr) {
        driver_.cuDevicePrimaryCtxRelease_v2(device_);
    }
}

int CudaMemory::find_parts() {
    const std::uint64_t end = address_ + length_bytes_;
    for (std::uint64_t at = address_; at < end;) {
        const auto id = driver_.buffer_id(at);
        if (!driver_.is_device_memory(at) || !id) {
            return EINVAL;
        }
        // Of VMM memory a driver may not say where a mapping ends; the last byte must then be of the same one.
        const std::uint64_t part_end = std::min(driver_.end_of_allocation(at).value_or(end), end);
        if (driver_.buffer_id(part_end - 1) != id) {
            return EINVAL;
        }
        parts_.push_back({at, part_end, *id});
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
    // Also before the look at the chunks: the driver tells the ends of mappings only to a thread with a context.
    const Current current(driver_, context_);
    if (!current) {
        return ENODEV;
    }
    if (const int error = find_parts(); error != 0) {
        return error;
    }
    // A stream of our own that does not wait for the application's: a NIC does not either.
    constexpr unsigned non_blocking = 1;
    if (driver_.cuStreamCreate(&stream_, non_blocking) != 0) {
        stream_ = nullptr;
        return ENOMEM;
    }
    return 0;
}

bool CudaMemory::intact(std::uint64_t begin, std::uint64_t end) const {
    for (const Part& part : parts_) {
        if (part.begin < end && begin < part.end && driver_.buffer_id(part.begin) != part.buffer_id) {
            return false;
        }
    }
    return true;
}

int CudaMemory::orphan_or_intact(std::uint64_t offset, std::size_t size) {
    if (orphan_ != nullptr || intact(address_ + offset, address_ + offset + size)) {
        return 0;
    }
    void* const memory =
        mmap(nullptr, length_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return errno;
    }
    orphan_ = static_cast<std::byte*>(memory);
    return 0;
}

int CudaMemory::copy(std::uint64_t offset, std::byte* host, std::size_t size, bool to_device) {
    const Current current(driver_, context_);
    if (!current) {
        return EIO;
    }
    const int copied = to_device ? driver_.cuMemcpyHtoDAsync_v2(address_ + offset, host, size, stream_)
                                 : driver_.cuMemcpyDtoHAsync_v2(host, address_ + offset, size, stream_);
    return copied == 0 && driver_.cuStreamSynchronize(stream_) == 0 ? 0 : EIO;
}

int CudaMemory::read(std::uint64_t offset, Bounce* bounce, std::size_t at, std::size_t size) {
    std::lock_guard lock(mutex_);
    if (const int error = orphan_or_intact(offset, size); error != 0) {
        return error;
    }
    if (orphan_ != nullptr) {
        std::memcpy(bounce->at(at), orphan_ + offset, size);
        return 0;
    }
    return copy(offset, bounce->at(at), size, false);
}

int CudaMemory::write(std::uint64_t offset, const Bounce& bounce, std::size_t at, std::size_t size) {
    std::lock_guard lock(mutex_);
    if (const int error = orphan_or_intact(offset, size); error != 0) {
        return error;
    }
    if (orphan_ != nullptr) {
        std::memcpy(orphan_ + offset, bounce.at(at), size);
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
    auto made = std::make_unique<CudaMemory>(*driver, address, length_bytes);
    if (const int error = made->open(); error != 0) {
        return error;
    }
    *memory = std::move(made);
    return 0;
}

} // namespace gdrkit::twin::verbs
