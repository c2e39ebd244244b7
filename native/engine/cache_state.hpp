// Which bytes of a file the kernel has in its page cache.
#pragma once

#include <cstdint>

namespace gdrkit::engine {

enum class Cached { all, some, none };

struct Residency {
    Cached state = Cached::none;
    std::uint64_t cached_pages = 0;
    std::uint64_t pages = 0;
};

// Asks cachestat(2) (Linux 6.5); where the kernel has none, mincore(2) of a mapping. What cannot be asked counts as
// cached: a buffered read is right for everything. `length` is above 0 and the range ends inside the file.
Residency residency(int fd, std::uint64_t offset, std::uint64_t length);

// The same by mincore alone.
Residency residency_by_mincore(int fd, std::uint64_t offset, std::uint64_t length);

} // namespace gdrkit::engine
