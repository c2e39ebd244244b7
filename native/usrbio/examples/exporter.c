/*
 * The owner of GPU memory. This program exports the memory, waits until another process (importer.c) has read a file
 * into the memory, and writes the content of the memory to standard output.
 */
#include "handle_socket.h"

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s MOUNT BYTES DEVICE SOCKET\n", argv[0]);
        return 1;
    }
    const int device = atoi(argv[3]);
    const size_t iov_bytes = (size_t)strtoull(argv[2], NULL, 10);
    /* Listen first, so that the importer can be started at any time. */
    const struct sockaddr_un address = make_socket_address(argv[4]);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (const struct sockaddr*)&address, sizeof address) != 0 ||
        listen(listener, 1) != 0) {
        fail(argv[4], errno);
    }
    struct hf3fs_iov iov;
    int error = hf3fs_iovcreate_gpu(&iov, argv[1], iov_bytes, 0, device);
    if (error != 0) {
        fail("hf3fs_iovcreate_gpu", error);
    }
    hf3fs_gpu_ipc_handle_t handle;
    error = hf3fs_iov_export_gpu(&iov, &handle);
    if (error != 0) {
        fail("hf3fs_iov_export_gpu", error);
    }
    const int peer_socket = accept(listener, NULL, NULL);
    if (peer_socket < 0) {
        fail("accept", errno);
    }
    transfer_all(send_some, peer_socket, &handle, sizeof handle);
    /* Wait until the importer has finished. */
    char done_byte = 0;
    transfer_all(recv, peer_socket, &done_byte, sizeof done_byte);
    close(peer_socket);
    close(listener);
    unlink(argv[4]);
    use_device(device);
    print_device_memory(iov.base, iov_bytes);
    /* The importer has unmapped the memory, so it may be freed now. */
    hf3fs_iovdestroy_gpu(&iov);
    return 0;
}
