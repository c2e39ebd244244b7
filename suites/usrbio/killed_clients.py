"""Clients of an agent that end by SIGKILL: ``python -m usrbio.killed_clients MOUNT COUNT``.

The program forks COUNT clients, one after the other. A client has five steps: (1) connect, (2) publish memory, (3)
publish a ring, (4) register a file and submit reads, (5) wait for the results. The first client kills itself after step
1, the second after step 2, and so on; the sixth begins again with step 1.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from support.raw_usrbio import RawClient, RawIov, RawRing

from gdrkit.units import KIB

__all__ = ["main"]

_STEP_COUNT = 5


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_client(mount: Path, last_step: int) -> None:
    """Execute the steps of a client up to the one with the index `last_step` (0 is step 1), and kill this process."""
    client = RawClient(mount)
    client.hello()
    if last_step == 0:
        _kill_this_process()
    iov = RawIov(256 * KIB)
    client.publish_iov(iov)
    if last_step == 1:
        _kill_this_process()
    ring = RawRing(16, for_read=True)
    client.publish_ring(ring)
    if last_step == 2:
        _kill_this_process()
    inode = client.register_file(os.open(mount / "input", os.O_RDONLY))
    for index in range(4):
        ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB, buffer_offset=index * 64 * KIB)
    ring.submit()
    if last_step == 3:
        _kill_this_process()
    ring.wait(4)
    _kill_this_process()


def main(mount: Path, count: int) -> None:
    """Fork the clients, and require that each ends by a signal."""
    for number in range(count):
        process_id = os.fork()
        if process_id == 0:
            try:
                _run_client(mount, number % _STEP_COUNT)
            finally:
                os._exit(1)
        _, status = os.waitpid(process_id, 0)
        assert os.WIFSIGNALED(status), f"client {number} ended with {status} before it was killed"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
