// How much of a file range is in the page cache (its residency), queried with cachestat(2) or mincore(2).
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

// Linux 6.5 defines this number and these structures in its headers. The copies are for builds with older headers.
constexpr long cachestat_syscall = 451;
struct CachestatRange {
    std::uint64_t offset;
    std::uint64_t length;
};
struct CachestatCounts {
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
std::atomic<bool> has_cachestat{true};

Residency make_residency(std::uint64_t cached, std::uint64_t pages) {
    const CacheState state = cached >= pages ? CacheState::all : cached == 0 ? CacheState::none : CacheState::some;
    return {.state = state, .cached_pages = std::min(cached, pages), .pages = pages};
}

std::uint64_t count_pages(std::uint64_t offset, std::uint64_t length) {
    return (offset + length + page_bytes - 1) / page_bytes - offset / page_bytes;
}

} // namespace

Residency query_residency_by_mincore(int fd, std::uint64_t offset, std::uint64_t length) {
    const std::uint64_t pages = count_pages(offset, length);
    const std::uint64_t begin = offset / page_bytes * page_bytes;
    void* const mapping = mmap(nullptr, pages * page_bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(begin));
    if (mapping == MAP_FAILED) {
        return make_residency(pages, pages);
    }
    std::vector<unsigned char> resident(pages);
    const bool is_known = mincore(mapping, pages * page_bytes, resident.data()) == 0;
    munmap(mapping, pages * page_bytes);
    if (!is_known) {
        return make_residency(pages, pages);
    }
    const auto cached = std::count_if(resident.begin(), resident.end(), [](unsigned char page) { return page & 1; });
    return make_residency(static_cast<std::uint64_t>(cached), pages);
}

Residency query_residency(int fd, std::uint64_t offset, std::uint64_t length) {
    if (has_cachestat.load(std::memory_order_relaxed)) {
        CachestatRange range{offset, length};
        CachestatCounts counts{};
        if (syscall(cachestat_syscall, fd, &range, &counts, 0) == 0) {
            return make_residency(counts.cached, count_pages(offset, length));
        }
        if (errno != ENOSYS) {
            return make_residency(1, 1); // The range counts as cached. For example, hugetlbfs has no cachestat.
        }
        has_cachestat.store(false, std::memory_order_relaxed);
    }
    return query_residency_by_mincore(fd, offset, length);
}

} // namespace gdrkit::engine
