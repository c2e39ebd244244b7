"""Folders and files that only this user may change, for locks, tokens and records.

Such a folder may be in a folder to which other users can write, for example /tmp. Another user could then
put a false folder or a symbolic link in its place. :class:`PrivateFolder` therefore opens each file relative to the
descriptor of its folder and follows no symbolic link. It checks owner and mode of the open descriptor.
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
_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ACCESS_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | _OPEN_FLAGS
_TEXT_BYTES_MAX = 65536


class PrivateFolder:
    """An open folder with mode 0700 that belongs to this user. As a context manager it closes its descriptor.

    Attributes
    ----------
    fd : int
        Descriptor of the folder. This object closes it.
    path : Path
        Path of the folder, for error messages and for the addresses of sockets.
    """

    def __init__(self, fd: int, path: Path) -> None:
        """Take over the descriptor of a checked folder. Callers use :meth:`below` or :meth:`folder` instead."""
        self.fd = fd
        self.path = path

    @classmethod
    def below(cls, path: Path, *, parent_fd: int | None = None, create: bool = True) -> Self:
        """Open the private folder `path`, in a parent folder that other users may be able to read or write.

        Parameters
        ----------
        path : Path
            Path of the private folder. Symbolic links in the path of its parent are followed.
        parent_fd : int or None
            Descriptor of the parent folder. None means that this method opens the parent.
        create : bool
            Whether to make the folder if it is missing.

        Raises
        ------
        SetupMissing
            EPERM: other users can rename files in the parent, or the folder is not private to this user. ELOOP: `path`
            is a symbolic link. ENOTDIR: `path` is a file.
        OSError
            Any other failure of mkdir or open.
        """
        if parent_fd is not None:
            return cls(_open_folder(parent_fd, path.name, path, create=create), path)
        opened_parent_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return cls(_open_folder(opened_parent_fd, path.name, path, create=create), path)
        finally:
            os.close(opened_parent_fd)

    def folder(self, name: str) -> PrivateFolder:
        """Open the private folder `name` in this folder, and make it if it is missing. Errors: see :meth:`below`."""
        return PrivateFolder(_open_folder(self.fd, name, self.path / name, create=True), self.path / name)

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
            # With O_NONBLOCK, open does not wait for the other end of a FIFO. _check_file() then refuses the FIFO.
            fd = os.open(name, flags | _OPEN_FLAGS | os.O_NONBLOCK, _FILE_MODE, dir_fd=self.fd)
        except OSError as error:
            raise _make_open_error(error, path) from error
        try:
            _check_file(os.fstat(fd), path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def lock(self, name: str) -> int:
        """Lock the file `name` and return the descriptor that holds the lock. Make the file if it is missing.

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
        """Return the ASCII text of the file `name`, at most its first 64 KiB.

        Raises
        ------
        ValueError
            The file has bytes that are not ASCII.
        SetupMissing, OSError
            As :meth:`open`.
        """
        with os.fdopen(self.open(name, os.O_RDONLY), encoding="ascii") as file:
            return file.read(_TEXT_BYTES_MAX)

    def write_text(self, name: str, text: str) -> None:
        """Replace the contents of the file `name` by `text`. If this fails, the file keeps its old contents."""
        new_name = f".{name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new_name, dir_fd=self.fd)
        with os.fdopen(self.open(new_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(text)
        os.rename(new_name, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def has(self, name: str) -> bool:
        """Return whether a file of any type has this name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def unlink(self, name: str) -> None:
        """Remove the file `name` if it exists."""
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
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _open_folder(parent_fd: int, name: str, path: Path, *, create: bool) -> int:
    _check_parent(parent_fd, path.parent)
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _FOLDER_MODE, dir_fd=parent_fd)
    try:
        fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent_fd)
    except OSError as error:
        raise _make_open_error(error, path, parent_fd=parent_fd) from error
    try:
        stat_result = os.fstat(fd)
        _check_folder(stat_result, path)
        if stat_result.st_mode & _ACCESS_BY_OTHERS:
            # Other users could read the folder but not write to it, so every file in it belongs to this user.
            os.fchmod(fd, _FOLDER_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_parent(parent_fd: int, path: Path) -> None:
    """Raise SetupMissing if other users can rename the files of this user in this folder."""
    mode = os.fstat(parent_fd).st_mode
    if mode & _WRITE_BY_OTHERS and not mode & stat.S_ISVTX:
        raise _make_not_private_error(
            path,
            f"its mode is {stat.S_IMODE(mode):04o}, so that other users can replace what gdrkit keeps in it",
            f"chmod go-w {path}, or set the sticky bit by chmod +t {path}",
        )


def _check_folder(stat_result: os.stat_result, path: Path) -> None:
    _check_owner(stat_result, path)
    if stat_result.st_mode & _WRITE_BY_OTHERS:
        raise _make_not_private_error(
            path,
            f"its mode is {stat.S_IMODE(stat_result.st_mode):04o}, so that other users may have put something into it",
            f"check the files in {path}, then run chmod 700 {path}, or remove the folder",
        )


def _check_file(stat_result: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(stat_result.st_mode):
        raise _make_not_private_error(path, "it is not a regular file", f"remove {path}")
    _check_owner(stat_result, path)
    if stat_result.st_mode & _ACCESS_BY_OTHERS:
        raise _make_not_private_error(
            path,
            f"its mode is {stat.S_IMODE(stat_result.st_mode):04o}, so that other users may have read or written it",
            f"remove {path}, so that gdrkit makes a new file; or chmod 600 {path} if no other user has had access",
        )


def _check_owner(stat_result: os.stat_result, path: Path) -> None:
    if stat_result.st_uid != os.geteuid():
        raise _make_not_private_error(
            path,
            f"it belongs to user {stat_result.st_uid}, and this process is user {os.geteuid()}",
            f"run this as user {stat_result.st_uid}, or remove {path} if that user should not have made it",
        )


def _make_open_error(error: OSError, path: Path, *, parent_fd: int | None = None) -> SetupMissing | OSError:
    """Return the error to raise for a failed open.

    ELOOP (a symbolic link), ENOTDIR (not a folder) and ENXIO (a FIFO or a socket) mean that another user may have put a
    file there. They become SetupMissing. `parent_fd` is given if the path should be a folder.
    """
    error_number = error.errno
    if error_number == errno.ENOTDIR and parent_fd is not None:
        # open with O_DIRECTORY and O_NOFOLLOW fails with ENOTDIR for a symbolic link too.
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(path.name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
                error_number = errno.ELOOP
    if error_number == errno.ELOOP:
        return _make_not_private_error(
            path, "it is a symbolic link, which gdrkit does not follow", f"remove {path}", error_number
        )
    if error_number in {errno.ENOTDIR, errno.ENXIO}:
        return _make_not_private_error(
            path, "it is not a file of the type that gdrkit makes", f"remove {path}", error_number
        )
    return OSError(error_number, error.strerror, str(path))


def _make_not_private_error(path: Path, detail: str, what_to_do: str, error_number: int = errno.EPERM) -> SetupMissing:
    return SetupMissing(
        api=Api.KERNEL,
        operation="open",
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments={"path": str(path)},
        reason=Reason.NO_PERMISSION,
        what_to_do=what_to_do,
        detail=detail,
    )
