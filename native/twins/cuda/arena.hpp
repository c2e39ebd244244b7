// Device addresses: reserved in this process without any access for the CPU, so that a CPU memcpy on them faults.
#pragma once

#include <cstdint>

namespace gdrkit::twin::cuda {

inline constexpr std::uint64_t page_bytes = 4096;
inline constexpr std::uint64_t address_granularity_bytes = 512; // of cuMemAlloc, as on an H200
inline constexpr std::uint64_t vmm_granularity_bytes = std::uint64_t{2} << 20;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// A place for an allocation: its address, and how far into its first page it begins. As on an H200, small allocations
// are packed at multiples of 512 bytes, so that only the first of them is sure to begin a page.
struct Slot {
    std::uint64_t base = 0;
    std::uint64_t size_class_bytes = 0;

    [[nodiscard]] std::uint64_t page_offset_bytes() const { return base % page_bytes; }
};

// The slot that was given back last for this size, else a new one; base 0: no address space is left.
Slot take_slot(std::uint64_t length_bytes);
void give_slot(const Slot& slot);

// An address range for cuMemAddressReserve; 0 when there is none. Unlike slots it is unmapped when given back.
std::uint64_t reserve_range(std::uint64_t length_bytes, std::uint64_t alignment_bytes);
void free_range(std::uint64_t base, std::uint64_t length_bytes);

// Whether the address is a device address of this process, allocated or not.
bool is_device_address(std::uint64_t address);

} // namespace gdrkit::twin::cuda
