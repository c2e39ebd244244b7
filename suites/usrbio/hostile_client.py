"""A client that attacks the agent of a mount, again and again, until its standard input ends.

``python -m usrbio.hostile_client MOUNT ATTACK`` prints ``attacks`` when the first round is over, and at the end
how many rounds there were. Each round is a new connection with new memory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from support.raw_usrbio import RawClient, RawIov, RawRing, Refusal

from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ATTACKS", "main"]

_WORDS = struct.Struct("=QI")
_VALUE_MAX = 0x7FFFFFFF
# `private` of a semaphore with which glibc's sem_post aborts its caller.
_HOSTILE_SHARING = 0x40
# Value, count of waiters, and `private`.
_NONSENSE = (
    (0, 1, _HOSTILE_SHARING),
    (_VALUE_MAX, 1, _HOSTILE_SHARING),
    (_VALUE_MAX, 0, 0xFFFFFFFF),
    (0xFFFFFFFF, 0xFFFFFFFF, 1),
    (0, 0x7FFFFFFF, 0x80000000),
)
_PATIENCE_S = 10.0


def _pause(duration_s: float) -> bool:
    """Wait for this time or until standard input ends, and return whether it has ended."""
    return bool(select.select([sys.stdin], [], [], duration_s)[0])


@contextlib.contextmanager
def _served(mount: Path, length_bytes: int) -> Iterator[tuple[RawClient, RawIov, RawRing]]:
    with RawClient(mount) as client, contextlib.ExitStack() as stack:
        iov, ring = RawIov(length_bytes), RawRing(32, for_read=True)
        stack.callback(ring.close)
        stack.callback(iov.close)
        client.publish_iov(iov)
        client.publish_ring(ring)
        yield client, iov, ring


def _poll(ring: RawRing, count: int) -> None:
    """Wait for completions without a look at the semaphore."""
    until = time.monotonic() + _PATIENCE_S
    while (ring.index(2) - ring.index(3)) % ring.slots < count and time.monotonic() < until:
        _pause(0.0005)


def spoil_completions(mount: Path, number: int) -> None:
    """Nonsense in the completion semaphore of its own ring, which the agent posts."""
    with _served(mount, 64 * KIB) as (_, iov, ring):
        for value, waiters, sharing in _NONSENSE:
            _WORDS.pack_into(ring.memory, ring.semaphore, waiters << 32 | value, sharing)
            ring.prepare(iov.id.bytes, inode=number, length=4096)
            ring.submit()
            _poll(ring, 1)
            ring.set_index(3, ring.index(2))


def spoil_submissions(mount: Path, number: int) -> None:
    """Nonsense in the submit semaphores, which all clients post and the agent waits on; now and then they are cut."""
    for link in ("submit-ios.ph", "submit-ios", "submit-ios.pl"):
        with (mount / "3fs-virt" / "iovs" / link).readlink().open("r+b") as file:
            if number % 4 == 0:
                os.truncate(file.fileno(), 0)
                _pause(0.002)
            elif os.fstat(file.fileno()).st_size >= _WORDS.size:
                value, waiters, sharing = _NONSENSE[number % len(_NONSENSE)]
                # By a system call: another attacker may cut the file while this one writes.
                os.pwrite(file.fileno(), _WORDS.pack(waiters << 32 | value, sharing), 0)
    _pause(0.001)


def cut_memory(mount: Path, number: int) -> None:
    """Memory that is cut short while the server moves bytes there."""
    del number
    with _served(mount, MIB) as (client, iov, ring), (mount / "input").open("rb") as file:
        inode = client.register_file(file.fileno())
        for part in range(16):
            ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB, buffer_offset=part * 64 * KIB)
        ring.submit()
        os.ftruncate(iov.fd, 0)
        _poll(ring, 16)
    _pause(0.02)


ATTACKS = {"completions": spoil_completions, "submissions": spoil_submissions, "memory": cut_memory}


def main(mount: Path, attack: str) -> None:
    """Attack until standard input ends."""
    rounds = 0
    for number in itertools.count():
        try:
            ATTACKS[attack](mount, number)
        except Refusal as error:
            if error.errno not in {errno.EREMOTEIO, errno.EBUSY}:
                raise
        rounds += 1
        if rounds == 1:
            print("attacks", flush=True)  # noqa: T201
        if _pause(0):
            break
    print(rounds, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
