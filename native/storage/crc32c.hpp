// CRC32C (Castagnoli) by multiplying polynomials or by the instruction, as the processor can, or by tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::storage {

// `initial` is the CRC of what came before.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t initial = 0) noexcept;

// The same by tables, on any processor.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t initial = 0) noexcept;

// Of `count` chunks one behind the other, a value each. By the instruction three at once, since it takes three cycles
// and can begin every cycle.
void crc32c_chunks(const std::byte* data, std::size_t chunk_bytes, std::size_t count, std::uint32_t* values) noexcept;

// Of first and second together, when `second` is the CRC of `second_bytes` bytes.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) noexcept;

} // namespace gdrkit::storage
