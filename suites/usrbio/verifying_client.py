"""A client that writes through a ring, reads the data back and compares it, while other clients attack the agent.

``python -m usrbio.verifying_client MOUNT OPERATIONS`` prints a JSON object with the number of operations, the number of
failures for each result, and the number of bytes that differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

from gdrkit import pattern, usrbio
from gdrkit.units import KIB

_RING_ENTRIES = 64
_OPERATION_BYTES = 4 * KIB
_TIMEOUT = timedelta(seconds=60)


def main(mount: Path, operation_count: int) -> None:
    """Execute at least this number of operations, half of them writes, and print their results."""
    path = mount / f"verified-{os.getpid()}"
    counts_by_result: Counter[int] = Counter()
    wrong_bytes = 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    usrbio.register_fd(fd)
    with (
        usrbio.create_iovec(str(mount), length_bytes=_RING_ENTRIES * _OPERATION_BYTES) as iov,
        usrbio.make_ioring(str(mount), _RING_ENTRIES) as read_ring,
        usrbio.make_ioring(str(mount), _RING_ENTRIES, for_read=False) as write_ring,
        contextlib.ExitStack() as stack,
    ):
        memory = stack.enter_context(memoryview(iov))
        for batch_index in range(-(-operation_count // (2 * _RING_ENTRIES))):
            expected_bytes = pattern.payload(len(memory), seed=batch_index)
            memory[:] = expected_bytes
            for ring, for_read in ((write_ring, False), (read_ring, True)):
                if for_read:
                    memory[:] = bytes(len(memory))
                for begin in range(0, len(memory), _OPERATION_BYTES):
                    ring.prepare(iov[begin : begin + _OPERATION_BYTES], for_read, fd, begin)
                completed_slices = ring.submit().wait(min_results=_RING_ENTRIES, timeout=_TIMEOUT)
                counts_by_result.update(iov_slice.result for iov_slice in completed_slices)
                # An operation that did not complete in time counts as an operation with the result 0, which is a
                # failure.
                counts_by_result[0] += _RING_ENTRIES - len(completed_slices)
            wrong_bytes += (
                0 if memory == expected_bytes else sum(a != b for a, b in zip(memory, expected_bytes, strict=True))
            )
    usrbio.deregister_fd(fd)
    os.close(fd)
    failure_counts = {
        result: count for result, count in counts_by_result.items() if result != _OPERATION_BYTES and count
    }
    print(json.dumps({"operations": counts_by_result.total(), "failed": failure_counts, "wrong_bytes": wrong_bytes}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
