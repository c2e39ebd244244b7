"""Folders and files that only this user may change.

A lock, a token or a record below a folder that other users can write is worth nothing if another user can plant it.
Everything here is opened relative to the descriptor of its folder and never through a symbolic link, and its owner and
its mode are checked on the open descriptor. The folder itself is opened by the path that its user gave.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, Reason, SetupMissing, errno_name

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["PrivateFolder"]

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _OPEN
_TEXT_BYTES_MAX = 65536


class PrivateFolder:
    """An open folder with mode 0700 that belongs to this user; a context manager that closes its descriptor.

    Attributes
    ----------
    fd : int
        Descriptor of the folder, borrowed by callers.
    path : Path
        Path of the folder, for error messages and for the addresses of sockets.
    """

    def __init__(self, fd: int, path: Path) -> None:
        """Take over the descriptor of a checked folder; use :meth:`below` or :meth:`folder`."""
        self.fd = fd
        self.path = path

    @classmethod
    def below(cls, path: Path, *, parent: int | None = None, create: bool = True) -> Self:
        """Open the private folder `path`, in a parent folder that other users may be able to read or write.

        Parameters
        ----------
        path : Path
            Path of the private folder. Symbolic links in the path of its parent are followed.
        parent : int or None
            Descriptor of the parent folder. None: it is opened here.
        create : bool
            Whether to make the folder if it is missing.

        Raises
        ------
        SetupMissing
            EPERM: other users can rename what lies in the parent, or the folder is not private to this user. ELOOP: a
            symbolic link has its name. ENOTDIR: a file has its name.
        OSError
            Any other failure of mkdir or open.
        """
        opened = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if parent is None else parent
        try:
            return cls(_opened_folder(opened, path.name, path, create=create), path)
        finally:
            if parent is None:
                os.close(opened)

    def folder(self, name: str) -> PrivateFolder:
        """Open the private folder `name` in this one, and make it if it is missing; raises as :meth:`below`."""
        return PrivateFolder(_opened_folder(self.fd, name, self.path / name, create=True), self.path / name)

    def open(self, name: str, flags: int) -> int:
        """Open the file `name` and return its descriptor.

        Raises
        ------
        SetupMissing
            EPERM: the file is not a regular file of this user with mode 0600. ELOOP: it is a symbolic link.
        OSError
            Any other failure of open.
        """
        path = self.path / name
        try:
            # O_NONBLOCK: a FIFO is refused below instead of waited for.
            fd = os.open(name, flags | _OPEN | os.O_NONBLOCK, _FILE_MODE, dir_fd=self.fd)
        except OSError as error:
            raise _refusal(error, path) from error
        try:
            _check_file(os.fstat(fd), path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def lock(self, name: str) -> int:
        """Lock the file `name`, made if it is missing, and return the descriptor that holds the lock.

        Raises
        ------
        BlockingIOError
            Another process holds the lock.
        SetupMissing, OSError
            As :meth:`open`.
        """
        fd = self.open(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read_text(self, name: str) -> str:
        """Return the ASCII text of the file `name`; raises as :meth:`open`, and ValueError for other bytes."""
        with os.fdopen(self.open(name, os.O_RDONLY), encoding="ascii") as file:
            return file.read(_TEXT_BYTES_MAX)

    def write_text(self, name: str, text: str) -> None:
        """Write the file `name` so that it has all of `text`, or what it had before."""
        draft = f".{name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=self.fd)
        with os.fdopen(self.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(text)
        os.rename(draft, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def has(self, name: str) -> bool:
        """Return whether something, of whatever type, has this name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def unlink(self, name: str) -> None:
        """Remove a name, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Close the descriptor; a second close does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened_folder(parent: int, name: str, path: Path, *, create: bool) -> int:
    _check_parent(parent, path.parent)
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _FOLDER_MODE, dir_fd=parent)
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        raise _refusal(error, path, parent=parent) from error
    try:
        info = os.fstat(fd)
        _check_folder(info, path)
        if info.st_mode & _OTHERS:
            # Other users could only look at it: nothing in it is theirs.
            os.fchmod(fd, _FOLDER_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_parent(parent: int, path: Path) -> None:
    """Refuse a folder in which other users can rename what this user makes."""
    mode = os.fstat(parent).st_mode
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        raise _not_private(
            path,
            f"its mode is {stat.S_IMODE(mode):04o}, so that other users can replace what gdrkit keeps in it",
            f"chmod go-w {path}, or set the sticky bit by chmod +t {path}",
        )


def _check_folder(info: os.stat_result, path: Path) -> None:
    _check_owner(info, path)
    if info.st_mode & _OTHERS_WRITE:
        raise _not_private(
            path,
            f"its mode is {stat.S_IMODE(info.st_mode):04o}, so that other users may have put something into it",
            f"look at what lies in {path}, then chmod 700 or remove it",
        )


def _check_file(info: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise _not_private(path, "it is not a regular file", f"remove {path}")
    _check_owner(info, path)
    if info.st_mode & _OTHERS:
        raise _not_private(
            path,
            f"its mode is {stat.S_IMODE(info.st_mode):04o}, so that other users may have read or written it",
            f"remove {path}, so that gdrkit makes a new one; or chmod 600 if no other user has had access",
        )


def _check_owner(info: os.stat_result, path: Path) -> None:
    if info.st_uid != os.geteuid():
        raise _not_private(
            path,
            f"it belongs to user {info.st_uid}, and this process is user {os.geteuid()}",
            f"run this as user {info.st_uid}, or remove {path} if that user should not have made it",
        )


def _refusal(error: OSError, path: Path, *, parent: int | None = None) -> SetupMissing | OSError:
    """Return the error to raise when open failed: ELOOP and ENOTDIR say that something planted may be there."""
    number = error.errno
    if number == errno.ENOTDIR and parent is not None:
        # O_DIRECTORY with O_NOFOLLOW is ENOTDIR for a link too.
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode):
                number = errno.ELOOP
    if number == errno.ELOOP:
        return _not_private(path, "it is a symbolic link, which gdrkit does not follow", f"remove {path}", number)
    if number in {errno.ENOTDIR, errno.ENXIO}:
        return _not_private(path, "it has another type than gdrkit gave it", f"remove {path}", number)
    return OSError(number, error.strerror, str(path))


def _not_private(path: Path, detail: str, what_to_do: str, number: int = errno.EPERM) -> SetupMissing:
    return SetupMissing(
        api=Api.KERNEL,
        operation="open",
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments={"path": str(path)},
        reason=Reason.NO_PERMISSION,
        what_to_do=what_to_do,
        detail=detail,
    )
