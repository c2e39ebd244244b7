# ruff: noqa: ARG002 - libfuse says more than a file system of one file wants to know.
"""A small file system whose one file fails, ends early or waits where it is told to; a process of its own.

    python -m gds.faulty_file MOUNT LENGTH SEED

The file `data` has LENGTH bytes of the pattern. On standard input come lines: ``eio OFFSET`` (the byte at OFFSET can
neither be read nor written), ``end OFFSET`` (the file ends there from now on, whatever its size was said to be),
``gate OFFSET END`` (who reads anything from OFFSET to END waits for ``open``), ``open``. Each is answered by ``ok``;
the first that waits at the gate is told by ``waiting``. It ends with its standard input.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gdrkit import pattern

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["UnrulyFiles"]

_SUITES = Path(__file__).resolve().parents[1]
# Nothing takes so long unless it hangs; the start of an interpreter was seen to take half a minute.
_TIMEOUT_S = 90.0
_NAME = "/data"


class UnrulyFiles:
    """The file system in a process of its own, mounted on `mount`, an empty folder."""

    def __init__(self, mount: Path, *, length_bytes: int, seed: int) -> None:
        self.path = mount / "data"
        path = os.pathsep.join(filter(None, (str(_SUITES), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gds.faulty_file", str(mount), str(length_bytes), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What is read ahead of a line is not seen by select.
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.await_line("mounted")

    def say(self, line: str) -> None:
        """Tell it something, and wait until it knows."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        self.await_line("ok")

    def await_line(self, wanted: str) -> None:
        """Wait for this line."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT_S)
        said = self._process.stdout.readline().decode().strip() if readable else "nothing"
        assert said == wanted, f"{said!r} instead of {wanted!r}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(_TIMEOUT_S) == 0
        finally:
            self._process.kill()
            self._process.wait(_TIMEOUT_S)
            self._process.stdout.close()


class _Operations:
    """What libfuse asks; `data` is the file, `written` shows what was written over it."""

    use_ns = True

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)
        self._size = len(data)
        self._end = len(data)
        self._bad = len(data) + 1
        self._gate = (0, 0)
        self._opened = threading.Event()
        self._is_waited_for = threading.Lock()

    def order(self, line: str) -> None:
        """Do as a line of standard input says."""
        what, _, number = line.partition(" ")
        if what == "open":
            self._opened.set()
        elif what == "eio":
            self._bad = int(number)
        elif what == "end":
            self._end = int(number)
        elif what == "gate":
            self._opened.clear()
            first, _, end = number.partition(" ")
            self._gate = int(first), int(end)

    def init_with_config(self, connection: Any, config: Any) -> None:  # noqa: ANN401 - of libfuse.
        """Let nothing be cached: each read comes here."""
        if config is not None:
            config.direct_io = 1
        say("mounted")

    def getattr(self, path: str, _handle: int | None = None) -> dict[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path != _NAME:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": self._size}

    def open(self, path: str, flags: int) -> int:
        return 1

    def read(self, path: str, length: int, offset: int, handle: int) -> bytes:
        first, end = self._gate
        if offset < end and offset + length > first and not self._opened.is_set():
            if self._is_waited_for.acquire(blocking=False):
                say("waiting")
            self._opened.wait(_TIMEOUT_S)
        return bytes(self._data[offset : self._until(offset, length)])

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        until = self._until(offset, len(data))
        self._data[offset:until] = data[: until - offset]
        return until - offset

    def _until(self, offset: int, length: int) -> int:
        if offset == self._bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        until = min(offset + length, self._end)
        return min(until, self._bad) if offset < self._bad else max(until, offset)


_saying = threading.Lock()


def say(line: str) -> None:
    """Print a line at once."""
    with _saying:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> int:
    """Mount, and serve until standard input ends."""
    mount, length, seed = sys.argv[1:]
    operations = _Operations(pattern.payload(int(length), seed=int(seed)))

    def listen() -> None:
        for line in sys.stdin:
            operations.order(line.strip())
            say("ok")
        unmount = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        os._exit(subprocess.run([*unmount, mount], check=False).returncode)

    threading.Thread(target=listen, daemon=True).start()
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    mfusepy.FUSE(operations, mount, foreground=True, fsname="gdrkit-unruly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
