// Physical device memory: allocation from a device's capacity, and freed memory that still counts as used, because a
// dma-buf or another process references it.
#include <sys/mman.h>

#include <mutex>
#include <utility>
#include <vector>

#include "cuda/device.hpp"
#include "cuda/memory.hpp"
#include "model/dmabuf.hpp"

namespace gdrkit::twin::cuda {
namespace {

// Memory that this process has freed, but that a dma-buf or another process still references.
struct FreedMemory {
    Fd fd;
    std::uint64_t length_bytes = 0;
};

struct MemoryUsage {
    std::mutex mutex;
    std::map<Device, std::uint64_t> used_bytes;
    std::map<Device, std::vector<FreedMemory>> freed_memory;
};

MemoryUsage& memory_usage() {
    static auto* const instance = new MemoryUsage;
    return *instance;
}

// Give freed memory back to the device's capacity if it is no longer referenced. The caller holds the mutex.
void reclaim_locked(MemoryUsage* usage, Device device) {
    std::erase_if(usage->freed_memory[device], [&](const FreedMemory& freed_memory) {
        const bool is_unreferenced = !has_other_references(freed_memory.fd.get());
        if (is_unreferenced) {
            usage->used_bytes[device] -= freed_memory.length_bytes;
        }
        return is_unreferenced;
    });
}

// Count the bytes as used. Return false if the device does not have so many free bytes.
bool add_used_bytes(Device device, std::uint64_t length_bytes) {
    MemoryUsage& usage = memory_usage();
    std::lock_guard lock(usage.mutex);
    reclaim_locked(&usage, device);
    std::uint64_t& used_bytes = usage.used_bytes[device];
    if (length_bytes > device_capacity_bytes - used_bytes) {
        return false;
    }
    used_bytes += length_bytes;
    return true;
}

// Count the bytes as free. If the memory is still referenced elsewhere, count them as free when the memory is
// reclaimed.
void subtract_used_bytes(Device device, std::uint64_t length_bytes, Fd fd) {
    MemoryUsage& usage = memory_usage();
    std::lock_guard lock(usage.mutex);
    if (fd && has_other_references(fd.get())) {
        usage.freed_memory[device].push_back({std::move(fd), length_bytes});
    } else {
        usage.used_bytes[device] -= length_bytes;
    }
}

std::byte* map_shared(int fd, std::uint64_t length_bytes) {
    void* const data = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

} // namespace

Memory::Memory(Fd fd, std::byte* data, std::uint64_t length_bytes, Device device, bool is_owner)
    : fd_(std::move(fd)), data_(data), length_bytes_(length_bytes), device_(device), is_owner_(is_owner) {
    if (is_owner) {
        gpu_view_.emplace(data, length_bytes);
    }
}

Memory::~Memory() {
    gpu_view_.reset();
    munmap(data_, length_bytes_);
    if (is_owner_) {
        subtract_used_bytes(device_, length_bytes_, std::move(fd_));
    }
}

Result Memory::make(Device device, std::uint64_t length_bytes, std::shared_ptr<Memory>* memory) {
    if (length_bytes > device_capacity_bytes) {
        return out_of_memory;
    }
    const std::uint64_t rounded_bytes = round_up(length_bytes, page_bytes);
    if (!add_used_bytes(device, rounded_bytes)) {
        return out_of_memory;
    }
    Fd fd(make_device_memory(rounded_bytes));
    std::byte* const data = fd ? map_shared(fd.get(), rounded_bytes) : nullptr;
    if (data == nullptr) {
        subtract_used_bytes(device, rounded_bytes, Fd());
        return out_of_memory;
    }
    memory->reset(new Memory(std::move(fd), data, rounded_bytes, device, true));
    return success;
}

Result Memory::adopt(Fd fd, std::uint64_t length_bytes, Device device, std::shared_ptr<Memory>* memory) {
    std::byte* const data = map_shared(fd.get(), length_bytes);
    if (data == nullptr) {
        return out_of_memory;
    }
    memory->reset(new Memory(std::move(fd), data, length_bytes, device, false));
    return success;
}

std::uint64_t count_free_bytes(Device device) {
    MemoryUsage& usage = memory_usage();
    std::lock_guard lock(usage.mutex);
    reclaim_locked(&usage, device);
    return device_capacity_bytes - usage.used_bytes[device];
}

void reclaim_unreferenced_memory() {
    MemoryUsage& usage = memory_usage();
    std::lock_guard lock(usage.mutex);
    for (const auto& [device, freed_memory] : usage.freed_memory) {
        reclaim_locked(&usage, device);
    }
}

} // namespace gdrkit::twin::cuda
