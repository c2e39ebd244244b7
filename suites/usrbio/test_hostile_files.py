"""Files with which a client could stop an agent: files with a lease, and files that are mounted in /dev/shm."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from support.raw_usrbio import AgentProcess, RawClient
from usrbio.user_processes import UserProcess, catch_errno

from gdrkit.harness.needs import host, needs, verbs
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.shared_memory import SHM_FOLDER, open_shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

# Constants of sched.h and sys/mount.h for unshare(2) and mount(2).
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


@contextlib.contextmanager
def open_leased_file(path: Path) -> Iterator[int]:
    """Create a file, take a write lease on it, and yield its descriptor.

    Until the block ends, this process keeps the lease although the agent opens the file.
    """
    path.write_bytes(bytes(4096))
    previous_handler = signal.signal(signal.SIGIO, signal.SIG_IGN)  # The kernel sends SIGIO to the holder of the lease.
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield fd
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, previous_handler)


@needs(verbs.nic())
def test_file_with_a_lease_stops_no_other_client(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    with (
        AgentProcess(tmp_path),
        RawClient(tmp_path) as hostile_client,
        RawClient(tmp_path) as honest_client,
        open_leased_file(tmp_path / "leased") as leased_fd,
        (tmp_path / "file").open("rb") as file,
    ):
        register_errnos: list[int] = []
        thread = threading.Thread(
            target=lambda: register_errnos.append(catch_errno(lambda: hostile_client.register_file(leased_fd)))
        )
        thread.start()
        assert honest_client.register_file(file.fileno())
        thread.join()
        assert register_errnos == [errno.EAGAIN]


def open_mounted_file(connection: Connection) -> None:
    """Mount a file of another file system on a file in /dev/shm, and send the errno of open_shared()."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = SHM_FOLDER / f"hf3fs-test-{os.getpid()}"
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
    target.touch(0o600)
    try:
        assert libc.mount(__file__.encode(), bytes(target), None, _MS_BIND, None) == 0
        with pytest.raises(AgentError) as refusal:
            open_shared(str(target), uid=target.stat().st_uid)
        connection.send(refusal.value.errno)
    finally:
        libc.umount2(bytes(target), 0)
        target.unlink()


@needs(host.capability("CAP_SYS_ADMIN"))
def test_file_mounted_in_shared_memory_is_refused() -> None:
    with UserProcess(0, open_mounted_file) as process:
        assert process.receive() == errno.EINVAL
        process.process.join()
