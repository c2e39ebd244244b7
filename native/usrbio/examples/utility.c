/* Prints the types of a GPU iov and a host iov, and synchronizes both. */
#include "example.h"

static void describe_and_synchronize(const char* label, const struct hf3fs_iov* iov) {
    if (hf3fs_iov_is_gpu(iov)) {
        printf("%s: GPU iov on device %d\n", label, hf3fs_iov_gpu_device(iov));
    } else {
        printf("%s: host iov\n", label);
    }
    /*
     * Direction 0: call hf3fs_iovsync before the NIC reads bytes that the GPU has written. Direction 1: call it after
     * the NIC has written bytes that the GPU will read.
     */
    for (int direction = 0; direction <= 1; ++direction) {
        const int error = hf3fs_iovsync(iov, direction);
        if (error != 0) {
            fail("hf3fs_iovsync", error);
        }
    }
}

int main(int argc, char** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MOUNT DEVICE\n", argv[0]);
        return 1;
    }
    struct hf3fs_iov device_iov, host_iov;
    int error = hf3fs_iovcreate_gpu(&device_iov, argv[1], 65536, 0, atoi(argv[2]));
    if (error != 0) {
        fail("hf3fs_iovcreate_gpu", error);
    }
    error = hf3fs_iovcreate(&host_iov, argv[1], 65536, 0, -1);
    if (error != 0) {
        fail("hf3fs_iovcreate", error);
    }
    describe_and_synchronize("device", &device_iov);
    describe_and_synchronize("host", &host_iov);
    error = hf3fs_iovsync_gpu(&device_iov, 0);
    if (error != 0) {
        fail("hf3fs_iovsync_gpu", error);
    }
    hf3fs_iovdestroy(&host_iov);
    /* hf3fs_iovdestroy also destroys a GPU iov, like hf3fs_iovdestroy_gpu. */
    hf3fs_iovdestroy(&device_iov);
    return 0;
}
