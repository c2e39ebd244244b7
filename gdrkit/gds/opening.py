"""Opening of regular files, their descriptors, and conversion of OSError to the errors of gdrkit."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import TYPE_CHECKING, Any, Literal, get_args

from gdrkit.errors import Api, ApiError, ClosedResource, UsageError, errno_name
from gdrkit.gds._native import native, reason_of
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["OPEN_FLAGS", "Access", "Direct", "OpenDescriptor", "check_choices", "open_regular", "os_error"]

Access = Literal["automatic", "buffered", "direct"]
Direct = Literal["preferred", "required", "never"]

OPEN_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class OpenDescriptor:
    """The descriptor of an open file, which is closed when no call uses it any more. It is thread-safe.

    Parameters
    ----------
    fd : int
        The descriptor. This object owns it, even if the constructor fails.
    path : str
        Path of the file, for errors.

    Attributes
    ----------
    native : object
        The file of the native engine, which counts the calls that use the descriptor.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        try:
            self.native: Any = native.OpenFile(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._close_lock = threading.Lock()
        self._handle = Handle("gds.file")

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._fd < 0

    def fileno(self) -> int:
        """Return the descriptor. This object still owns it."""
        if self._fd < 0:
            raise ClosedResource(self.path)
        return self._fd

    def begin_use(self) -> None:
        """Make :meth:`close` wait for the call of ``native.end_use``."""
        if not self.native.begin_use():
            raise ClosedResource(self.path)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Any]:
        """Yield the native file. :meth:`close` waits for the end of the block."""
        self.begin_use()
        try:
            yield self.native
        finally:
            self.native.end_use()

    def close(self, end_transfers: Callable[[], None]) -> None:
        """Wait for the calls that use the descriptor, call `end_transfers`, and close the descriptor.

        A second close does nothing. A close during another close waits for the first.
        """
        with self._close_lock:
            if self._fd < 0:
                return
            try:
                self.native.begin_close()
                end_transfers()
                fd, self._fd = self._fd, -1
                os.close(fd)
                self._handle.release()
            finally:
                self.native.end_close(is_closed=self._fd < 0)


def check_choices(access: str, direct: str) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless both arguments of a file have one of their values."""
    for name, value, choices in (("access", access, get_args(Access)), ("direct", direct, get_args(Direct))):
        if value not in choices:
            message = f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}"
            raise UsageError(message)


def open_regular(path: str, flags: int) -> int:
    """Open a regular file and return its descriptor.

    Raises
    ------
    ApiError
        The kernel does not open the file, or it is a folder (EISDIR).
    UsageError
        The path is a pipe, a device or a socket.
    """
    try:
        # Without O_NONBLOCK, open of a pipe would block until its other end is opened. Regular files ignore the flag.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise os_error("open", path, error) from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise os_error("open", path, OSError(errno.EISDIR, os.strerror(errno.EISDIR)))
    message = f"{path} is not a regular file"
    raise UsageError(message)


def os_error(operation: str, path: str, error: OSError) -> ApiError:
    """Return the exception for a failed system call."""
    error_number = error.errno or errno.EIO
    return ApiError(
        api=Api.KERNEL,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments={"path": path},
        reason=reason_of(error_number),
    )
