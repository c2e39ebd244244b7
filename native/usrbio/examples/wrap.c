/* Reads a file into the middle of GPU memory that this program allocates, and writes the file to standard output. */
#include <sys/random.h>

#include "read_file.h"

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MOUNT FILE DEVICE\n", argv[0]);
        return 1;
    }
    const char *const mount = argv[1], *const path = argv[2];
    const int device = atoi(argv[3]);
    const size_t file_bytes = get_file_size(path), iov_offset = 4096;
    /* The iov is only a part of one allocation, as in frameworks that place many tensors in one allocation. */
    use_device(device);
    uint8_t* const memory = allocate_on_device(iov_offset + file_bytes + 1);
    uint8_t iov_uuid[16];
    if (getrandom(iov_uuid, sizeof iov_uuid, 0) != sizeof iov_uuid) {
        fail("getrandom", errno);
    }
    struct hf3fs_iov iov;
    /* The iov is one byte longer than the file, because an iov for an empty file must have at least one byte. */
    int error = hf3fs_iovwrap_gpu(&iov, memory + iov_offset, iov_uuid, mount, file_bytes + 1, 0, device);
    if (error != 0) {
        fail("hf3fs_iovwrap_gpu", error);
    }
    const size_t read_bytes = read_file(mount, path, &iov, memory + iov_offset, file_bytes + 1);
    /* Direction 1: the work of the GPU sees the bytes that the NIC has written. */
    error = hf3fs_iovsync_gpu(&iov, 1);
    if (error != 0) {
        fail("hf3fs_iovsync_gpu", error);
    }
    print_device_memory(memory + iov_offset, read_bytes);
    /* hf3fs_iovdestroy_gpu only withdraws the publication of a wrapped iov. This program frees the memory. */
    hf3fs_iovdestroy_gpu(&iov);
    free_on_device(memory);
    return 0;
}
