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


def _run_client(mount: Path, last_step_index: int) -> None:
    """Execute the first steps of a client, up to the index `last_step_index` (0 for step 1). Then kill this process."""
    client = RawClient(mount)
    client.hello()
    if last_step_index == 0:
        _kill_this_process()
    iov = RawIov(256 * KIB)
    client.publish_iov(iov)
    if last_step_index == 1:
        _kill_this_process()
    ring = RawRing(16, for_read=True)
    client.publish_ring(ring)
    if last_step_index == 2:
        _kill_this_process()
    inode = client.register_file(os.open(mount / "input", os.O_RDONLY))
    for read_index in range(4):
        ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB, buffer_offset=read_index * 64 * KIB)
    ring.submit()
    if last_step_index == 3:
        _kill_this_process()
    ring.wait(4)
    _kill_this_process()


def main(mount: Path, client_count: int) -> None:
    """Fork the clients, and require that each ends by a signal."""
    for client_index in range(client_count):
        process_id = os.fork()
        if process_id == 0:
            try:
                _run_client(mount, client_index % _STEP_COUNT)
            finally:
                os._exit(1)
        _, wait_status = os.waitpid(process_id, 0)
        assert os.WIFSIGNALED(wait_status), f"client {client_index} exited before it killed itself: {wait_status=:#x}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
