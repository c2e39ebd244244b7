"""A client that writes through a ring, reads the data back and compares it, while other clients attack the agent.

``python -m usrbio.verifying_client MOUNT OPERATIONS`` prints a JSON object with the number of operations, the number of
failures by errno, and the number of bytes that differ.
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

_DEPTH = 64
_LENGTH = 4 * KIB
_TIMEOUT = timedelta(seconds=60)


def main(mount: Path, operations: int) -> None:
    """Make at least this number of operations, half of them writes, and print their results."""
    path = mount / f"verified-{os.getpid()}"
    results: Counter[int] = Counter()
    wrong_bytes = 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    usrbio.register_fd(fd)
    with (
        usrbio.create_iovec(str(mount), length_bytes=_DEPTH * _LENGTH) as iov,
        usrbio.make_ioring(str(mount), _DEPTH) as reader,
        usrbio.make_ioring(str(mount), _DEPTH, for_read=False) as writer,
        contextlib.ExitStack() as stack,
    ):
        memory = stack.enter_context(memoryview(iov))
        for batch in range(-(-operations // (2 * _DEPTH))):
            data = pattern.payload(len(memory), seed=batch)
            memory[:] = data
            for ring, for_read in ((writer, False), (reader, True)):
                if for_read:
                    memory[:] = bytes(len(memory))
                for begin in range(0, len(memory), _LENGTH):
                    ring.prepare(iov[begin : begin + _LENGTH], for_read, fd, begin)
                done = ring.submit().wait(min_results=_DEPTH, timeout=_TIMEOUT)
                results.update(each.result for each in done)
                results[0] += _DEPTH - len(done)
            wrong_bytes += 0 if memory == data else sum(a != b for a, b in zip(memory, data, strict=True))
    usrbio.deregister_fd(fd)
    os.close(fd)
    failed = {number: count for number, count in results.items() if number != _LENGTH and count}
    print(json.dumps({"operations": results.total(), "failed": failed, "wrong_bytes": wrong_bytes}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
