// Physical device memory and its account.
#include <sys/mman.h>

#include <mutex>
#include <utility>
#include <vector>

#include "cuda/device.hpp"
#include "cuda/memory.hpp"
#include "model/dmabuf.hpp"

namespace gdrkit::twin::cuda {
namespace {

// Freed by its owner, but somebody else holds it.
struct Kept {
    Fd fd;
    std::uint64_t length_bytes = 0;
};

struct Account {
    std::mutex mutex;
    std::map<Device, std::uint64_t> used_bytes;
    std::map<Device, std::vector<Kept>> kept;
};

Account& account() {
    static auto* const the_account = new Account;
    return *the_account;
}

void sweep_locked(Account* all, Device device) {
    std::erase_if(all->kept[device], [&](const Kept& kept) {
        const bool gone = !held_elsewhere(kept.fd.get());
        if (gone) {
            all->used_bytes[device] -= kept.length_bytes;
        }
        return gone;
    });
}

bool charge(Device device, std::uint64_t length_bytes) {
    Account& all = account();
    std::lock_guard lock(all.mutex);
    sweep_locked(&all, device);
    std::uint64_t& used_bytes = all.used_bytes[device];
    if (length_bytes > device_memory_bytes - used_bytes) {
        return false;
    }
    used_bytes += length_bytes;
    return true;
}

void give_back(Device device, std::uint64_t length_bytes, Fd fd) {
    Account& all = account();
    std::lock_guard lock(all.mutex);
    if (fd && held_elsewhere(fd.get())) {
        all.kept[device].push_back({std::move(fd), length_bytes});
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
        give_back(device_, length_bytes_, std::move(fd_));
    }
}

Result Memory::make(Device device, std::uint64_t length_bytes, std::shared_ptr<Memory>* memory) {
    if (length_bytes > device_memory_bytes) {
        return out_of_memory;
    }
    const std::uint64_t whole_bytes = round_up(length_bytes, page_bytes);
    if (!charge(device, whole_bytes)) {
        return out_of_memory;
    }
    Fd fd(make_device_memory(whole_bytes));
    std::byte* const data = fd ? map_shared(fd.get(), whole_bytes) : nullptr;
    if (data == nullptr) {
        give_back(device, whole_bytes, Fd());
        return out_of_memory;
    }
    memory->reset(new Memory(std::move(fd), data, whole_bytes, device, true));
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
    Account& all = account();
    std::lock_guard lock(all.mutex);
    sweep_locked(&all, device);
    return device_memory_bytes - all.used_bytes[device];
}

void sweep() {
    Account& all = account();
    std::lock_guard lock(all.mutex);
    for (const auto& [device, kept] : all.kept) {
        sweep_locked(&all, device);
    }
}

} // namespace gdrkit::twin::cuda
