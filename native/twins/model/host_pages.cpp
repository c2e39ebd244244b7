// Implements the check of host pages by madvise(MADV_POPULATE_*), or by /proc/self/maps on kernels before 5.14.

#include "model/host_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace gdrkit::twin {
namespace {

// Return whether the kernel supports MADV_POPULATE_READ, which Linux 5.14 introduced. To find out, populate a mapped
// page, which must succeed, and again after munmap, which must fail. The second call is needed because QEMU's user mode
// ignores unknown advice and reports success for every address.
bool is_populate_supported() {
    static const bool is_supported = [] {
        const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        void* const probe_page = mmap(nullptr, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (probe_page == MAP_FAILED) {
            return false;
        }
        const bool is_populated = madvise(probe_page, page_bytes, MADV_POPULATE_READ) == 0;
        munmap(probe_page, page_bytes);
        return is_populated && madvise(probe_page, page_bytes, MADV_POPULATE_READ) != 0;
    }();
    return is_supported;
}

bool is_mapped_in_proc_maps(std::uint64_t wanted_begin, std::uint64_t wanted_end, bool must_be_writable) {
    std::ifstream maps("/proc/self/maps");
    std::uint64_t covered_end = wanted_begin;
    for (std::string line; covered_end < wanted_end && std::getline(maps, line);) {
        // A line begins with "<begin>-<end> rwxp", the addresses in hexadecimal digits.
        char* parse_end = nullptr;
        const std::uint64_t begin = std::strtoull(line.c_str(), &parse_end, 16);
        const std::uint64_t end = std::strtoull(parse_end + 1, &parse_end, 16);
        if (end <= covered_end) {
            continue;
        }
        if (begin > covered_end || parse_end[1] != 'r' || (must_be_writable && parse_end[2] != 'w')) {
            return false;
        }
        covered_end = end;
    }
    return covered_end >= wanted_end;
}

} // namespace

int check_mapped(std::uint64_t begin, std::uint64_t end, bool must_be_writable) {
    if (!is_populate_supported()) {
        return is_mapped_in_proc_maps(begin, end, must_be_writable) ? 0 : EFAULT;
    }
    int result = 0;
    do {
        result = madvise(reinterpret_cast<void*>(begin), end - begin,
                         must_be_writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    // The memory is not mapped, the mapping does not permit the access, or the mapping extends beyond the end of its
    // file. A driver that pins the pages returns EFAULT in each of these cases.
    return result == 0 ? 0 : EFAULT;
}

} // namespace gdrkit::twin
