/* One read of a file into device memory, from its first byte. */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "example.h"

static inline size_t size_of_file(const char* path) {
    struct stat status;
    if (stat(path, &status) != 0) {
        fail(path, errno);
    }
    return (size_t)status.st_size;
}

/* Returns how many bytes were read into `pointer`, which is inside the iov. */
static inline size_t read_file(const char* mount, const char* path, const struct hf3fs_iov* iov, void* pointer,
                               size_t bytes) {
    struct hf3fs_ior ior;
    int error = hf3fs_iorcreate4(&ior, mount, 64, true, 0, 0, -1, 0);
    if (error != 0) {
        fail("hf3fs_iorcreate4", error);
    }
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fail(path, errno);
    }
    /* A value above 0 is an errno. */
    error = hf3fs_reg_fd(fd, 0);
    if (error > 0) {
        fail("hf3fs_reg_fd", error);
    }
    const int index = hf3fs_prep_io(&ior, iov, true, pointer, fd, 0, bytes, NULL);
    if (index < 0) {
        fail("hf3fs_prep_io", index);
    }
    error = hf3fs_submit_ios(&ior);
    if (error != 0) {
        fail("hf3fs_submit_ios", error);
    }
    const size_t done = wait_for_one(&ior);
    hf3fs_dereg_fd(fd);
    close(fd);
    hf3fs_iordestroy(&ior);
    return done;
}
