// CRC32C (Castagnoli), by carry-less multiplication or the CRC instruction if the processor has them, or by tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::storage {

// Returns the CRC of the data. `initial` is the CRC of the bytes before it.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t initial = 0) noexcept;

// Same as above, by tables, on any processor.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t initial = 0) noexcept;

// Computes one CRC for each of `count` consecutive chunks. With the CRC instruction, three chunks are processed at
// once, because it takes three cycles and can start in every cycle.
void crc32c_chunks(const std::byte* data, std::size_t chunk_bytes, std::size_t count, std::uint32_t* values) noexcept;

// Returns the CRC of both parts together, where `second` is the CRC of `second_bytes` bytes.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) noexcept;

} // namespace gdrkit::storage
