# ruff: noqa: ARG002 - libfuse passes more arguments than this file system uses.
"""A FUSE file system with one file. Its reads and writes fail, end early or block at offsets that a case selects.

``python -m gds.faulty_file MOUNT LENGTH SEED`` runs the file system in a separate process. The file `data` has LENGTH
bytes of the pattern. The process reads one command per line from standard input and prints ``ok`` for each:

- ``eio OFFSET``: reads and writes of the byte at OFFSET fail with EIO.
- ``end OFFSET``: the file ends at OFFSET, although its size in stat(2) stays the same.
- ``gate OFFSET END``: reads of bytes from OFFSET to END block until the command ``open``.
- ``gate-opens``: from now on, each open of the file blocks until the command ``open``.
- ``open``: blocked requests continue.

The process prints ``waiting`` when a request blocks for the first time. At the end of standard input, the process
unmounts the file system and exits. A case uses :class:`FaultyFile`, which starts the process.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from support.processes import LineChildProcess

from gdrkit import pattern

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FaultyFile"]

# A blocked request continues after this time, even without the command `open`.
_GATE_TIMEOUT_S = 90.0
_DATA_PATH = "/data"


class FaultyFile(LineChildProcess):
    """The process of the file system, which is mounted on the empty folder `mount`."""

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
    """The FUSE operations. Each public method without a docstring implements the FUSE operation of the same name."""

    use_ns = True  # mfusepy warns if this attribute is not set.

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)
        self._size_bytes = len(data)
        self._end_offset = len(data)
        self._failing_offset = len(data) + 1  # No byte of the file has this offset.
        self._gated_range = (0, 0)
        self._are_opens_gated = False
        self._gate_open_event = threading.Event()
        # The first request that blocks acquires this lock and keeps it, so that only one request prints `waiting`.
        self._waiting_report_lock = threading.Lock()

    def execute(self, line: str) -> None:
        """Execute one command from standard input."""
        command, *offsets = line.split()
        if command == "open":
            self._gate_open_event.set()
        elif command == "eio":
            self._failing_offset = int(offsets[0])
        elif command == "end":
            self._end_offset = int(offsets[0])
        elif command == "gate-opens":
            self._gate_open_event.clear()
            self._are_opens_gated = True
        elif command == "gate":
            self._gate_open_event.clear()
            self._gated_range = int(offsets[0]), int(offsets[1])

    def init_with_config(self, connection: Any, config: Any) -> None:  # noqa: ANN401 - mfusepy has no types.
        """Disable the page cache, so that each read of an application becomes a request."""
        if config is not None:
            config.direct_io = 1
        _print_line("mounted")

    def getattr(self, path: str, _handle: int | None = None) -> dict[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path != _DATA_PATH:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": self._size_bytes}

    def open(self, path: str, flags: int) -> int:
        if self._are_opens_gated:
            self._wait_at_gate()
        return 1  # The file handle. The other operations ignore it.

    def read(self, path: str, length_bytes: int, offset: int, handle: int) -> bytes:
        begin, end = self._gated_range
        if offset < end and offset + length_bytes > begin and not self._gate_open_event.is_set():
            self._wait_at_gate()
        return bytes(self._data[offset : self._find_transfer_end(offset, length_bytes)])

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        end = self._find_transfer_end(offset, len(data))
        self._data[offset:end] = data[: end - offset]
        return end - offset

    def _wait_at_gate(self) -> None:
        if self._waiting_report_lock.acquire(blocking=False):
            _print_line("waiting")
        self._gate_open_event.wait(_GATE_TIMEOUT_S)

    def _find_transfer_end(self, offset: int, length_bytes: int) -> int:
        """Return the offset at which a read or a write ends, or raise EIO if its first byte fails."""
        if offset == self._failing_offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        end = min(offset + length_bytes, self._end_offset)
        return min(end, self._failing_offset) if offset < self._failing_offset else max(end, offset)


_print_lock = threading.Lock()


def _print_line(line: str) -> None:
    with _print_lock:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> int:
    """Mount the file system, and serve it until the end of standard input."""
    mount, length_bytes, seed = sys.argv[1:]
    operations = _Operations(pattern.payload(int(length_bytes), seed=int(seed)))

    def execute_commands() -> None:
        for line in sys.stdin:
            operations.execute(line.strip())
            _print_line("ok")
        unmount_command = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        os._exit(subprocess.run([*unmount_command, mount], check=False).returncode)

    threading.Thread(target=execute_commands, daemon=True).start()
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")  # The import of mfusepy reads this variable.
    import mfusepy

    mfusepy.FUSE(operations, mount, foreground=True, fsname="gdrkit-faulty")
    return 0


if __name__ == "__main__":
    sys.exit(main())
