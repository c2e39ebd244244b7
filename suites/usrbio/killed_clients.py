"""Clients of an agent that are killed one after the other.

``python -m usrbio.killed_clients MOUNT COUNT`` forks so many clients. Each connects, publishes memory and a ring,
registers a file, leaves reads in flight, and kills itself with SIGKILL at a point of this sequence that its number
decides.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from support.raw_usrbio import RawClient, RawIov, RawRing

from gdrkit.units import KIB

__all__ = ["main"]

_POINTS = 5


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _client(mount: Path, last_point: int) -> None:
    client = RawClient(mount)
    client.hello()
    if last_point == 0:
        _die()
    iov = RawIov(256 * KIB)
    client.publish_iov(iov)
    if last_point == 1:
        _die()
    ring = RawRing(16, for_read=True)
    client.publish_ring(ring)
    if last_point == 2:
        _die()
    inode = client.register_file(os.open(mount / "input", os.O_RDONLY))
    for part in range(4):
        ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB, buffer_offset=part * 64 * KIB)
    ring.submit()
    if last_point == 3:
        _die()
    ring.wait(4)
    _die()


def main(mount: Path, count: int) -> None:
    """Fork and lose so many clients."""
    for number in range(count):
        process_id = os.fork()
        if process_id == 0:
            try:
                _client(mount, number % _POINTS)
            finally:
                os._exit(1)
        _, status = os.waitpid(process_id, 0)
        assert os.WIFSIGNALED(status), f"client {number} ended with {status} before it was killed"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
