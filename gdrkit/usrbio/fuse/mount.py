"""The FUSE mount of an agent: there, served, and gone again.

Level 5. Plain mode needs none of this: the mount is the store's folder. A mount is needed where the store is on another
machine, and for programs whose client library knows only the mount of 3FS. The kernel refuses it to every other user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, Reason, SetupMissing, UsageError, errno_name
from gdrkit.handles import Handle
from gdrkit.usrbio.fuse._mfusepy import Loop, missing
from gdrkit.usrbio.fuse.operations import HANDLE_OF, OpenFile, Operations, StoreFiles
from gdrkit.usrbio.fuse.virtual_folder import Publisher, VirtualFolder

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["FuseMount", "fuse_obstacle", "unmount_stale"]

_DEVICE = Path("/dev/fuse")
_TYPE = "fuse.hf3fs"
_SOURCE = "gdrkit-agent"
_UNMOUNT_S = 10


def fuse_obstacle() -> str | None:
    """Why this user cannot mount by FUSE here, one sentence with what to do; None when nothing is known against it."""
    found = _obstacle()
    return None if found is None else found[1]


def _obstacle() -> tuple[int, str] | None:
    """Return the errno that fits to what :func:`fuse_obstacle` says, and that sentence."""
    if (absent := missing()) is not None:
        return errno.ENOENT, absent
    if not _DEVICE.exists():
        return errno.ENODEV, "there is no /dev/fuse: load the kernel module fuse, or give the container the device"
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return errno.EACCES, "/dev/fuse cannot be opened: give this user the device"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return errno.EPERM, "only root mounts without fusermount3: install the package fuse3"
    return None


_REASONS = {errno.ENOENT: Reason.LIBRARY_MISSING, errno.ENODEV: Reason.NO_DEVICE}


class FuseMount:
    """An agent's mount; use it as a context manager.

    Parameters
    ----------
    mount : Path
        An empty folder.
    store : StoreFiles
        Whose files it shows.
    publisher : Publisher
        Who answers publications.
    place : Path
        The agent's own folder with ``iovs`` and ``agent.sock``.

    Raises
    ------
    SetupMissing
        FUSE is not there, or not for this user.
    UsageError
        The folder is not there, is not empty, or something is mounted on it.
    """

    def __init__(self, mount: Path, *, store: StoreFiles, publisher: Publisher, place: Path) -> None:
        if (found := _obstacle()) is not None:
            number, obstacle = found
            raise SetupMissing(
                api=Api.FUSE,
                operation="open /dev/fuse",
                status=number,
                status_name=errno_name(number),
                errno=number,
                reason=_REASONS.get(number, Reason.NO_PERMISSION),
                what_to_do=obstacle.partition(": ")[2],
                detail=obstacle.partition(": ")[0],
            )
        unmount_stale(mount)
        self.path = _empty_folder(mount)
        folder = VirtualFolder(place, publisher, store, mount=str(self.path))
        self._operations = Operations(store, folder, mount=str(self.path))
        self._loop: Loop | None = Loop(self.path, self._operations, source=_SOURCE)
        self._handle = Handle("usrbio.fuse_mount")

    @property
    def is_served(self) -> bool:
        """Whether it is mounted still: anybody who may can unmount it."""
        return self._loop is not None and self._loop.is_running

    def file_of(self, fd: int) -> OpenFile:
        """The file of a descriptor of this mount, which a client has passed.

        Raises
        ------
        OSError
            EBADF: the descriptor is of no file of this mount.
        """
        if os.fstat(fd).st_dev != self.path.stat().st_dev:
            raise OSError(errno.EBADF, "no file of this mount")
        answer = fcntl.ioctl(fd, HANDLE_OF, bytes(8))
        return self._operations.open_file(int.from_bytes(answer, "little"))

    def files_of(self, inode: int) -> list[OpenFile]:
        """All that are open through the mount with this inode: for rings of libraries that name no descriptor."""
        return self._operations.files_of(inode)

    def close(self) -> None:
        """Unmount, also when files are open; after a failure the next call tries again, else it does nothing."""
        loop = self._loop
        if loop is None:
            return
        if loop.is_running:
            _unmount(self.path)
        if not loop.join(_UNMOUNT_S):
            raise ApiError(
                api=Api.FUSE,
                operation="umount",
                status=errno.EBUSY,
                status_name=errno_name(errno.EBUSY),
                errno=errno.EBUSY,
                arguments={"path": str(self.path)},
                reason=Reason.BUSY,
                what_to_do="end the processes that use the mount",
            )
        self._loop = None
        self._operations.close()
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unmount_stale(mount: Path) -> bool:
    """Unmount what an agent that was killed had mounted here; whether there was something.

    A mount that an agent serves is left alone: it answers.
    """
    # realpath() only reads whether the path is a symbolic link, which works even if no process serves the mount.
    path = Path(os.path.realpath(mount))
    if not any(at == str(path) and source == _SOURCE for at, source in _mounts()):
        return False
    try:
        path.stat()
    except OSError as error:
        if error.errno not in {errno.ENOTCONN, errno.ECONNABORTED}:
            raise
    else:
        return False
    _unmount(path)
    return True


def _mounts() -> list[tuple[str, str]]:
    """Place and source of every mount of our type."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, source, *_ = after.split()
        if kind == _TYPE:
            place = before.split()[4]
            found.append((place.encode().decode("unicode_escape").encode("latin-1").decode(), source))
    return found


def _unmount(path: Path) -> None:
    """Plainly if nobody uses it; else its name goes now, and who has it open gets errors."""
    if os.geteuid() == 0:
        attempts = [["umount", "-i", str(path)], ["umount", "-i", "-f", "-l", str(path)]]
    else:
        attempts = [["fusermount3", "-u", str(path)], ["fusermount3", "-u", "-z", str(path)]]
    done = _run(attempts[0])
    if done.returncode != 0:
        done = _run(attempts[1])
    if done.returncode != 0 and any(at == str(path) for at, _ in _mounts()):
        raise ApiError(
            api=Api.FUSE,
            operation=attempts[-1][0],
            status=done.returncode,
            status_name=f"exit code {done.returncode}",
            arguments={"path": str(path)},
            reason=Reason.BUSY,
            what_to_do=f"unmount it by hand: {' '.join(attempts[-1])}",
            detail=done.stderr.strip(),
        )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command for 10 s at most. A command that is not installed or does not end counts as failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_UNMOUNT_S)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, errno.ENOENT, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, errno.ETIMEDOUT, "", f"it did not end within {_UNMOUNT_S} s")


def _empty_folder(mount: Path) -> Path:
    path = mount.resolve()
    if not path.is_dir():
        message = f"{mount} is no folder"
        raise UsageError(message, what_to_do="make it")
    if os.path.ismount(path) or any(path.iterdir()):
        message = f"{mount} is not empty"
        raise UsageError(message, reason=Reason.BUSY, what_to_do="name an empty folder, on which nothing is mounted")
    return path
