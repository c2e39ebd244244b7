// The residency of a file range: how much of it is in the page cache. The copy engine reads a range with O_DIRECT if
// most of it is not cached.
#pragma once

#include <cstdint>

namespace gdrkit::engine {

enum class CacheState { all, some, none };

// The residency of one file range.
struct Residency {
    CacheState state = CacheState::none;
    std::uint64_t cached_pages_count = 0;
    std::uint64_t pages_count = 0;
};

// Returns how much of a range is in the page cache. Uses cachestat(2) (Linux 6.5 and newer), else mincore(2) of a
// mapping. If neither call works, the range counts as cached, and the caller reads it through the page cache, which
// always returns the right bytes. `length` must be above 0, and the range must end inside the file.
Residency query_residency(int fd, std::uint64_t offset, std::uint64_t length);

// Like query_residency, but uses only mincore(2).
Residency query_residency_by_mincore(int fd, std::uint64_t offset, std::uint64_t length);

} // namespace gdrkit::engine
