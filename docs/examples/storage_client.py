"""The storage service: a server, a client, files and batches. This program starts a server for a new folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from gdrkit import cuda
from gdrkit.storage.client import StorageClient
from gdrkit.storage.file import IORequest

with tempfile.TemporaryDirectory() as store_folder:
    command = [sys.executable, "-m", "gdrkit", "serve", "--store", store_folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        # The server prints "files at ADDRESS by NICS".
        server_address = server.stdout.readline().partition(" at ")[2].partition(" by ")[0]
        try:
            with (
                StorageClient(server_address) as client,
                client.register(bytearray(b"x" * (1 << 20))) as buffer,
                client.open("numbers", read=True, write=True, create=True) as file,
                cuda.Device(0) as device,
                client.allocate(device, 65536) as gpu_buffer,
            ):
                file.write(buffer, offset_bytes=0)
                file.sync()
                # Two ranges are read in one call, the second range into GPU memory.
                requests = [
                    IORequest(file, offset_bytes=0, buffer=buffer.subrange(offset_bytes=0, length_bytes=4096)),
                    IORequest(file, offset_bytes=65536, buffer=gpu_buffer),
                ]
                print([result.length_bytes for result in client.batch_read(requests)])
                print(client.stat("numbers").size_bytes, [entry.name for entry in client.list_folder()])
                file.punch_hole((0, 4096))
                with client.register(bytearray(b"x" * 4096)) as small_buffer:
                    file.read(small_buffer, offset_bytes=0)
                    assert small_buffer.copy_out() == bytes(4096)
        finally:
            server.terminate()
