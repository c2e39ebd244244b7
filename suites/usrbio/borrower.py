"""A process that uses memory which another process published: ``python -m usrbio.borrower MOUNT FILE``.

The process reads one command per line. ``open ID LENGTH``, ``open_gpu ID LENGTH [DEVICE]`` and ``import HANDLE`` open
memory. ``read OFFSET LENGTH`` reads from OFFSET of the file to OFFSET of the memory that was opened last, and ``close``
closes this memory. ``hello`` does nothing, and ``end`` ends the process. The process prints one number after each
command: the number of bytes after ``read``, 0 after the other commands, and a negative errno after a failure.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from support.processes import LineChildProcess

from gdrkit import usrbio

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gdrkit.usrbio.native_types import Ioring, Iovec

__all__ = ["Borrower"]


class Borrower(LineChildProcess):
    """The process, which a case starts and controls. `visible_devices` is its CUDA_VISIBLE_DEVICES."""

    def __init__(self, mount: Path, file_path: Path, *, visible_devices: str | None = None) -> None:
        visible_devices_environ = {} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}
        super().__init__("usrbio.borrower", mount, file_path, environ={**os.environ, **visible_devices_environ})
        # The reply shows that the process has started.
        assert self.call("hello") == 0

    def call(self, *command_words: object) -> int:
        """Send one command and return its result."""
        self.write_line(" ".join(map(str, command_words)))
        return int(self.read_line())

    def close(self) -> None:
        """Have the process close everything and end."""
        assert self.call("end") == 0
        self.end()


def _open_iov(mount: str, command: str, arguments: Sequence[str]) -> Iovec:
    if command == "import":
        return usrbio.import_gpu_iovec(mount, bytes.fromhex(arguments[0]))
    iov_id, length_bytes, *optional_device = arguments
    if command == "open_gpu":
        return usrbio.open_gpu_iovec(
            mount, iov_id, length_bytes=int(length_bytes), device=int(optional_device[0]) if optional_device else 0
        )
    return usrbio.open_iovec(mount, iov_id, length_bytes=int(length_bytes))


def _read_file(ring: Ioring, iov: Iovec, fd: int, offset: int, length: int) -> int:
    ring.prepare(iov[offset : offset + length], True, fd, offset)  # noqa: FBT003 - the signature of 3FS.
    (completion,) = ring.submit().wait(min_results=1, timeout=timedelta(seconds=60))
    return completion.result


def _main(program_arguments: Sequence[str]) -> int:
    mount, file_path = program_arguments
    with contextlib.ExitStack() as stack:
        fd = os.open(file_path, os.O_RDONLY)
        stack.callback(os.close, fd)
        usrbio.register_fd(fd)
        stack.callback(usrbio.deregister_fd, fd)
        ring = stack.enter_context(usrbio.make_ioring(mount, 8, for_read=True))
        iovs: list[Iovec] = []
        for line in sys.stdin:
            command, *arguments = line.split()
            result = 0
            try:
                if command in {"open", "open_gpu", "import"}:
                    iovs.append(_open_iov(mount, command, arguments))
                elif command == "read":
                    result = _read_file(ring, iovs[-1], fd, *map(int, arguments))
                elif command == "close":
                    iovs.pop().close()
            except usrbio.UsrbioError as error:
                result = -(error.errno or 0)
            sys.stdout.write(f"{result}\n")
            sys.stdout.flush()
            if command == "end":
                break
        for iov in iovs:
            iov.close()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
