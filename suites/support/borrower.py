"""A second process that does I/O with memory which another one published, as it is told line by line.

``python -m support.borrower MOUNT FILE``. Commands on standard input, one line of JSON as the answer to each:
``open ID LENGTH``, ``open_gpu ID LENGTH``, ``import HANDLE``, ``read OFFSET LENGTH`` (from the same place of the file),
``close``, ``end``. An answer is what the operation gave: bytes, 0, or a negative errno.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit import usrbio

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.usrbio.native_types import Ioring, Iovec

__all__ = ["Borrower"]

_SUITES = Path(__file__).resolve().parents[1]


class Borrower:
    """The process, from outside; use it as a context manager, whose end kills it if :meth:`end` did not."""

    def __init__(self, mount: Path, file: Path) -> None:
        path = os.pathsep.join([str(_SUITES), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.borrower", str(mount), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self.ask("hello") == 0

    def ask(self, *words: object) -> int:
        """Have one command done; its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the other process has ended"
        return int(json.loads(line))

    def end(self) -> None:
        """Have it give everything back and end."""
        assert self.ask("end") == 0
        assert self.process.wait(timeout=60) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()


def _open(mount: str, command: str, words: Sequence[str]) -> Iovec:
    if command == "import":
        return usrbio.import_gpu_iovec(mount, bytes.fromhex(words[0]))
    take = usrbio.open_gpu_iovec if command == "open_gpu" else usrbio.open_iovec
    return take(mount, words[0], length_bytes=int(words[1]))


def _read(ring: Ioring, iov: Iovec, fd: int, offset: int, length: int) -> int:
    ring.prepare(iov[offset : offset + length], True, fd, offset)  # noqa: FBT003 - as programs for 3FS say it.
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
            answer = 0
            try:
                if command in {"open", "open_gpu", "import"}:
                    memory.append(_open(mount, command, words))
                elif command == "read":
                    answer = _read(ring, memory[-1], fd, *map(int, words))
                elif command == "close":
                    memory.pop().close()
            except usrbio.UsrbioError as error:
                answer = -(error.errno or 0)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            if command == "end":
                break
        for each in memory:
            each.close()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
