"""Files and memory that would make the agent or its server wait: a lease."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
from typing import TYPE_CHECKING

from support.raw_usrbio import AgentProcess, RawClient
from usrbio.user_processes import errno_of

from gdrkit.harness.needs import needs, verbs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def leased_file(path: Path) -> Iterator[int]:
    """Create a file with a lease for writing, which this process never gives up, and yield its descriptor."""
    path.write_bytes(bytes(4096))
    previous = signal.signal(signal.SIGIO, signal.SIG_IGN)  # The kernel sends SIGIO to the holder of the lease.
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield fd
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, previous)


@needs(verbs.nic())
def test_file_with_a_lease_stops_no_other_client(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    with (
        AgentProcess(tmp_path),
        RawClient(tmp_path) as hostile,
        RawClient(tmp_path) as honest,
        leased_file(tmp_path / "leased") as leased_fd,
        (tmp_path / "file").open("rb") as file,
    ):
        refusals: list[int] = []
        thread = threading.Thread(target=lambda: refusals.append(errno_of(lambda: hostile.register_file(leased_fd))))
        thread.start()
        assert honest.register_file(file.fileno())
        thread.join()
        assert refusals == [errno.EAGAIN]
