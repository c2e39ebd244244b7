/* Reads a file into the middle of GPU memory that the caller has allocated, and writes the file to standard output. */
#include <sys/random.h>

#include "read_file.h"

int main(int count, char** arguments) {
    if (count != 4) {
        fprintf(stderr, "usage: %s MOUNT FILE DEVICE\n", arguments[0]);
        return 1;
    }
    const char *const mount = arguments[1], *const path = arguments[2];
    const int device = atoi(arguments[3]);
    const size_t bytes = size_of_file(path), offset = 4096;
    /* The iov is only a part of one allocation, as in frameworks that place many tensors in one allocation. */
    use_device(device);
    uint8_t* const memory = allocate_on_device(offset + bytes + 1);
    uint8_t id[16];
    if (getrandom(id, sizeof id, 0) != sizeof id) {
        fail("getrandom", errno);
    }
    struct hf3fs_iov iov;
    int error = hf3fs_iovwrap_gpu(&iov, memory + offset, id, mount, bytes + 1, 0, device);
    if (error != 0) {
        fail("hf3fs_iovwrap_gpu", error);
    }
    const size_t read_bytes = read_file(mount, path, &iov, memory + offset, bytes + 1);
    error = hf3fs_iovsync_gpu(&iov, 1);
    if (error != 0) {
        fail("hf3fs_iovsync_gpu", error);
    }
    print_device_memory(memory + offset, read_bytes);
    /* Withdraws the registration; the memory stays the caller's. */
    hf3fs_iovdestroy_gpu(&iov);
    free_on_device(memory);
    return 0;
}
