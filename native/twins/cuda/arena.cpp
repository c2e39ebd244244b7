#include "cuda/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "model/rendezvous.hpp"

namespace gdrkit::twin::cuda {
namespace {

constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 30;
constexpr std::uint64_t small_bytes = std::uint64_t{1} << 20; // smaller ones are packed, larger ones are aligned

struct Arena {
    std::mutex mutex;
    std::map<std::uint64_t, std::uint64_t> reserved;          // base -> length, of everything that is PROT_NONE
    std::map<std::uint64_t, std::vector<std::uint64_t>> free; // size class -> bases, the last one is taken first
    std::uint64_t chunk_at = 0, chunk_end = 0;
    std::uint64_t packing_bytes = 0; // where in its page the next small allocation begins
};

Arena& arena() {
    static auto* const the_arena = new Arena;
    return *the_arena;
}

// Of a file without a byte: where there is no page, not even the kernel finds one, which looks past the protection when
// it pins memory to be read (a NIC gets EFAULT for every device address, as it does on a GPU).
std::uint64_t map_nothing(std::uint64_t length_bytes) {
    const Fd nothing(memfd_create("gdrkit-nothing", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!nothing || fcntl(nothing.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return 0;
    }
    void* const base = mmap(nullptr, length_bytes, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE, nothing.get(), 0);
    return base == MAP_FAILED ? 0 : reinterpret_cast<std::uint64_t>(base);
}

// An aligned PROT_NONE mapping: a larger one, trimmed.
std::uint64_t map_aligned(std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    const std::uint64_t whole_bytes = length_bytes + alignment_bytes;
    const std::uint64_t whole = whole_bytes < length_bytes ? 0 : map_nothing(whole_bytes);
    if (whole == 0) {
        return 0;
    }
    const std::uint64_t base = round_up(whole, alignment_bytes);
    if (base > whole) {
        munmap(reinterpret_cast<void*>(whole), base - whole);
    }
    if (const std::uint64_t rest = whole + whole_bytes - (base + length_bytes); rest > 0) {
        munmap(reinterpret_cast<void*>(base + length_bytes), rest);
    }
    return base;
}

// A new place in the chunk in use; a page that belongs to nobody stays between two allocations.
std::uint64_t place_locked(Arena* all, std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    std::uint64_t base = round_up(all->chunk_at, alignment_bytes);
    if (all->chunk_at == 0 || base + length_bytes + page_bytes > all->chunk_end) {
        const std::uint64_t needed = std::max(chunk_bytes, round_up(length_bytes + page_bytes, vmm_granularity_bytes));
        base = map_aligned(needed, vmm_granularity_bytes);
        if (base == 0) {
            return 0;
        }
        all->reserved.emplace(base, needed);
        all->chunk_end = base + needed;
    }
    all->chunk_at = base + round_up(length_bytes, page_bytes) + page_bytes;
    return base;
}

} // namespace

Slot take_slot(std::uint64_t length_bytes) {
    Arena& all = arena();
    std::lock_guard lock(all.mutex);
    Slot slot{0, round_up(length_bytes, address_granularity_bytes)};
    if (auto& free = all.free[slot.size_class_bytes]; !free.empty()) {
        slot.base = free.back();
        free.pop_back();
        return slot;
    }
    if (slot.size_class_bytes >= small_bytes) {
        slot.base = place_locked(&all, slot.size_class_bytes, vmm_granularity_bytes);
        return slot;
    }
    const std::uint64_t begin = all.packing_bytes;
    const std::uint64_t page = place_locked(&all, begin + slot.size_class_bytes, page_bytes);
    all.packing_bytes = (begin + slot.size_class_bytes) % page_bytes;
    slot.base = page == 0 ? 0 : page + begin;
    return slot;
}

void give_slot(const Slot& slot) {
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
