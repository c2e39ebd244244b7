"""A client that attacks the agent of a mount until the end of its standard input.

``python -m usrbio.hostile_client MOUNT ATTACK`` prints ``attacks`` after the first round, and the number of rounds at
the end. Each round uses a new connection and new memory.
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
# With this value of the field `private` of a semaphore, sem_post of glibc aborts its caller.
_ABORTING_PRIVATE = 0x40
# Value, number of waiters, and `private`.
_INVALID_SEMAPHORES = (
    (0, 1, _ABORTING_PRIVATE),
    (_VALUE_MAX, 1, _ABORTING_PRIVATE),
    (_VALUE_MAX, 0, 0xFFFFFFFF),
    (0xFFFFFFFF, 0xFFFFFFFF, 1),
    (0, 0x7FFFFFFF, 0x80000000),
)
_COMPLETION_TIMEOUT_S = 10.0


def _pause(duration_s: float) -> bool:
    """Wait for this time or until standard input ends, and return whether it has ended."""
    return bool(select.select([sys.stdin], [], [], duration_s)[0])


@contextlib.contextmanager
def _published(mount: Path, length_bytes: int) -> Iterator[tuple[RawClient, RawIov, RawRing]]:
    """Yield a connection with published memory and a published ring."""
    with RawClient(mount) as client, contextlib.ExitStack() as stack:
        iov, ring = RawIov(length_bytes), RawRing(32, for_read=True)
        stack.callback(ring.close)
        stack.callback(iov.close)
        client.publish_iov(iov)
        client.publish_ring(ring)
        yield client, iov, ring


def _poll(ring: RawRing, count: int) -> None:
    """Wait for completions without the semaphore."""
    end_s = time.monotonic() + _COMPLETION_TIMEOUT_S
    while (ring.index(2) - ring.index(3)) % ring.slots < count and time.monotonic() < end_s:
        _pause(0.0005)


def corrupt_completions(mount: Path, number: int) -> None:
    """Write invalid values into the completion semaphore of the client's ring, which the agent posts."""
    with _published(mount, 64 * KIB) as (_, iov, ring):
        for value, waiters, private in _INVALID_SEMAPHORES:
            _WORDS.pack_into(ring.memory, ring.semaphore, waiters << 32 | value, private)
            ring.prepare(iov.id.bytes, inode=number, length=4096)
            ring.submit()
            _poll(ring, 1)
            ring.set_index(3, ring.index(2))


def corrupt_submissions(mount: Path, number: int) -> None:
    """Write invalid values into the submit semaphores, which all clients post, and sometimes truncate their files."""
    for link in ("submit-ios.ph", "submit-ios", "submit-ios.pl"):
        with (mount / "3fs-virt" / "iovs" / link).readlink().open("r+b") as file:
            if number % 4 == 0:
                os.truncate(file.fileno(), 0)
                _pause(0.002)
            elif os.fstat(file.fileno()).st_size >= _WORDS.size:
                value, waiters, private = _INVALID_SEMAPHORES[number % len(_INVALID_SEMAPHORES)]
                # A write to mapped memory would fault if another attacker truncates the file at the same time.
                os.pwrite(file.fileno(), _WORDS.pack(waiters << 32 | value, private), 0)
    _pause(0.001)


def truncate_memory(mount: Path, number: int) -> None:
    """Truncate the client's memory while the server writes to it."""
    del number
    with _published(mount, MIB) as (client, iov, ring), (mount / "input").open("rb") as file:
        inode = client.register_file(file.fileno())
        for part in range(16):
            ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB, buffer_offset=part * 64 * KIB)
        ring.submit()
        os.ftruncate(iov.fd, 0)
        _poll(ring, 16)
    _pause(0.02)


ATTACKS = {"completions": corrupt_completions, "submissions": corrupt_submissions, "memory": truncate_memory}


def main(mount: Path, attack: str) -> None:
    """Attack until the end of standard input, and print the number of rounds."""
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
