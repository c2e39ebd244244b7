"""A FUSE file system that shows a folder and fails as it is told: ``python faulty_fuse.py MOUNT FOLDER FAULTS``.

FAULTS is a file with a line ``request errno`` for each request of libfuse that is to fail, read again at every request;
``write -1`` has it write other bytes than it was given, and say nothing.
It has no extended attributes. It says ``ready`` when it is mounted, and ends when it is unmounted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.host import rename_new
from gdrkit.usrbio.fuse._mfusepy import FuseSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LIE", "FaultyMount", "main"]

LIE = "-1"
_NOREPLACE = 1
_ENDS_S = 30


class Folder:
    """The requests, each answered by the call of that name on the folder below."""

    def __init__(self, below: Path, faults: Path) -> None:
        self._below = str(below)
        self._faults = faults
        self._lists: dict[int, str] = {}
        self._lock = threading.Lock()
        for name in dir(self):
            if not name.startswith("_"):
                setattr(self, name, self._failing(name, getattr(self, name)))

    def getattr(self, path: str | None, fd: int | None = None) -> dict[str, int]:
        found = os.fstat(fd) if fd else os.lstat(self._at(path))
        names = ("st_mode", "st_ino", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks")
        times = {f"st_{each}": getattr(found, f"st_{each}_ns") for each in ("atime", "mtime", "ctime")}
        return {name: getattr(found, name) for name in names} | times

    def opendir(self, path: str) -> int:
        with self._lock:
            number = len(self._lists) + 1
            self._lists[number] = path
        return number

    def readdir(self, _path: str | None, number: int) -> list[tuple[str, dict[str, int], int]]:
        found = self._at(self._lists[number])
        names = (".", "..", *(each.name for each in Path(found).iterdir()))
        infos = {name: os.lstat(f"{found}/{name}") for name in names}
        # An entry whose inode is 0 is not shown.
        return [(name, {"st_mode": info.st_mode, "st_ino": info.st_ino}, 0) for name, info in infos.items()]

    def mkdir(self, path: str, mode: int) -> None:
        Path(self._at(path)).mkdir(mode)

    def unlink(self, path: str) -> None:
        Path(self._at(path)).unlink()

    def rename(self, path: str, new_path: str, flags: int = 0) -> None:
        if flags & _NOREPLACE:
            rename_new(self._at(path), self._at(new_path), folder=-1, new_folder=-1)
        else:
            Path(self._at(path)).rename(self._at(new_path))

    def chmod(self, path: str | None, mode: int, fd: int | None = None) -> None:
        os.chmod(fd or self._at(path), mode)  # noqa: PTH101 - by its descriptor, if it has one.

    def chown(self, path: str | None, uid: int, gid: int, fd: int | None = None) -> None:
        os.chown(fd or self._at(path), *(-1 if each == 0xFFFFFFFF else each for each in (uid, gid)))

    def truncate(self, path: str | None, length: int, fd: int | None = None) -> None:
        os.truncate(fd or self._at(path), length)

    def utimens(self, path: str | None, access_ns: int, modified_ns: int, fd: int | None = None) -> None:
        os.utime(fd or self._at(path), ns=(access_ns, modified_ns))

    def statfs(self, _path: str) -> dict[str, int]:
        found = os.statvfs(self._below)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def create(self, path: str, mode: int, flags: int) -> int:
        return os.open(self._at(path), flags & ~(os.O_DIRECT | os.O_NOATIME) | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~(os.O_DIRECT | os.O_NOATIME))

    def read(self, _path: str | None, length: int, offset: int, fd: int) -> bytes:
        return os.pread(fd, length, offset)

    def write(self, _path: str | None, data: bytes, offset: int, fd: int) -> int:
        return os.pwrite(fd, data, offset)

    def fsync(self, _path: str | None, _only_data: int, fd: int) -> None:
        os.fsync(fd)

    def release(self, _path: str | None, fd: int) -> None:
        os.close(fd)

    def _at(self, path: str | None) -> str:
        if path is None:
            raise OSError(errno.ENOENT, "no name")
        return self._below + path

    def _failing(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def answer(*arguments: object) -> object:
            for line in self._faults.read_text().splitlines():
                request, number = line.split()
                if request == name and number == LIE:
                    path, data, *rest = arguments
                    assert isinstance(data, bytes)
                    arguments = (path, b"\xff" + data[1:], *rest)
                elif request == name:
                    raise OSError(int(number), os.strerror(int(number)))
            return method(*arguments)

        return answer


class FaultyMount:
    """The mount in a process of its own; use it as a context manager.

    Parameters
    ----------
    root : Path
        A folder, in which everything is made.
    """

    def __init__(self, root: Path) -> None:
        self.mount, self.below, self._faults = root / "mount", root / "below", root / "faults"
        root.mkdir()
        for each in (self.mount, self.below):
            each.mkdir()
        self._faults.touch()

    def fail(self, **requests: int) -> None:
        """From now on these requests fail with these errnos; none: all is well."""
        text = "".join(f"{name} {number}\n" for name, number in requests.items())
        draft = self._faults.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self._faults)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile no request is answered: whoever makes one waits, as for a disk that hangs."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, str(self.mount), str(self.below), str(self._faults)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.fail()
        end = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*end, str(self.mount)], check=True)
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Mount, and serve until somebody unmounts."""
    mount, below, faults = (Path(each) for each in sys.argv[1:])
    session = FuseSession(mount, Folder(below, faults), source="gdrkit-case")
    print("ready", flush=True)  # noqa: T201 - whoever waits for it.
    with contextlib.suppress(KeyboardInterrupt):
        while not session.join(1):
            pass


if __name__ == "__main__":
    main()
