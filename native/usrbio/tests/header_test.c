/*
 * Tests that hf3fs_usrbio.h compiles as C, that its structs have the layout of 3FS, and that the functions check their
 * arguments.
 */
#include <errno.h>
#include <hf3fs_usrbio.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

_Static_assert(sizeof(struct hf3fs_iov) == 312, "iov");
_Static_assert(offsetof(struct hf3fs_iov, iovh) == 8, "iovh");
_Static_assert(offsetof(struct hf3fs_iov, id) == 16, "id");
_Static_assert(offsetof(struct hf3fs_iov, mount_point) == 32, "mount_point");
_Static_assert(offsetof(struct hf3fs_iov, size) == 288, "size");
_Static_assert(offsetof(struct hf3fs_iov, block_size) == 296, "block_size");
_Static_assert(offsetof(struct hf3fs_iov, numa) == 304, "numa");
_Static_assert(sizeof(struct hf3fs_ior) == 600, "ior");
_Static_assert(offsetof(struct hf3fs_ior, iorh) == 312, "iorh");
_Static_assert(offsetof(struct hf3fs_ior, mount_point) == 320, "mount_point");
_Static_assert(offsetof(struct hf3fs_ior, for_read) == 576, "for_read");
_Static_assert(offsetof(struct hf3fs_ior, io_depth) == 580, "io_depth");
_Static_assert(offsetof(struct hf3fs_ior, flags) == 592, "flags");
_Static_assert(sizeof(struct hf3fs_cqe) == 24, "cqe");
_Static_assert(offsetof(struct hf3fs_cqe, result) == 8, "result");
_Static_assert(offsetof(struct hf3fs_cqe, userdata) == 16, "userdata");

