"""A client that attacks the agent of a mount until the standard input of the client ends.

``python -m usrbio.hostile_client MOUNT ATTACK`` repeats one attack of ATTACKS in rounds. The program prints ``attacks``
after the first round, and the number of rounds at the end.
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

# The start of a sem_t of glibc: 64 bits with the value (low half) and the number of waiters, and the field `private`.
_SEMAPHORE = struct.Struct("=QI")
_SEMAPHORE_VALUE_MAX = 0x7FFFFFFF
# With this value of `private`, sem_post() of glibc aborts its caller.
_ABORTING_PRIVATE = 0x40
# Value, number of waiters, and `private` of each invalid semaphore.
_INVALID_SEMAPHORES = (
    (0, 1, _ABORTING_PRIVATE),
    (_SEMAPHORE_VALUE_MAX, 1, _ABORTING_PRIVATE),
    (_SEMAPHORE_VALUE_MAX, 0, 0xFFFFFFFF),
    (0xFFFFFFFF, 0xFFFFFFFF, 1),
    (0, 0x7FFFFFFF, 0x80000000),
)
_COMPLETION_TIMEOUT_S = 10.0
# Numbers of two of the four indices of a ring, for RawRing.index().
_COMPLETION_HEAD, _COMPLETION_TAIL = 2, 3


def _pause(duration_s: float) -> bool:
    """Wait for this time, or until standard input ends. Return whether standard input has ended."""
    return bool(select.select([sys.stdin], [], [], duration_s)[0])


@contextlib.contextmanager
def _connect_with_ring(mount: Path, length_bytes: int) -> Iterator[tuple[RawClient, RawIov, RawRing]]:
    """Yield a connection with published memory and a published ring."""
    with RawClient(mount) as client, contextlib.ExitStack() as stack:
        iov, ring = RawIov(length_bytes), RawRing(32, for_read=True)
        stack.callback(ring.close)
        stack.callback(iov.close)
        client.publish_iov(iov)
        client.publish_ring(ring)
        yield client, iov, ring


def _poll_completions(ring: RawRing, count: int) -> None:
    """Wait for `count` completions, or until the timeout.

    The semaphore is corrupt, so the function polls the indices of the ring.
    """
    deadline_s = time.monotonic() + _COMPLETION_TIMEOUT_S
    while (
        ring.index(_COMPLETION_HEAD) - ring.index(_COMPLETION_TAIL)
    ) % ring.slot_count < count and time.monotonic() < deadline_s:
        _pause(0.0005)


def corrupt_completion_semaphore(mount: Path, round_number: int) -> None:
    """Write invalid values into the completion semaphore of the client's ring, which the agent posts."""
    with _connect_with_ring(mount, 64 * KIB) as (_, iov, ring):
        for value, waiter_count, private in _INVALID_SEMAPHORES:
            _SEMAPHORE.pack_into(ring.memory, ring.semaphore_offset, waiter_count << 32 | value, private)
            # No file with this inode is registered, so the agent completes the operation with EBADF.
            ring.prepare(iov.id.bytes, inode=round_number, length=4096)
            ring.submit()
            _poll_completions(ring, 1)
            ring.set_index(_COMPLETION_TAIL, ring.index(_COMPLETION_HEAD))


def corrupt_submit_semaphores(mount: Path, round_number: int) -> None:
    """Write invalid values into the submit semaphores, which all clients post.

    In every fourth round, truncate the files of the semaphores.
    """
    for link_name in ("submit-ios.ph", "submit-ios", "submit-ios.pl"):
        with (mount / "3fs-virt" / "iovs" / link_name).readlink().open("r+b") as file:
            if round_number % 4 == 0:
                os.truncate(file.fileno(), 0)
                _pause(0.002)
            elif os.fstat(file.fileno()).st_size >= _SEMAPHORE.size:
                value, waiter_count, private = _INVALID_SEMAPHORES[round_number % len(_INVALID_SEMAPHORES)]
                # A write to mapped memory would fault if another attacker truncates the file at the same time.
                os.pwrite(file.fileno(), _SEMAPHORE.pack(waiter_count << 32 | value, private), 0)
    _pause(0.001)


def truncate_memory(mount: Path, round_number: int) -> None:
    """Truncate the client's memory while the server writes to it."""
    del round_number
    with _connect_with_ring(mount, MIB) as (client, iov, ring), (mount / "input").open("rb") as file:
        inode = client.register_file(file.fileno())
        for index in range(16):
            ring.prepare(iov.id.bytes, inode=inode, length=64 * KIB, buffer_offset=index * 64 * KIB)
        ring.submit()
        os.ftruncate(iov.fd, 0)
        _poll_completions(ring, 16)
    _pause(0.02)


# The function of each attack. A call executes one round.
ATTACKS = {
    "completions": corrupt_completion_semaphore,
    "submissions": corrupt_submit_semaphores,
    "memory": truncate_memory,
}


def main(mount: Path, attack: str) -> None:
    """Attack until the end of standard input, and print the number of rounds."""
    round_count = 0
    for round_number in itertools.count():
        try:
            ATTACKS[attack](mount, round_number)
        except Refusal as error:
            # An attack ends the session between the agent and its server. Until the next session, the agent may refuse
            # requests.
            if error.errno not in {errno.EREMOTEIO, errno.EBUSY}:
                raise
        round_count += 1
        if round_count == 1:
            print("attacks", flush=True)  # noqa: T201
        if _pause(0):
            break
    print(round_count, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
