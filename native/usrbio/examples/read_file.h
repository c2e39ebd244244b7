/* Helpers of the examples: the size of a file, and a read of a file into device memory by one operation of a ring. */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "example.h"

static inline size_t get_file_size(const char* path) {
    struct stat attributes;
    if (stat(path, &attributes) != 0) {
        fail(path, errno);
    }
    return (size_t)attributes.st_size;
}

/*
 * Reads at most `bytes_max` bytes from the beginning of the file to `pointer`, which is inside the iov. Returns how
 * many bytes were read. Exits if a call fails.
 */
static inline size_t read_file(const char* mount, const char* path, const struct hf3fs_iov* iov, void* pointer,
                               size_t bytes_max) {
    struct hf3fs_ior ior;
    /* Arguments after the mount: 64 entries, for reads, io_depth 0, timeout 0, any NUMA node (-1), no flags. */
    int error = hf3fs_iorcreate4(&ior, mount, 64, true, 0, 0, -1, 0);
    if (error != 0) {
        fail("hf3fs_iorcreate4", error);
    }
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fail(path, errno);
    }
    /* Unlike the other functions, hf3fs_reg_fd returns a positive errno. */
    error = hf3fs_reg_fd(fd, 0);
    if (error > 0) {
        fail("hf3fs_reg_fd", error);
    }
    const int operation_index = hf3fs_prep_io(&ior, iov, true, pointer, fd, 0, bytes_max, NULL);
    if (operation_index < 0) {
        fail("hf3fs_prep_io", operation_index);
    }
    error = hf3fs_submit_ios(&ior);
    if (error != 0) {
        fail("hf3fs_submit_ios", error);
    }
    const size_t read_bytes = wait_for_completion(&ior);
    hf3fs_dereg_fd(fd);
    close(fd);
    hf3fs_iordestroy(&ior);
    return read_bytes;
}
