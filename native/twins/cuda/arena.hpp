// Allocates the device addresses of the CUDA twin. The twin reserves them without CPU access, so a CPU access through a
// device pointer faults, as with a GPU without unified memory.
#pragma once

#include <cstdint>

namespace gdrkit::twin::cuda {

inline constexpr std::uint64_t page_bytes = 4096;
inline constexpr std::uint64_t address_granularity_bytes = 512; // alignment of cuMemAlloc, as on an H200
// Granularity of cuMemCreate in bytes, as on an H200.
inline constexpr std::uint64_t vmm_granularity_bytes = std::uint64_t{2} << 20;
// Allocations of this size or larger begin at a multiple of vmm_granularity_bytes. Smaller allocations are packed.
inline constexpr std::uint64_t min_aligned_bytes = std::uint64_t{1} << 20;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// The address of an allocation and its size class. The size class is the length, rounded up to a multiple of 512 bytes;
// a freed slot is reused only for an allocation of the same size class. As on an H200, small allocations begin at
// multiples of 512 bytes, so most of them are not page-aligned.
struct AddressSlot {
    std::uint64_t base = 0;
    std::uint64_t size_class_bytes = 0;

    [[nodiscard]] std::uint64_t get_page_offset_bytes() const { return base % page_bytes; }
};

// Return a slot of at least `length_bytes`: the most recently freed slot of that size class, or a new slot. Its base is
// 0 if no address space is left.
AddressSlot allocate_address_slot(std::uint64_t length_bytes);
void free_address_slot(const AddressSlot& slot);

// Reserve an address range for cuMemAddressReserve and return its base; 0 on failure.
std::uint64_t reserve_addresses(std::uint64_t length_bytes, std::uint64_t alignment_bytes);
// Unmap a range of reserve_addresses(). free_address_slot(), in contrast, keeps the addresses reserved for later slots.
void free_addresses(std::uint64_t base, std::uint64_t length_bytes);

// Return whether the address lies in a reserved range of this process, allocated or not.
bool is_device_address(std::uint64_t address);

} // namespace gdrkit::twin::cuda
