"""Share GPU memory with another process: by CUDA IPC, or by a dma-buf for a process without CUDA."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from gdrkit import cuda, host, verbs
from gdrkit.registration import ShareKind, device_of, export_memory, gdr_handle, import_dmabuf, import_memory, receive


def run_owner() -> None:
    """Allocate memory, send three handles of it, and wait until the other process has written into it."""
    own_socket, peer_socket = socket.socketpair()
    command = [sys.executable, __file__, str(peer_socket.fileno())]
    with own_socket, cuda.Device(0) as device, device.allocate(1 << 20) as memory:
        with subprocess.Popen(command, pass_fds=[peer_socket.fileno()]) as child:
            peer_socket.close()
            # The first handle (80 bytes) is for programs that support only the first GDR interface of hf3fs.
            own_socket.sendall(gdr_handle.export_gdr(memory))
            for kind in (ShareKind.IPC, ShareKind.DMABUF):
                with export_memory(memory, kind=kind, offset_bytes=4096, length_bytes=65536) as message:
                    message.send(own_socket)
            assert own_socket.recv(4) == b"done"
            assert memory.read(length_bytes=3) == b"gdr"
            assert memory.read(offset_bytes=4096, length_bytes=5) == b"hello"
        assert child.returncode == 0
    print("the other process wrote into the memory")


def run_importer(socket_fd: int) -> None:
    """Receive the three handles: write into the memory by the first two, and register the dma-buf with a NIC."""
    host.die_with_parent(os.getppid())
    with socket.socket(fileno=socket_fd) as connection:
        handle_bytes = connection.recv(gdr_handle.GDR_HANDLE_BYTES, socket.MSG_WAITALL)
        assert gdr_handle.GdrHandle.parse(handle_bytes).length_bytes == 1 << 20
        with cuda.Device(0) as device, gdr_handle.import_gdr(device, handle_bytes) as shared_memory:
            shared_memory.write(b"gdr")
        with (
            receive(connection, timeout_ms=10_000) as message,
            device_of(message.handle) as device,
            import_memory(device, message) as shared_memory,
        ):
            shared_memory.write(b"hello")
        (nic,) = verbs.open_active_nics(count_max=1)
        with (
            nic,
            receive(connection, timeout_ms=10_000) as message,
            import_dmabuf(message) as dmabuf,
            nic.register_dmabuf(dmabuf) as region,
        ):
            assert region.length_bytes == 65536
        connection.send(b"done")


if len(sys.argv) > 1:
    run_importer(int(sys.argv[1]))
else:
    run_owner()
