// Copies between a file and host memory, by pread and pwrite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/failure.hpp"
#include "engine/file.hpp"

namespace gdrkit::engine {

// The result of a read or write of one range: the bytes moved, from the beginning of the range. At the end of the file
// they are fewer than requested, without a failure.
struct IoResult {
    std::uint64_t bytes = 0;
    bool direct = false; // Some bytes bypassed the page cache.
    std::optional<Failure> failure;
};

IoResult read_buffered(File& file, std::uint64_t offset, std::uint64_t length, std::byte* to);
IoResult write_buffered(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* from);

// Move a range by O_DIRECT, and partial blocks at both ends without it. `block` is aligned, the bytes of the range
// begin at block + leading_bytes(file, offset), and there is space for one more block at both ends. If O_DIRECT is not
// supported, the whole range is moved without it.
IoResult read_direct(File& file, std::uint64_t offset, std::uint64_t length, std::byte* block);
IoResult write_direct(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* block);

inline std::uint64_t leading_bytes(const File& file, std::uint64_t offset) {
    return offset & (file.alignment_bytes() - 1);
}

} // namespace gdrkit::engine
