/* Reads a file into GPU memory that the library allocates, and writes that memory to standard output. */
#include "read_file.h"

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MOUNT FILE DEVICE\n", argv[0]);
        return 1;
    }
    const char *const mount = argv[1], *const path = argv[2];
    const int device = atoi(argv[3]);
    const size_t file_bytes = get_file_size(path);
    struct hf3fs_iov iov;
    /* An iov must have at least one byte, also for an empty file. */
    int error = hf3fs_iovcreate_gpu(&iov, mount, file_bytes == 0 ? 1 : file_bytes, 0, device);
    if (error != 0) {
        fail("hf3fs_iovcreate_gpu", error);
    }
    const size_t read_bytes = read_file(mount, path, &iov, iov.base, iov.size);
    /* Direction 1: kernels that start after this call see the bytes that the NIC has written. */
    error = hf3fs_iovsync_gpu(&iov, 1);
    if (error != 0) {
        fail("hf3fs_iovsync_gpu", error);
    }
    use_device(device);
    print_device_memory(iov.base, read_bytes);
    hf3fs_iovdestroy_gpu(&iov);
    return 0;
}
