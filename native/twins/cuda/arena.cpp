// Implements the reservation of device addresses: chunks of PROT_NONE mappings, divided into slots.

#include "cuda/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "model/sockets.hpp"

namespace gdrkit::twin::cuda {
namespace {

constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 30;
// smaller allocations are packed, larger ones are aligned
constexpr std::uint64_t max_packed_bytes = std::uint64_t{1} << 20;

struct Arena {
    std::mutex mutex;
    std::map<std::uint64_t, std::uint64_t> reserved;          // base -> length of every PROT_NONE mapping
    std::map<std::uint64_t, std::vector<std::uint64_t>> free; // size class -> free bases, used last in, first out
    std::uint64_t chunk_next = 0, chunk_end = 0;
    std::uint64_t next_packed_offset_bytes = 0; // offset in its page at which the next small allocation begins
};

Arena& arena() {
    static auto* const the_arena = new Arena;
    return *the_arena;
}

// Map an empty file without access and return the base; 0 on failure. A page beyond the end of a file cannot be pinned
// even by the kernel, which ignores PROT_NONE when it pins pages. So ibv_reg_mr fails with EFAULT for device addresses,
// as it does on a GPU.
std::uint64_t map_inaccessible(std::uint64_t length_bytes) {
    const Fd empty_file(memfd_create("gdrkit-nothing", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!empty_file || fcntl(empty_file.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return 0;
    }
    void* const base = mmap(nullptr, length_bytes, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE, empty_file.get(), 0);
    return base == MAP_FAILED ? 0 : reinterpret_cast<std::uint64_t>(base);
}

// Return an aligned PROT_NONE mapping: map more than needed and unmap the excess.
std::uint64_t map_aligned(std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    const std::uint64_t mapping_bytes = length_bytes + alignment_bytes;
    const std::uint64_t mapping = mapping_bytes < length_bytes ? 0 : map_inaccessible(mapping_bytes);
    if (mapping == 0) {
        return 0;
    }
    const std::uint64_t base = round_up(mapping, alignment_bytes);
    if (base > mapping) {
        munmap(reinterpret_cast<void*>(mapping), base - mapping);
    }
    if (const std::uint64_t rest = mapping + mapping_bytes - (base + length_bytes); rest > 0) {
        munmap(reinterpret_cast<void*>(base + length_bytes), rest);
    }
    return base;
}

// Return new address space from the current chunk. An unused page stays between two allocations.
std::uint64_t place_in_chunk_locked(Arena* all, std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    std::uint64_t base = round_up(all->chunk_next, alignment_bytes);
    if (all->chunk_next == 0 || base + length_bytes + page_bytes > all->chunk_end) {
        const std::uint64_t needed = std::max(chunk_bytes, round_up(length_bytes + page_bytes, vmm_granularity_bytes));
        base = map_aligned(needed, vmm_granularity_bytes);
        if (base == 0) {
            return 0;
        }
        all->reserved.emplace(base, needed);
        all->chunk_end = base + needed;
    }
    all->chunk_next = base + round_up(length_bytes, page_bytes) + page_bytes;
    return base;
}

} // namespace

Slot allocate_slot(std::uint64_t length_bytes) {
    Arena& all = arena();
    std::lock_guard lock(all.mutex);
    Slot slot{0, round_up(length_bytes, address_granularity_bytes)};
    if (auto& free = all.free[slot.size_class_bytes]; !free.empty()) {
        slot.base = free.back();
        free.pop_back();
        return slot;
    }
    if (slot.size_class_bytes >= max_packed_bytes) {
        slot.base = place_in_chunk_locked(&all, slot.size_class_bytes, vmm_granularity_bytes);
        return slot;
    }
    const std::uint64_t begin = all.next_packed_offset_bytes;
    const std::uint64_t page = place_in_chunk_locked(&all, begin + slot.size_class_bytes, page_bytes);
    all.next_packed_offset_bytes = (begin + slot.size_class_bytes) % page_bytes;
    slot.base = page == 0 ? 0 : page + begin;
    return slot;
}

void free_slot(const Slot& slot) {
    Arena& all = arena();
    std::lock_guard lock(all.mutex);
    all.free[slot.size_class_bytes].push_back(slot.base);
}

std::uint64_t reserve_range(std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    const std::uint64_t base = map_aligned(length_bytes, std::max(alignment_bytes, vmm_granularity_bytes));
    if (base != 0) {
        Arena& all = arena();
        std::lock_guard lock(all.mutex);
        all.reserved.emplace(base, length_bytes);
    }
    return base;
}

void free_range(std::uint64_t base, std::uint64_t length_bytes) {
    Arena& all = arena();
    std::lock_guard lock(all.mutex);
    all.reserved.erase(base);
    munmap(reinterpret_cast<void*>(base), length_bytes);
}

bool is_device_address(std::uint64_t address) {
    Arena& all = arena();
    std::lock_guard lock(all.mutex);
    const auto after = all.reserved.upper_bound(address);
    if (after == all.reserved.begin()) {
        return false;
    }
    const auto& [base, length_bytes] = *std::prev(after);
    return address - base < length_bytes;
}

} // namespace gdrkit::twin::cuda
