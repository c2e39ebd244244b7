// Functions that compute CRC32C (Castagnoli) checksums of frames and of the chunks of files. They use carry-less
// multiplication or the CRC instruction if the processor has them, otherwise tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::storage {

// Returns the CRC of the data, continued from `initial_crc`, the CRC of the bytes before the data.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t initial_crc = 0) noexcept;

// Does the same as crc32c, but always with tables. The tests compare the results of both functions.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t initial_crc = 0) noexcept;

// Stores in `crcs` one CRC for each of `chunks_count` consecutive chunks. One call is faster than a call of crc32c for
// each chunk.
void crc32c_chunks(const std::byte* data, std::size_t chunk_bytes, std::size_t chunks_count,
                   std::uint32_t* crcs) noexcept;

// Returns the CRC of two consecutive byte ranges from their CRCs. `second_bytes` is the length of the second range.
std::uint32_t crc32c_combine(std::uint32_t first_crc, std::uint32_t second_crc, std::uint64_t second_bytes) noexcept;

} // namespace gdrkit::storage
