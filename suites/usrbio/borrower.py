"""A second process that uses memory which another process published.

``python -m usrbio.borrower MOUNT FILE`` is the process. It reads one command per line: ``open ID LENGTH``,
``open_gpu ID LENGTH``, ``import HANDLE``, ``read OFFSET LENGTH`` (from the same offset of the file), ``close`` and
``end``. For each, it prints the result of the operation: a number of bytes, 0, or a negative errno.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from support.processes import LineChild

from gdrkit import usrbio

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gdrkit.usrbio.native_types import Ioring, Iovec

__all__ = ["Borrower"]


class Borrower(LineChild):
    """The process, seen from the case."""

    def __init__(self, mount: Path, file: Path) -> None:
        super().__init__("usrbio.borrower", mount, file)
        assert self.call("hello") == 0

    def call(self, *words: object) -> int:
        """Send one command and return its result."""
        self.write_line(" ".join(map(str, words)))
        return int(self.read_line())

    def close(self) -> None:
        """Have the process close everything and end."""
        assert self.call("end") == 0
        self.end()


def _open(mount: str, command: str, words: Sequence[str]) -> Iovec:
    if command == "import":
        return usrbio.import_gpu_iovec(mount, bytes.fromhex(words[0]))
    open_iovec = usrbio.open_gpu_iovec if command == "open_gpu" else usrbio.open_iovec
    return open_iovec(mount, words[0], length_bytes=int(words[1]))


def _read(ring: Ioring, iov: Iovec, fd: int, offset: int, length: int) -> int:
    ring.prepare(iov[offset : offset + length], True, fd, offset)  # noqa: FBT003 - as in programs for 3FS.
    (done,) = ring.submit().wait(min_results=1, timeout=timedelta(seconds=60))
    return done.result


def _main(arguments: Sequence[str]) -> int:
    mount, file = arguments
    with contextlib.ExitStack() as stack:
        fd = os.open(file, os.O_RDONLY)
        stack.callback(os.close, fd)
        usrbio.register_fd(fd)
        stack.callback(usrbio.deregister_fd, fd)
        ring = stack.enter_context(usrbio.make_ioring(mount, 8, for_read=True))
        memory: list[Iovec] = []
        for line in sys.stdin:
            command, *words = line.split()
            result = 0
            try:
                if command in {"open", "open_gpu", "import"}:
                    memory.append(_open(mount, command, words))
                elif command == "read":
                    result = _read(ring, memory[-1], fd, *map(int, words))
                elif command == "close":
                    memory.pop().close()
            except usrbio.UsrbioError as error:
                result = -(error.errno or 0)
            sys.stdout.write(f"{result}\n")
            sys.stdout.flush()
            if command == "end":
                break
        for each in memory:
            each.close()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
