"""The hf3fs interface: host and GPU memory, rings, holes, hard links. This program starts an agent for a new folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from multiprocessing import shared_memory
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import cuda, usrbio

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024


@contextlib.contextmanager
def run_agent(folder: str) -> Iterator[None]:
    """Run an agent in plain mode: it mounts no file system (FUSE). The mount point and the store are one folder."""
    command = [sys.executable, "-m", "gdrkit", "agent", folder, "--store", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # The agent prints a line when it accepts programs.
        try:
            yield
        finally:
            process.terminate()


print("features:", sorted(usrbio.capabilities()))
with tempfile.TemporaryDirectory() as mount_point, run_agent(mount_point):
    path = Path(mount_point) / "data"
    path.write_bytes(b"0123456789abcdef" * 4 * KIB)
    fd = os.open(path, os.O_RDWR)
    usrbio.register_fd(fd)
    assert usrbio.is_hf3fs(fd)
    assert usrbio.extract_mount_point(path) == mount_point

    # Each ring has space for 8 operations.
    with (
        usrbio.create_iovec(mount_point, length_bytes=64 * KIB) as iov,
        usrbio.make_ioring(mount_point, 8, for_read=True, priority=usrbio.IorPriority.HIGH) as read_ring,
        usrbio.make_ioring(mount_point, 8, for_read=False) as write_ring,
    ):
        # The arguments of prepare() are the memory, whether the transfer reads from the file, the file descriptor, and
        # the offset in the file.
        (completion,) = (
            read_ring.prepare(iov[0:4096], True, fd, 16).submit().wait(min_results=1, timeout=timedelta(seconds=10))
        )
        assert (completion.result, bytes(memoryview(iov)[:4])) == (4096, b"0123")
        (completion,) = write_ring.prepare(iov[0:4096], False, fd, 8192).submit().wait(min_results=1)
        assert completion.result == 4096
        usrbio.force_fsync(fd)
        # Another process can open the memory by its id. Here the same process does it.
        with usrbio.open_iovec(mount_point, iov.id, length_bytes=64 * KIB) as same_iov:
            assert bytes(memoryview(same_iov)[:4]) == b"0123"

    # make_iovec() accepts multiprocessing.shared_memory, like the Python binding of 3FS. read_file() reads a whole file
    # in one call.
    shared_buffer = shared_memory.SharedMemory(create=True, size=64 * KIB)
    try:
        usrbio.make_iovec(shared_buffer, mount_point).close()  # type: ignore[arg-type]
    finally:
        shared_buffer.close()
        shared_buffer.unlink()
    file_bytes = usrbio.read_file(path, mount_point, block_size=64 * KIB)
    # Free the memory of closed iovs. Without this call, the pool keeps it for 3 s, so that new iovs can reuse it.
    usrbio.trim_host_pool()
    assert file_bytes is not None
    assert file_bytes[:4] == b"0123"

    # GPU memory: wrapped, allocated from the pool, opened by id, and imported by a handle.
    print("GPUs:", usrbio.gdr_device_count(), "- available:", usrbio.gdr_available())
    usrbio.limit_gpu_pool(idle_bytes_max=1 << 20)
    with (
        cuda.Device(0) as device,
        device.allocate(64 * KIB) as memory,
        usrbio.make_gpu_iovec(mount_point, memory) as iov,
        usrbio.make_ioring(mount_point, 8, for_read=True) as read_ring,
    ):
        (completion,) = read_ring.prepare(iov[0:4096], True, fd, 0).submit().wait(min_results=1)
        assert (completion.result, memory.read(length_bytes=4)) == (4096, b"0123")
    usrbio.make_gpu_iovec(mount_point, length_bytes=64 * KIB).close()
    print("idle in the pool:", usrbio.gpu_pool_statistics().idle_bytes, "bytes")
    usrbio.trim_gpu_pool()
    with usrbio.GpuSharedBuffer.create(mount_point, length_bytes=64 * KIB) as buffer:
        buffer.memory.write(b"shared")
        buffer.synchronize(after_transfer=False)  # This call makes the write visible to NICs.
        exported_handle = buffer.export()
        # Another process passes the handle to import_gpu_iovec, or the id to open_gpu_iovec.
        try:
            usrbio.import_gpu_iovec(mount_point, exported_handle).close()
        except usrbio.UsrbioError as error:
            print("the owner cannot import its own handle:", error)
        try:
            usrbio.open_gpu_iovec(mount_point, buffer.iovec.id, length_bytes=64 * KIB).close()
        except usrbio.UsrbioError as error:
            print("the owner cannot open its own memory by id:", error)

    usrbio.hardlink(path, Path(mount_point) / "link")
    usrbio.punch_hole(fd, [0], [4096])
    assert path.read_bytes()[:4] == bytes(4)
    usrbio.deregister_fd(fd)
    os.close(fd)
