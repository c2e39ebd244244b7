// Queries how much of a file range is in the page cache (its residency), with cachestat(2) or mincore(2).
#include "engine/cache_state.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

namespace gdrkit::engine {
namespace {

// The headers of Linux 6.5 define this number and these structures. These copies are for builds with older headers.
constexpr long cachestat_syscall = 451;
struct CachestatRange {
    std::uint64_t offset;
    std::uint64_t length;
};
struct CachestatCounts { // Numbers of pages.
    std::uint64_t cached;
    std::uint64_t dirty;
    std::uint64_t writeback;
    std::uint64_t evicted;
    std::uint64_t recently_evicted;
};
static_assert(sizeof(CachestatRange) == 16 && sizeof(CachestatCounts) == 40);
#ifdef SYS_cachestat
static_assert(SYS_cachestat == cachestat_syscall);
#endif

const std::uint64_t page_bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
// Whether the kernel has cachestat(2). The first ENOSYS clears the flag.
std::atomic<bool> has_cachestat{true};

Residency make_residency(std::uint64_t cached_pages_count, std::uint64_t pages_count) {
    const CacheState state = cached_pages_count >= pages_count ? CacheState::all
                             : cached_pages_count == 0         ? CacheState::none
                                                               : CacheState::some;
    return {
        .state = state, .cached_pages_count = std::min(cached_pages_count, pages_count), .pages_count = pages_count};
}

std::uint64_t count_pages(std::uint64_t offset, std::uint64_t length) {
    return (offset + length + page_bytes - 1) / page_bytes - offset / page_bytes;
}

} // namespace

Residency query_residency_by_mincore(int fd, std::uint64_t offset, std::uint64_t length) {
    const std::uint64_t pages_count = count_pages(offset, length);
    const std::uint64_t mapping_offset = offset / page_bytes * page_bytes;
    void* const mapping =
        mmap(nullptr, pages_count * page_bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(mapping_offset));
    if (mapping == MAP_FAILED) {
        return make_residency(pages_count, pages_count); // The residency is unknown, so the range counts as cached.
    }
    std::vector<unsigned char> page_states(pages_count);
    const bool is_known = mincore(mapping, pages_count * page_bytes, page_states.data()) == 0;
    munmap(mapping, pages_count * page_bytes);
    if (!is_known) {
        return make_residency(pages_count, pages_count);
    }
    // Bit 0 of the byte of a page is set if the page is in the page cache; see mincore(2).
    const auto cached_pages_count =
        std::count_if(page_states.begin(), page_states.end(), [](unsigned char page_state) { return page_state & 1; });
    return make_residency(static_cast<std::uint64_t>(cached_pages_count), pages_count);
}

Residency query_residency(int fd, std::uint64_t offset, std::uint64_t length) {
    if (has_cachestat.load(std::memory_order_relaxed)) {
        CachestatRange range{offset, length};
        CachestatCounts counts{};
        if (syscall(cachestat_syscall, fd, &range, &counts, 0) == 0) {
            return make_residency(counts.cached, count_pages(offset, length));
        }
        if (errno != ENOSYS) {
            return make_residency(1,
                                  1); // This file system, e.g. hugetlbfs, has no cachestat. The range counts as cached.
        }
        has_cachestat.store(false, std::memory_order_relaxed);
    }
    return query_residency_by_mincore(fd, offset, length);
}

} // namespace gdrkit::engine
