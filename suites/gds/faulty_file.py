# ruff: noqa: ARG002 - libfuse passes more arguments than this file system uses.
"""A FUSE file system in its own process, whose one file fails, ends early or blocks at chosen offsets.

``python -m gds.faulty_file MOUNT LENGTH SEED`` mounts it. The file `data` has LENGTH bytes of the pattern. The process
reads one command per line from standard input and prints ``ok`` for each:

- ``eio OFFSET``: reads and writes of the byte at OFFSET fail with EIO.
- ``end OFFSET``: the file ends at OFFSET, although its size in stat(2) stays the same.
- ``gate OFFSET END``: reads of bytes from OFFSET to END block until ``open``. The process prints ``waiting`` for the
  first of them.
- ``open``: blocked reads continue.

It unmounts and ends at the end of standard input.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from support.processes import LineChild

from gdrkit import pattern

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FaultyFile"]

_TIMEOUT_S = 90.0
_NAME = "/data"


class FaultyFile(LineChild):
    """The file system, mounted on the empty folder `mount`, seen from the case."""

    def __init__(self, mount: Path, *, length_bytes: int, seed: int) -> None:
        super().__init__("gds.faulty_file", mount, length_bytes, seed)
        self.path = mount / "data"
        self.expect_line("mounted")

    def send(self, command: str) -> None:
        """Send a command, and wait until it is executed."""
        self.write_line(command)
        self.expect_line("ok")

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self.kill()


class _Operations:
    """The requests of libfuse. Methods without a docstring implement the request of their name."""

    use_ns = True

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)
        self._size = len(data)
        self._end = len(data)
        self._failing_offset = len(data) + 1
        self._gate = (0, 0)
        self._is_open = threading.Event()
        self._has_reported_waiting = threading.Lock()

    def execute(self, line: str) -> None:
        """Execute a command of standard input."""
        command, *numbers = line.split()
        if command == "open":
            self._is_open.set()
        elif command == "eio":
            self._failing_offset = int(numbers[0])
        elif command == "end":
            self._end = int(numbers[0])
        elif command == "gate":
            self._is_open.clear()
            self._gate = int(numbers[0]), int(numbers[1])

    def init_with_config(self, connection: Any, config: Any) -> None:  # noqa: ANN401 - of libfuse.
        """Disable the page cache, so that each read of an application becomes a request."""
        if config is not None:
            config.direct_io = 1
        _print_line("mounted")

    def getattr(self, path: str, _handle: int | None = None) -> dict[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path != _NAME:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": self._size}

    def open(self, path: str, flags: int) -> int:
        return 1

    def read(self, path: str, length: int, offset: int, handle: int) -> bytes:
        begin, end = self._gate
        if offset < end and offset + length > begin and not self._is_open.is_set():
            if self._has_reported_waiting.acquire(blocking=False):
                _print_line("waiting")
            self._is_open.wait(_TIMEOUT_S)
        return bytes(self._data[offset : self._end_of(offset, length)])

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        end = self._end_of(offset, len(data))
        self._data[offset:end] = data[: end - offset]
        return end - offset

    def _end_of(self, offset: int, length: int) -> int:
        """Return the offset at which a read or a write ends, or raise EIO if its first byte fails."""
        if offset == self._failing_offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        end = min(offset + length, self._end)
        return min(end, self._failing_offset) if offset < self._failing_offset else max(end, offset)


_print_lock = threading.Lock()


def _print_line(line: str) -> None:
    with _print_lock:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> int:
    """Mount the file system, and serve it until the end of standard input."""
    mount, length, seed = sys.argv[1:]
    operations = _Operations(pattern.payload(int(length), seed=int(seed)))

    def listen() -> None:
        for line in sys.stdin:
            operations.execute(line.strip())
            _print_line("ok")
        unmount = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        os._exit(subprocess.run([*unmount, mount], check=False).returncode)

    threading.Thread(target=listen, daemon=True).start()
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    mfusepy.FUSE(operations, mount, foreground=True, fsname="gdrkit-faulty")
    return 0


if __name__ == "__main__":
    sys.exit(main())
