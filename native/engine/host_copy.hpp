// Copies between a file and host memory with pread and pwrite, through the page cache or with O_DIRECT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/failure.hpp"
#include "engine/file.hpp"

namespace gdrkit::engine {

// The result of a read or write of one range. A read that reaches the end of the file moves fewer bytes than requested,
// without a failure.
struct IoResult {
    std::uint64_t bytes = 0;  // Bytes that were moved, from the beginning of the range.
    bool used_direct = false; // Some bytes bypassed the page cache.
    std::optional<Failure> failure;
};

IoResult read_buffered(File& file, std::uint64_t offset, std::uint64_t length, std::byte* to);
IoResult write_buffered(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* from);

// read_direct() and write_direct() move a range with O_DIRECT. A write moves the partial blocks at both ends through
// the page cache. `aligned_buffer` is aligned memory, with space for one more block at both ends. The bytes of the
// range begin at aligned_buffer + get_offset_in_block(file, offset). If the file does not support O_DIRECT, the whole
// range is moved through the page cache.
IoResult read_direct(File& file, std::uint64_t offset, std::uint64_t length, std::byte* aligned_buffer);
IoResult write_direct(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* aligned_buffer);

// Returns the distance of an offset from the beginning of its block in the file.
inline std::uint64_t get_offset_in_block(const File& file, std::uint64_t offset) {
    return offset & (file.alignment_bytes() - 1);
}

} // namespace gdrkit::engine
