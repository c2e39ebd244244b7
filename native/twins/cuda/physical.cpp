// Physical device memory: allocation from a device's capacity, and memory that stays used after it was freed because a
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

// Memory that its owner has freed but that is still referenced elsewhere.
struct FreedMemory {
    Fd fd;
    std::uint64_t length_bytes = 0;
};

struct MemoryUsage {
    std::mutex mutex;
    std::map<Device, std::uint64_t> used_bytes;
    std::map<Device, std::vector<FreedMemory>> freed;
};

MemoryUsage& memory_usage() {
    static auto* const the_account = new MemoryUsage;
    return *the_account;
}

void reclaim_locked(MemoryUsage* all, Device device) {
    std::erase_if(all->freed[device], [&](const FreedMemory& freed) {
        const bool unreferenced = !has_other_references(freed.fd.get());
        if (unreferenced) {
            all->used_bytes[device] -= freed.length_bytes;
        }
        return unreferenced;
    });
}

bool charge(Device device, std::uint64_t length_bytes) {
    MemoryUsage& all = memory_usage();
    std::lock_guard lock(all.mutex);
    reclaim_locked(&all, device);
    std::uint64_t& used_bytes = all.used_bytes[device];
    if (length_bytes > device_memory_bytes - used_bytes) {
        return false;
    }
    used_bytes += length_bytes;
    return true;
}

void uncharge(Device device, std::uint64_t length_bytes, Fd fd) {
    MemoryUsage& all = memory_usage();
    std::lock_guard lock(all.mutex);
    if (fd && has_other_references(fd.get())) {
        all.freed[device].push_back({std::move(fd), length_bytes});
    } else {
        all.used_bytes[device] -= length_bytes;
    }
}

std::byte* map_shared(int fd, std::uint64_t length_bytes) {
    void* const data = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

} // namespace

Memory::Memory(Fd fd, std::byte* data, std::uint64_t length_bytes, Device device, bool owned)
    : fd_(std::move(fd)), data_(data), length_bytes_(length_bytes), device_(device), owned_(owned) {}

Memory::~Memory() {
    munmap(data_, length_bytes_);
    if (owned_) {
        uncharge(device_, length_bytes_, std::move(fd_));
    }
}

Result Memory::make(Device device, std::uint64_t length_bytes, std::shared_ptr<Memory>* memory) {
    if (length_bytes > device_memory_bytes) {
        return out_of_memory;
    }
    const std::uint64_t page_multiple_bytes = round_up(length_bytes, page_bytes);
    if (!charge(device, page_multiple_bytes)) {
        return out_of_memory;
    }
    Fd fd(make_device_memory(page_multiple_bytes));
    std::byte* const data = fd ? map_shared(fd.get(), page_multiple_bytes) : nullptr;
    if (data == nullptr) {
        uncharge(device, page_multiple_bytes, Fd());
        return out_of_memory;
    }
    memory->reset(new Memory(std::move(fd), data, page_multiple_bytes, device, true));
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

std::uint64_t free_bytes(Device device) {
    MemoryUsage& all = memory_usage();
    std::lock_guard lock(all.mutex);
    reclaim_locked(&all, device);
    return device_memory_bytes - all.used_bytes[device];
}

void reclaim_unreferenced_memory() {
    MemoryUsage& all = memory_usage();
    std::lock_guard lock(all.mutex);
    for (const auto& [device, freed] : all.freed) {
        reclaim_locked(&all, device);
    }
}

} // namespace gdrkit::twin::cuda
