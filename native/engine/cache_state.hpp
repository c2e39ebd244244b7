// The residency of a file range in the page cache.
#pragma once

#include <cstdint>

namespace gdrkit::engine {

enum class Cached { all, some, none };

struct Residency {
    Cached state = Cached::none;
    std::uint64_t cached_pages = 0;
    std::uint64_t pages = 0;
};

// Returns how much of a range is cached, by cachestat(2) (Linux 6.5), or by mincore(2) of a mapping on older kernels.
// If neither works, the range counts as cached, because a buffered read is always correct. `length` must be above 0,
// and the range must end inside the file.
Residency residency(int fd, std::uint64_t offset, std::uint64_t length);

// Returns the same by mincore only.
Residency residency_by_mincore(int fd, std::uint64_t offset, std::uint64_t length);

} // namespace gdrkit::engine
