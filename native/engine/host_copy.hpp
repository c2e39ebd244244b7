// Copies between a file and host memory, by pread and pwrite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/failure.hpp"
#include "engine/file.hpp"

namespace gdrkit::engine {

// The result of one range: the bytes moved from its beginning. It is short without a failure at the end of the file.
struct Moved {
    std::uint64_t bytes = 0;
    bool direct = false;
    std::optional<Failure> failure;
};

Moved read_buffered(File& file, std::uint64_t offset, std::uint64_t length, std::byte* to);
Moved write_buffered(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* from);

// Move a range by O_DIRECT, and partial blocks at both ends without it. `block` is aligned, the bytes of the range
// begin at block + lead_of(file, offset), and there is space for one more block at both ends. If O_DIRECT is not
// supported, the whole range is moved without it.
Moved read_direct(File& file, std::uint64_t offset, std::uint64_t length, std::byte* block);
Moved write_direct(File& file, std::uint64_t offset, std::uint64_t length, const std::byte* block);

inline std::uint64_t lead_of(const File& file, std::uint64_t offset) {
    return offset & (file.alignment_bytes() - 1);
}

} // namespace gdrkit::engine
