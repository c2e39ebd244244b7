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

struct Arena {
    std::mutex mutex;
    std::map<std::uint64_t, std::uint64_t> reserved;                // base -> length of every PROT_NONE mapping
    std::map<std::uint64_t, std::vector<std::uint64_t>> free_bases; // size class -> free bases, used last in, first out
    std::uint64_t chunk_next = 0, chunk_end = 0;                    // first unused address and end of the current chunk
    std::uint64_t next_packed_offset_bytes = 0; // offset in its page at which the next small allocation begins
};

Arena& arena() {
    static auto* const instance = new Arena;
    return *instance;
}

// Map an empty file with PROT_NONE and return the base; 0 on failure. PROT_NONE alone is not enough, because the kernel
// can pin such pages all the same. But it cannot pin a page beyond the end of a file. So ibv_reg_mr fails with EFAULT
// for device addresses, as on a machine with a GPU.
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
    if (const std::uint64_t excess_bytes = mapping + mapping_bytes - (base + length_bytes); excess_bytes > 0) {
        munmap(reinterpret_cast<void*>(base + length_bytes), excess_bytes);
    }
    return base;
}

// Return the base of unused addresses in the current chunk; 0 on failure. Map a new chunk if the current one is
// full. One unused page follows an allocation, unless it fills whole granules. As on an H200, the next allocation can
// then follow directly.
std::uint64_t take_from_chunk_locked(Arena* state, std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    std::uint64_t base = round_up(state->chunk_next, alignment_bytes);
    if (state->chunk_next == 0 || base + length_bytes + page_bytes > state->chunk_end) {
        const std::uint64_t new_chunk_bytes =
            std::max(chunk_bytes, round_up(length_bytes + page_bytes, vmm_granularity_bytes));
        base = map_aligned(new_chunk_bytes, vmm_granularity_bytes);
        if (base == 0) {
            return 0;
        }
        state->reserved.emplace(base, new_chunk_bytes);
        state->chunk_end = base + new_chunk_bytes;
    }
    const bool fills_granules = length_bytes % vmm_granularity_bytes == 0;
    state->chunk_next = base + round_up(length_bytes, page_bytes) + (fills_granules ? 0 : page_bytes);
    return base;
}

} // namespace

Slot allocate_slot(std::uint64_t length_bytes) {
    Arena& state = arena();
    std::lock_guard lock(state.mutex);
    Slot slot{0, round_up(length_bytes, address_granularity_bytes)};
    if (auto& free_bases = state.free_bases[slot.size_class_bytes]; !free_bases.empty()) {
        slot.base = free_bases.back();
        free_bases.pop_back();
        return slot;
    }
    if (slot.size_class_bytes >= min_aligned_bytes) {
        slot.base = take_from_chunk_locked(&state, slot.size_class_bytes, vmm_granularity_bytes);
        return slot;
    }
    // Two allocations never share a page. A small allocation begins in a new page, at the page offset at which the
    // previous allocation ended.
    const std::uint64_t page_offset_bytes = state.next_packed_offset_bytes;
    const std::uint64_t page = take_from_chunk_locked(&state, page_offset_bytes + slot.size_class_bytes, page_bytes);
    state.next_packed_offset_bytes = (page_offset_bytes + slot.size_class_bytes) % page_bytes;
    slot.base = page == 0 ? 0 : page + page_offset_bytes;
    return slot;
}

void free_slot(const Slot& slot) {
    Arena& state = arena();
    std::lock_guard lock(state.mutex);
    state.free_bases[slot.size_class_bytes].push_back(slot.base);
}

std::uint64_t reserve_addresses(std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    const std::uint64_t base = map_aligned(length_bytes, std::max(alignment_bytes, vmm_granularity_bytes));
    if (base != 0) {
        Arena& state = arena();
        std::lock_guard lock(state.mutex);
        state.reserved.emplace(base, length_bytes);
    }
    return base;
}

void free_addresses(std::uint64_t base, std::uint64_t length_bytes) {
    Arena& state = arena();
    std::lock_guard lock(state.mutex);
    state.reserved.erase(base);
    munmap(reinterpret_cast<void*>(base), length_bytes);
}

bool is_device_address(std::uint64_t address) {
    Arena& state = arena();
    std::lock_guard lock(state.mutex);
    const auto next_range = state.reserved.upper_bound(address);
    if (next_range == state.reserved.begin()) {
        return false;
    }
    const auto& [base, length_bytes] = *std::prev(next_range);
    return address - base < length_bytes;
}

} // namespace gdrkit::twin::cuda
