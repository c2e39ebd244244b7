"""A FUSE file system for cases about disk errors. It serves the files of a folder, and a case chooses failing requests.

A case uses :class:`FaultyMount`, which runs this file as a program: ``python faulty_fuse.py MOUNT FOLDER FAULTS``
mounts the file system on MOUNT, prints ``ready``, and ends after the unmount.

FAULTS is a file that the program reads at every request. A line has the form ``REQUEST ERRNO``: REQUEST is the name of
a libfuse operation, which then fails with ERRNO. With the line ``write -1``, a write succeeds but writes wrong data.
The file system has no extended attributes.
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

from gdrkit.host import rename_without_replacing
from gdrkit.usrbio.fuse._mfusepy import FuseSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["WRONG_DATA", "FaultyMount", "main"]

# With this number instead of an errno in FAULTS, a write succeeds but writes wrong data.
WRONG_DATA = -1
# RENAME_NOREPLACE, a flag of renameat2(2): the rename fails if the new name exists.
_RENAME_NOREPLACE = 1
_END_TIMEOUT_S = 30


class FaultyOperations:
    """The operations of the file system, named as in libfuse.

    Each operation makes the system call of the same name in the `backing_folder`, unless FAULTS names the operation.
    """

    def __init__(self, backing_folder: Path, faults_file: Path) -> None:
        self._backing_folder = str(backing_folder)
        self._faults_file = faults_file
        self._directory_paths: dict[int, str] = {}
        self._lock = threading.Lock()
        # Wrap each operation in a function that first looks for the operation in FAULTS.
        for operation_name in dir(self):
            if not operation_name.startswith("_"):
                setattr(self, operation_name, self._with_faults(operation_name, getattr(self, operation_name)))

    def getattr(self, path: str | None, fd: int | None = None) -> dict[str, int]:
        stat_result = os.fstat(fd) if fd else os.lstat(self._path(path))
        field_names = ("st_mode", "st_ino", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks")
        times_ns = {f"st_{name}": getattr(stat_result, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return {name: getattr(stat_result, name) for name in field_names} | times_ns

    def opendir(self, path: str) -> int:
        with self._lock:
            folder_handle = len(self._directory_paths) + 1
            self._directory_paths[folder_handle] = path
        return folder_handle

    def readdir(self, _path: str | None, handle: int) -> list[tuple[str, dict[str, int], int]]:
        folder = self._path(self._directory_paths[handle])
        entry_names = (".", "..", *(entry.name for entry in Path(folder).iterdir()))
        status_by_name = {name: os.lstat(f"{folder}/{name}") for name in entry_names}
        # Each entry is a name, attributes and the offset 0. The attributes include the inode number, because libfuse
        # omits entries whose inode number is 0.
        return [
            (name, {"st_mode": status.st_mode, "st_ino": status.st_ino}, 0) for name, status in status_by_name.items()
        ]

    def mkdir(self, path: str, mode: int) -> None:
        Path(self._path(path)).mkdir(mode)

    def unlink(self, path: str) -> None:
        Path(self._path(path)).unlink()

    def rename(self, path: str, new_path: str, flags: int = 0) -> None:
        if flags & _RENAME_NOREPLACE:
            rename_without_replacing(self._path(path), self._path(new_path), folder_fd=-1, new_folder_fd=-1)
        else:
            Path(self._path(path)).rename(self._path(new_path))

    def chmod(self, path: str | None, mode: int, fd: int | None = None) -> None:
        os.chmod(fd or self._path(path), mode)  # noqa: PTH101 - Path.chmod takes no descriptor.

    # libfuse passes 0xFFFFFFFF for an id that does not change, and os.chown takes -1.
    def chown(self, path: str | None, uid: int, gid: int, fd: int | None = None) -> None:
        os.chown(fd or self._path(path), *(-1 if owner_id == 0xFFFFFFFF else owner_id for owner_id in (uid, gid)))

    def truncate(self, path: str | None, length: int, fd: int | None = None) -> None:
        os.truncate(fd or self._path(path), length)

    def utimens(self, path: str | None, access_ns: int, modified_ns: int, fd: int | None = None) -> None:
        os.utime(fd or self._path(path), ns=(access_ns, modified_ns))

    def statfs(self, _path: str) -> dict[str, int]:
        status = os.statvfs(self._backing_folder)
        return {name: getattr(status, name) for name in dir(status) if name.startswith("f_") and name != "f_fsid"}

    def create(self, path: str, mode: int, flags: int) -> int:
        return os.open(self._path(path), flags & ~(os.O_DIRECT | os.O_NOATIME) | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags & ~(os.O_DIRECT | os.O_NOATIME))

    def read(self, _path: str | None, length: int, offset: int, fd: int) -> bytes:
        return os.pread(fd, length, offset)

    def write(self, _path: str | None, data: bytes, offset: int, fd: int) -> int:
        return os.pwrite(fd, data, offset)

    def fsync(self, _path: str | None, _only_data: int, fd: int) -> None:
        os.fsync(fd)

    def release(self, _path: str | None, fd: int) -> None:
        os.close(fd)

    def _path(self, path: str | None) -> str:
        if path is None:
            raise OSError(errno.ENOENT, "the file has no path")
        return self._backing_folder + path

    def _with_faults(self, request_name: str, method: Callable[..., object]) -> Callable[..., object]:
        """Return a function that calls the method, unless FAULTS has a line for the request `request_name`."""

        def serve_or_fail(*arguments: object) -> object:
            for line in self._faults_file.read_text().splitlines():
                failing_request, error_number = line.split()
                if failing_request == request_name and int(error_number) == WRONG_DATA:
                    path, data, *later_arguments = arguments
                    assert isinstance(data, bytes)
                    arguments = (path, b"\xff" + data[1:], *later_arguments)
                elif failing_request == request_name:
                    raise OSError(int(error_number), os.strerror(int(error_number)))
            return method(*arguments)

        return serve_or_fail


class FaultyMount:
    """The faulty file system, served by a child process. Use it as a context manager.

    Parameters
    ----------
    root : Path
        A folder, which is created. It holds the mount point, the backing folder and the file FAULTS.

    Attributes
    ----------
    mount, backing_folder : Path
        The mount point, and the folder to which requests are passed on.
    """

    def __init__(self, root: Path) -> None:
        self.mount, self.backing_folder, self._faults_file = root / "mount", root / "backing", root / "faults"
        root.mkdir()
        for folder in (self.mount, self.backing_folder):
            folder.mkdir()
        self._faults_file.touch()

    def set_faults(self, **error_number_by_request: int) -> None:
        """Make these requests fail with these errnos from now on. All other requests succeed again."""
        lines = "".join(f"{name} {error_number}\n" for name, error_number in error_number_by_request.items())
        # The rename is atomic, because the program may read FAULTS at any time.
        new_file = self._faults_file.with_suffix(".new")
        new_file.write_text(lines)
        new_file.replace(self._faults_file)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the file system, so that requests wait until the end of the block, as with a disk that hangs."""
        self._process.send_signal(signal.SIGSTOP)
        # The signal does not stop all threads at once, and a thread answers requests until it has stopped. So wait
        # until the whole process has stopped.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, str(self.mount), str(self.backing_folder), str(self._faults_file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.set_faults()
        unmount_command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*unmount_command, str(self.mount)], check=True)
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Mount the file system, and serve it until it is unmounted."""
    mount, backing_folder, faults_file = map(Path, sys.argv[1:])
    session = FuseSession(mount, FaultyOperations(backing_folder, faults_file), source="gdrkit-case")
    print("ready", flush=True)  # noqa: T201
    with contextlib.suppress(KeyboardInterrupt):
        while not session.join(1):
            pass


if __name__ == "__main__":
    main()
