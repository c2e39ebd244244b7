/* Receives the handle of the GPU memory of another process (exporter.c), and reads a file into that memory. */
#include "handle_socket.h"
#include "read_file.h"

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MOUNT FILE SOCKET\n", argv[0]);
        return 1;
    }
    const struct sockaddr_un address = make_socket_address(argv[3]);
    const int peer_socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (peer_socket < 0 || connect(peer_socket, (const struct sockaddr*)&address, sizeof address) != 0) {
        fail(argv[3], errno);
    }
    hf3fs_gpu_ipc_handle_t handle;
    transfer_all(recv, peer_socket, &handle, sizeof handle);
    struct hf3fs_iov iov;
    int error = hf3fs_iov_import_gpu(&iov, &handle, argv[1]);
    if (error != 0) {
        fail("hf3fs_iov_import_gpu", error);
    }
    const size_t read_bytes = read_file(argv[1], argv[2], &iov, iov.base, iov.size);
    /* Direction 1: the work of the GPU sees the bytes that the NIC has written. */
    error = hf3fs_iovsync_gpu(&iov, 1);
    if (error != 0) {
        fail("hf3fs_iovsync_gpu", error);
    }
    printf("%zu bytes were read into the memory of another process, on device %d\n", read_bytes,
           hf3fs_iov_gpu_device(&iov));
    /* Unmap the memory first. Then send the byte that tells the exporter that it may read and free the memory. */
    hf3fs_iovdestroy_gpu(&iov);
    char done_byte = 1;
    transfer_all(send_some, peer_socket, &done_byte, sizeof done_byte);
    close(peer_socket);
    return 0;
}
