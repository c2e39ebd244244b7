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

// Return whether the kernel supports MADV_POPULATE_READ, which Linux 5.14 introduced. Populate a page to find out, and
// a page that is no longer mapped: QEMU's user mode ignores unknown advice, and reports success for every address.
bool kernel_populates() {
    static const bool is_supported = [] {
        const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        void* const probe = mmap(nullptr, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (probe == MAP_FAILED) {
            return false;
        }
        const bool populated = madvise(probe, page_bytes, MADV_POPULATE_READ) == 0;
        munmap(probe, page_bytes);
        return populated && madvise(probe, page_bytes, MADV_POPULATE_READ) != 0;
    }();
    return is_supported;
}

bool is_mapped_in_proc_maps(std::uint64_t begin_wanted, std::uint64_t end_wanted, bool writable) {
    std::ifstream maps("/proc/self/maps");
    std::uint64_t covered = begin_wanted;
    for (std::string line; covered < end_wanted && std::getline(maps, line);) {
        char* parse_end = nullptr;
        const std::uint64_t begin = std::strtoull(line.c_str(), &parse_end, 16);
        const std::uint64_t end = std::strtoull(parse_end + 1, &parse_end, 16);
        if (end <= covered) {
            continue;
        }
        if (begin > covered || parse_end[1] != 'r' || (writable && parse_end[2] != 'w')) {
            return false;
        }
        covered = end;
    }
    return covered >= end_wanted;
}

} // namespace

int check_mapped(std::uint64_t begin, std::uint64_t end, bool writable) {
    if (!kernel_populates()) {
        return is_mapped_in_proc_maps(begin, end, writable) ? 0 : EFAULT;
    }
    int result = 0;
    do {
        result =
            madvise(reinterpret_cast<void*>(begin), end - begin, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    // The memory is not mapped, the mapping does not permit the access, or the mapping extends beyond the end of its
    // file. A driver that pins the pages returns EFAULT in each of these cases.
    return result == 0 ? 0 : EFAULT;
}

} // namespace gdrkit::twin