#define CHECK_RESULT(value, expected)                                                                                  \
    do {                                                                                                               \
        long actual = (long)(value);                                                                                   \
        if (actual != (long)(expected)) {                                                                              \
            fprintf(stderr, "%s:%d: %s is %ld, not %ld\n", __FILE__, __LINE__, #value, actual, (long)(expected));      \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

int main(void) {
    struct hf3fs_iov iov;
    struct hf3fs_ior ior;
    struct hf3fs_cqe cqe;
    const uint8_t id[16] = {0};
    char byte = 0;
    char long_path[400];
    char mount_point[400];
    size_t hole_bounds[2] = {0, 1};
    int pipe_ends[2];
    memset(&iov, 0, sizeof(iov));
    memset(&ior, 0, sizeof(ior));
    memset(long_path, 'x', sizeof(long_path) - 1);
    long_path[sizeof(long_path) - 1] = 0;

    CHECK_RESULT(hf3fs_iovcreate(NULL, "/tmp", 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovcreate(&iov, NULL, 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovcreate(&iov, "", 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovcreate(&iov, long_path, 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovcreate(&iov, "/tmp", 0, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovcreate(&iov, "/tmp", 4, 5, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovcreate(&iov, "/nowhere", 1, 0, -1), -ENOENT);
    CHECK_RESULT(hf3fs_iovopen(NULL, id, "/tmp", 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovopen(&iov, NULL, "/tmp", 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovopen(&iov, id, "/nowhere", 1, 0, -1), -ENOENT);
    CHECK_RESULT(hf3fs_iovwrap(NULL, &byte, id, "/tmp", 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovwrap(&iov, NULL, id, "/tmp", 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovwrap(&iov, &byte, NULL, "/tmp", 1, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iovwrap(&iov, &byte, id, long_path, 1, 0, -1), -EINVAL);
    hf3fs_iovunlink(NULL);
    hf3fs_iovdestroy(NULL);
    hf3fs_iovdestroy(&iov);

    CHECK_RESULT(hf3fs_ior_size(0), 0);
    CHECK_RESULT(hf3fs_ior_size(-1), 0);
    CHECK_RESULT(hf3fs_ior_size(0x7fffffff), 0);
    /* A ring has 16 bytes of indices, a semaphore of 32 bytes, 96 bytes for each entry and for one entry more, and 4096
     * spare bytes. */
    CHECK_RESULT(hf3fs_ior_size(1), 16 + 32 + 96 * 2 + 4096);
    CHECK_RESULT(hf3fs_ior_size(1023), 16 + 32 + 96 * 1024 + 4096);
    CHECK_RESULT(hf3fs_io_entries(NULL), -EINVAL);
    CHECK_RESULT(hf3fs_io_entries(&ior), -EINVAL);
    ior.iov.size = hf3fs_ior_size(77);
    CHECK_RESULT(hf3fs_io_entries(&ior), 77);

    CHECK_RESULT(hf3fs_iorcreate(NULL, "/tmp", 4, true, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iorcreate(&ior, NULL, 4, true, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iorcreate(&ior, "", 4, true, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iorcreate(&ior, "/tmp", 0, true, 0, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iorcreate(&ior, "/tmp", 4, true, 5, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iorcreate2(&ior, "/nowhere", 4, true, 0, 1, -1), -ENOENT);
    CHECK_RESULT(hf3fs_iorcreate3(&ior, "/nowhere", 4, true, 0, 0, -1, -1), -EINVAL);
    CHECK_RESULT(hf3fs_iorcreate4(&ior, "/nowhere", 4, true, 0, -1, -1, 0), -EINVAL);
    CHECK_RESULT(hf3fs_iorwrap(&ior, NULL, "/tmp", 5000, true, 0, 0, 0, 0), -EINVAL);
    CHECK_RESULT(hf3fs_iorwrap(&ior, &byte, "/tmp", 100, true, 0, 0, 0, 0), -EINVAL);
    ior.iorh = NULL;
    hf3fs_iordestroy(NULL);
    hf3fs_iordestroy(&ior);

    CHECK_RESULT(hf3fs_prep_io(NULL, &iov, true, &byte, 0, 0, 1, NULL), -EINVAL);
    CHECK_RESULT(hf3fs_prep_io(&ior, &iov, true, &byte, 0, 0, 1, NULL), -EINVAL);
    CHECK_RESULT(hf3fs_submit_ios(NULL), -EINVAL);
    CHECK_RESULT(hf3fs_submit_ios(&ior), -EINVAL);
    CHECK_RESULT(hf3fs_wait_for_ios(NULL, &cqe, 1, 0, NULL), -EINVAL);
    CHECK_RESULT(hf3fs_wait_for_ios(&ior, &cqe, 1, 0, NULL), -EINVAL);

    CHECK_RESULT(hf3fs_is_hf3fs(-1), false);
    CHECK_RESULT(pipe(pipe_ends), 0);
    CHECK_RESULT(hf3fs_is_hf3fs(pipe_ends[0]), false);
    CHECK_RESULT(hf3fs_reg_fd(-1, 0), EBADF);
    CHECK_RESULT(hf3fs_reg_fd(0x7fffffff, 0), EBADF);
    CHECK_RESULT(hf3fs_reg_fd(pipe_ends[0], 0), EBADF);
    hf3fs_dereg_fd(-1);
    hf3fs_dereg_fd(0x7fffffff);
    hf3fs_dereg_fd((int)0x80000000);
    CHECK_RESULT(hf3fs_hardlink(NULL, "x"), EINVAL);
    CHECK_RESULT(hf3fs_hardlink("x", NULL), EINVAL);
    CHECK_RESULT(hf3fs_hardlink("/nowhere/x", "/nowhere/y"), ENOENT);
    CHECK_RESULT(hf3fs_punchhole(-1, 1, hole_bounds, hole_bounds + 1, 0), EBADF);
    CHECK_RESULT(hf3fs_punchhole(pipe_ends[1], 0, hole_bounds, hole_bounds + 1, 0), EINVAL);
    CHECK_RESULT(hf3fs_punchhole(pipe_ends[1], 1001, hole_bounds, hole_bounds + 1, 0), EINVAL);
    CHECK_RESULT(hf3fs_punchhole(pipe_ends[1], 1, hole_bounds + 1, hole_bounds, 0), EINVAL);
    CHECK_RESULT(hf3fs_punchhole(pipe_ends[1], 1, NULL, hole_bounds, 0), EINVAL);
    CHECK_RESULT(hf3fs_extract_mount_point(mount_point, 400, NULL), -1);
    CHECK_RESULT(hf3fs_extract_mount_point(mount_point, 400, "/nowhere"), -1);
    CHECK_RESULT(hf3fs_extract_mount_point(mount_point, 400, "/"), -1);
    return 0;
}
