// Implements the reservation of device addresses: the twin maps large chunks with PROT_NONE and divides them into
// slots.

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

constexpr std::uint64_t min_chunk_bytes = std::uint64_t{1} << 30;

struct Arena {
    std::mutex mutex;
    std::map<std::uint64_t, std::uint64_t> reserved_ranges; // base -> length of every PROT_NONE mapping
    std::map<std::uint64_t, std::vector<std::uint64_t>>
        free_bases;                                      // size class -> free bases, reused in last-in, first-out order
    std::uint64_t chunk_unused_begin = 0, chunk_end = 0; // first unused address and end of the current chunk
    std::uint64_t next_packed_offset_bytes = 0;          // offset in a page at which the next small allocation begins
};

Arena& arena() {
    static auto* const instance = new Arena;
    return *instance;
}

// Map an empty file with PROT_NONE and return the base; 0 on failure. The kernel cannot pin a page beyond the end of a
// file, so without a peer memory module, ibv_reg_mr fails with EFAULT for device addresses, as on a machine with a GPU.
// If the mapping were anonymous, the kernel could pin its pages, and ibv_reg_mr would succeed.
std::uint64_t map_inaccessible(std::uint64_t length_bytes) {
    const Fd empty_file(memfd_create("gdrkit-nothing", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!empty_file || fcntl(empty_file.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return 0;
    }
    void* const base = mmap(nullptr, length_bytes, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE, empty_file.get(), 0);
    return base == MAP_FAILED ? 0 : reinterpret_cast<std::uint64_t>(base);
}

// Map inaccessible pages and return their aligned base; 0 on failure. Map more than needed, and unmap the excess.
std::uint64_t map_aligned(std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    const std::uint64_t mapping_bytes = length_bytes + alignment_bytes;
    const std::uint64_t mapping_base = mapping_bytes < length_bytes ? 0 : map_inaccessible(mapping_bytes);
    if (mapping_base == 0) {
        return 0;
    }
    const std::uint64_t base = round_up(mapping_base, alignment_bytes);
    if (base > mapping_base) {
        munmap(reinterpret_cast<void*>(mapping_base), base - mapping_base);
    }
    if (const std::uint64_t excess_bytes = mapping_base + mapping_bytes - (base + length_bytes); excess_bytes > 0) {
        munmap(reinterpret_cast<void*>(base + length_bytes), excess_bytes);
    }
    return base;
}

// Return the base of unused addresses in the current chunk; 0 on failure. Map a new chunk if the current one is full.
// One unused page follows each allocation. The exception is an allocation whose length is a multiple of 2 MiB
// (vmm_granularity_bytes): as on an H200, the next allocation may follow it directly.
std::uint64_t take_from_chunk_locked(Arena* address_arena, std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    std::uint64_t base = round_up(address_arena->chunk_unused_begin, alignment_bytes);
    if (address_arena->chunk_unused_begin == 0 || base + length_bytes + page_bytes > address_arena->chunk_end) {
        const std::uint64_t new_chunk_bytes =
            std::max(min_chunk_bytes, round_up(length_bytes + page_bytes, vmm_granularity_bytes));
        base = map_aligned(new_chunk_bytes, vmm_granularity_bytes);
        if (base == 0) {
            return 0;
        }
        address_arena->reserved_ranges.emplace(base, new_chunk_bytes);
        address_arena->chunk_end = base + new_chunk_bytes;
    }
    const bool is_multiple_of_granularity = length_bytes % vmm_granularity_bytes == 0;
    address_arena->chunk_unused_begin =
        base + round_up(length_bytes, page_bytes) + (is_multiple_of_granularity ? 0 : page_bytes);
    return base;
}

} // namespace

AddressSlot allocate_address_slot(std::uint64_t length_bytes) {
    Arena& address_arena = arena();
    std::lock_guard lock(address_arena.mutex);
    AddressSlot slot{0, round_up(length_bytes, address_granularity_bytes)};
    if (auto& free_bases = address_arena.free_bases[slot.size_class_bytes]; !free_bases.empty()) {
        slot.base = free_bases.back();
        free_bases.pop_back();
        return slot;
    }
    if (slot.size_class_bytes >= min_aligned_bytes) {
        slot.base = take_from_chunk_locked(&address_arena, slot.size_class_bytes, vmm_granularity_bytes);
        return slot;
    }
    // Two allocations never share a page. A small allocation begins in a new page, at the page offset at which the
    // previous small allocation ended.
    const std::uint64_t page_offset_bytes = address_arena.next_packed_offset_bytes;
    const std::uint64_t page_base =
        take_from_chunk_locked(&address_arena, page_offset_bytes + slot.size_class_bytes, page_bytes);
    address_arena.next_packed_offset_bytes = (page_offset_bytes + slot.size_class_bytes) % page_bytes;
    slot.base = page_base == 0 ? 0 : page_base + page_offset_bytes;
    return slot;
}

void free_address_slot(const AddressSlot& slot) {
    Arena& address_arena = arena();
    std::lock_guard lock(address_arena.mutex);
    address_arena.free_bases[slot.size_class_bytes].push_back(slot.base);
}

std::uint64_t reserve_addresses(std::uint64_t length_bytes, std::uint64_t alignment_bytes) {
    const std::uint64_t base = map_aligned(length_bytes, std::max(alignment_bytes, vmm_granularity_bytes));
    if (base != 0) {
        Arena& address_arena = arena();
        std::lock_guard lock(address_arena.mutex);
        address_arena.reserved_ranges.emplace(base, length_bytes);
    }
    return base;
}

void free_addresses(std::uint64_t base, std::uint64_t length_bytes) {
    Arena& address_arena = arena();
    std::lock_guard lock(address_arena.mutex);
    address_arena.reserved_ranges.erase(base);
    munmap(reinterpret_cast<void*>(base), length_bytes);
}

bool is_device_address(std::uint64_t address) {
    Arena& address_arena = arena();
    std::lock_guard lock(address_arena.mutex);
    const auto next_range = address_arena.reserved_ranges.upper_bound(address);
    if (next_range == address_arena.reserved_ranges.begin()) {
        return false;
    }
    const auto& [base, length_bytes] = *std::prev(next_range);
    return address - base < length_bytes;
}

} // namespace gdrkit::twin::cuda
