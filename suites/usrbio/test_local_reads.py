"""Reads of cached bytes into host memory: the agent itself executes them, without the storage server and a NIC."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest
from support.application import Application
from support.raw_usrbio import AgentProcess

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs(verbs.nic())
FILE_BYTES = 64 * KIB


@contextlib.contextmanager
def start_application(mount: Path, memory_kind: str = "host") -> Iterator[tuple[Application, int]]:
    """Start an application on a mount. Yield it, and the registered descriptor of the file ``file``."""
    fd = os.open(mount / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        usrbio.register_fd(fd)
        with Application(mount, memory_kind=memory_kind, length_bytes=FILE_BYTES) as application:
            yield application, fd
        usrbio.deregister_fd(fd)
    finally:
        os.close(fd)


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of a file and restore its times, as a faulty disk would."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("options", [(), ("--fuse",)], ids=["plain", "fuse"])
def test_cached_bytes_are_read_by_the_agent(tmp_path: Path, seed: int, options: tuple[str, ...]) -> None:
    store = tmp_path / "store"
    # Without FUSE, the mount is the folder of the store.
    mount = tmp_path / "mount" if options else store
    store.mkdir()
    mount.mkdir(exist_ok=True)
    (store / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    with AgentProcess(mount, "--store", str(store), *options) as agent, start_application(mount) as (application, fd):
        assert application.read((fd, 0, 0, FILE_BYTES), (fd, 8, FILE_BYTES - 8, 100)) == [FILE_BYTES, 8]
        # The second read has written 8 bytes at offset 8 of the memory.
        application.check(16, FILE_BYTES - 16, seed=seed, file_offset=16)
    assert agent.statistics["local_reads"] == agent.statistics["operations"] == 2


def test_server_reads_if_local_reads_are_off(tmp_path: Path, seed: int) -> None:
    (tmp_path / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    with AgentProcess(tmp_path, "--no-local-reads") as agent, start_application(tmp_path) as (application, fd):
        assert application.read((fd, 0, 0, FILE_BYTES)) == [FILE_BYTES]
    assert (agent.statistics["local_reads"], agent.statistics["operations"]) == (0, 1)


@needs(verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
def test_server_reads_into_device_memory(tmp_path: Path, seed: int) -> None:
    (tmp_path / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    with AgentProcess(tmp_path) as agent, start_application(tmp_path, "device") as (application, fd):
        assert application.read((fd, 0, 0, FILE_BYTES)) == [FILE_BYTES]
        application.check(0, FILE_BYTES, seed=seed, file_offset=0)
    assert agent.statistics["local_reads"] == 0


def test_corrupt_cached_bytes_are_not_returned(tmp_path: Path, seed: int) -> None:
    with AgentProcess(tmp_path) as agent, start_application(tmp_path) as (application, fd):
        # Before the first write, the file has no checksums. The agent must notice the new checksums.
        assert application.read((fd, 0, 0, FILE_BYTES)) == [0]
        application.write_pattern(0, FILE_BYTES, seed=seed, file_offset=0)
        assert application.write((fd, 0, 0, FILE_BYTES)) == [FILE_BYTES]
        application.fill(0)
        assert application.read((fd, 0, 0, 16 * KIB)) == [16 * KIB]
        application.check(0, 16 * KIB, seed=seed, file_offset=0)
        flip_bit(tmp_path / "file", 9000)
        assert application.read((fd, 0, 0, 4 * KIB), (fd, 4 * KIB, 8 * KIB, 4 * KIB)) == [4 * KIB, -errno.EIO]
    # The storage server executed the read of the corrupt bytes.
    assert agent.statistics["local_reads"] == 3


def test_changes_of_other_programs_are_read(tmp_path: Path, seed: int) -> None:
    with AgentProcess(tmp_path), start_application(tmp_path) as (application, fd):
        application.write_pattern(0, FILE_BYTES, seed=seed, file_offset=0)
        assert application.write((fd, 0, 0, FILE_BYTES)) == [FILE_BYTES]
        os.pwrite(fd, pattern.payload(FILE_BYTES, seed=seed + 1), 0)
        assert application.read((fd, 0, 0, FILE_BYTES)) == [FILE_BYTES]
        application.check(0, FILE_BYTES, seed=seed + 1, file_offset=0)
