// Helpers for the tests of the C library: files, rings, and a count of the shared memory of this process.
#pragma once

#include "test_mount.hpp"
#include "tests/check.hpp"
#include "usrbio/include/hf3fs_usrbio.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <source_location>
#include <string>
#include <vector>

namespace gdrkit::usrbio::test {

// Names of all shared memory that this process has created; client_fixture.cpp adds them. The tests count these names
// and not the files in /dev/shm, because other processes also have files there.
inline std::mutex created_shm_names_mutex;
inline std::vector<std::string> created_shm_names;

// Returns how many of the names in created_shm_names still exist in /dev/shm.
inline std::size_t count_existing_shm_names() {
    const std::lock_guard lock(created_shm_names_mutex);
    return static_cast<std::size_t>(
        std::count_if(created_shm_names.begin(), created_shm_names.end(),
                      [](const std::string& name) { return std::filesystem::exists("/dev/shm" + name); }));
}

// Returns the time of CLOCK_REALTIME `milliseconds` after now, as a deadline for hf3fs_wait_for_ios.
inline timespec make_deadline_after(long milliseconds) {
    timespec deadline{};
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_nsec += milliseconds % 1000 * 1000000;
    deadline.tv_sec += milliseconds / 1000 + deadline.tv_nsec / 1000000000;
    deadline.tv_nsec %= 1000000000;
    return deadline;
}

template <typename Condition>
void wait_until_true(Condition condition, std::source_location caller_location = std::source_location::current()) {
    for (int i = 0; i < 5000 && !condition(); ++i) {
        usleep(1000);
    }
    if (!condition()) {
        std::fprintf(stderr, "%s:%u: the condition did not become true within 5 s\n", caller_location.file_name(),
                     static_cast<unsigned>(caller_location.line()));
        std::abort();
    }
}

// An open file in a mount.
struct File {
    File(const Mount& mount, const char* name, int flags = O_RDWR | O_CREAT) : path(mount.file_path(name)) {
        fd = open(path.c_str(), flags | O_CLOEXEC, 0600);
        CHECK(fd >= 0);
    }
    ~File() { close(fd); }
    std::string path;
    int fd;
};

// An iov, a ring for reads, a ring for writes and a registered file.
struct Session {
    explicit Session(Mount& mount, int entries = 16, std::size_t block_size = 0) : file(mount, "data") {
        CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 1 << 20, block_size, -1), 0);
        CHECK_EQUAL(hf3fs_iorcreate(&read_ring, mount.path(), entries, true, 0, -1), 0);
        CHECK_EQUAL(hf3fs_iorcreate(&write_ring, mount.path(), entries, false, 0, -1), 0);
        registered_fd = hf3fs_reg_fd(file.fd, 0);
        CHECK(registered_fd <= 0);
    }
    ~Session() {
        hf3fs_dereg_fd(registered_fd);
        hf3fs_iordestroy(&read_ring);
        hf3fs_iordestroy(&write_ring);
        hf3fs_iovdestroy(&iov);
    }
    // Prepares a read and returns the result of hf3fs_prep_io.
    int prepare_read(std::size_t iov_offset, std::uint64_t length, std::size_t file_offset = 0,
                     std::uintptr_t userdata = 0) {
        return hf3fs_prep_io(&read_ring, &iov, true, iov.base + iov_offset, registered_fd, file_offset, length,
                             reinterpret_cast<void*>(userdata));
    }
    File file;
    hf3fs_iov iov{};
    hf3fs_ior read_ring{};
    hf3fs_ior write_ring{};
    int registered_fd = 0; // Returned by hf3fs_reg_fd: -fd, where fd is the library's duplicate of the descriptor.
};

} // namespace gdrkit::usrbio::test
