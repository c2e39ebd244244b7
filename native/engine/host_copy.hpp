// Bytes between a file and host memory, by pread and pwrite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/failure.hpp"
#include "engine/file.hpp"

namespace gdrkit::engine {

// What one range of a file came to: so many bytes from its beginning; short without a failure at the end of the file.
struct Moved {
    std::uint64_t bytes = 0;
    bool direct = false;
    std::optional<Failure> failure;
};

Moved read_buffered(File& file, std::uint64_t offset, std::uint64_t length, std::byte* to);
Moved write_buffered(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* from);

// By O_DIRECT, with what does not fill a block at either end: `block` is aligned, and the bytes of the range begin at
// block + lead_of(file, offset); room for a block more at both ends. Where O_DIRECT is refused, as without it.
Moved read_direct(File& file, std::uint64_t offset, std::uint64_t length, std::byte* block);
Moved write_direct(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* block);

inline std::uint64_t lead_of(const File& file, std::uint64_t offset) {
    return offset & (file.alignment_bytes() - 1);
}

} // namespace gdrkit::engine
