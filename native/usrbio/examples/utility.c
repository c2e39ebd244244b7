/* Prints the type of iovs, of a GPU iov and of a host iov, and synchronizes both. */
#include "example.h"

static void describe(const char* name, const struct hf3fs_iov* iov) {
    if (hf3fs_iov_is_gpu(iov)) {
        printf("%s: GPU iov on device %d\n", name, hf3fs_iov_gpu_device(iov));
    } else {
        printf("%s: host iov\n", name);
    }
    /*
     * Direction 0: call it before the NIC reads bytes that the GPU has written. Direction 1: call it after the NIC has
     * written bytes that the GPU will read.
     */
    for (int direction = 0; direction <= 1; ++direction) {
        const int error = hf3fs_iovsync(iov, direction);
        if (error != 0) {
            fail("hf3fs_iovsync", error);
        }
    }
}

int main(int count, char** arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: %s MOUNT DEVICE\n", arguments[0]);
        return 1;
    }
    struct hf3fs_iov device, host;
    int error = hf3fs_iovcreate_gpu(&device, arguments[1], 65536, 0, atoi(arguments[2]));
    if (error != 0) {
        fail("hf3fs_iovcreate_gpu", error);
    }
    error = hf3fs_iovcreate(&host, arguments[1], 65536, 0, -1);
    if (error != 0) {
        fail("hf3fs_iovcreate", error);
    }
    describe("device", &device);
    describe("host", &host);
    error = hf3fs_iovsync_gpu(&device, 0);
    if (error != 0) {
        fail("hf3fs_iovsync_gpu", error);
    }
    hf3fs_iovdestroy(&host);
    /* hf3fs_iovdestroy also destroys a GPU iov, like hf3fs_iovdestroy_gpu. */
    hf3fs_iovdestroy(&device);
    return 0;
}
