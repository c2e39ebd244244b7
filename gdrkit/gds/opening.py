"""Opening of regular files, their descriptors, and conversion of OSError to the errors of gdrkit."""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import TYPE_CHECKING, Any, Literal, get_args

from gdrkit import forks
from gdrkit.errors import Api, ApiError, ClosedResource, UsageError, errno_name
from gdrkit.gds._native import api_error, native, reason_of
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = [
    "OPEN_FLAGS",
    "Access",
    "DirectPathMode",
    "OpenDescriptor",
    "check_choices",
    "make_kernel_error",
    "open_file",
    "open_regular",
]

# I/O path of the copy engine: through the page cache (buffered), with O_DIRECT (direct), or chosen by the engine.
Access = Literal["automatic", "buffered", "direct"]
# Whether transfers must or may use a direct path, which moves bytes between disk and device without host memory.
DirectPathMode = Literal["preferred", "required", "never"]

# AT_FDCWD of openat(2): a relative path begins at the current folder of the process.
_CURRENT_FOLDER_FD = -100
# Flags of open(2) for each mode of File.
OPEN_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class OpenDescriptor:
    """The descriptor of an open file. :meth:`close` waits for the calls that use it. The methods are thread-safe.

    Parameters
    ----------
    native_file : object
        The file of the native engine.
    path : str
        Path of the file, for errors.

    Attributes
    ----------
    native_file : object
        The file of the native engine. It owns the descriptor, and counts the calls and the jobs that use the file.
    """

    def __init__(self, native_file: Any, path: str) -> None:  # noqa: ANN401 - native object.
        self.path = path
        self.native_file = native_file
        # The handle counts this file as an open object until close().
        self._handle = Handle("gds.file")
        forks.register(self)

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return bool(self.native_file.closed)

    def fileno(self) -> int:
        """Return the descriptor. This object still owns it."""
        fd = int(self.native_file.fileno())
        if fd < 0:
            raise ClosedResource(self.path)
        return fd

    def hold_open(self) -> AbstractContextManager[Any]:
        """Return a context manager with the native file. :meth:`close` waits for the end of its block."""
        try:
            native_use: AbstractContextManager[Any] = self.native_file.begin_use()
        except native.FileClosed:
            raise ClosedResource(self.path) from None
        return native_use

    def close(self, finish_transfers: Callable[[], None]) -> None:
        """Wait for the calls that use the descriptor, call `finish_transfers`, and close the descriptor.

        A second close does nothing. A close during another close waits for the first.
        """
        try:
            # If a signal handler forks during the native close(), after_fork_in_child() gives the child a new native
            # file, which is still open. The loop closes that file, too.
            while not self.closed:
                # While the interpreter ends, the native close() must not wait for uses of the file: the interpreter has
                # stopped the other threads, so their uses never end.
                self.native_file.close(finish_transfers, not sys.is_finalizing())
        except native.EngineError as error:
            raise api_error(error.args, arguments={"path": self.path}) from error
        finally:
            if self.closed:
                self._handle.release()

    def after_fork_in_child(self) -> None:
        """Forget, in a forked child, the uses of the file by threads of the parent, which never end in the child."""
        self.native_file = self.native_file.replace_after_fork()


def check_choices(access: str, direct: str) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless both arguments have allowed values."""
    for argument_name, value, choices in (
        ("access", access, get_args(Access)),
        ("direct", direct, get_args(DirectPathMode)),
    ):
        if value not in choices:
            message = f"{argument_name} must be one of {', '.join(map(repr, choices))}, not {value!r}"
            raise UsageError(message)


def open_file(
    path: str,
    flags: int,
    mode: int = 0,
    *,
    folder_fd: int = _CURRENT_FOLDER_FD,
) -> Any:  # noqa: ANN401 - native object.
    """Open any file, and return it as a file of the native engine. Raise OSError if the kernel does not open it.

    The destructor of the native file closes the descriptor, so that no interrupt leaves the descriptor open. A relative
    path begins at the folder of `folder_fd`.
    """
    try:
        return native.OpenFile.open(os.fsencode(path), flags, mode, folder_fd)
    except native.EngineError as error:
        error_number = error.args[2]
        raise OSError(error_number, os.strerror(error_number), path) from None


def open_regular(path: str, flags: int) -> Any:  # noqa: ANN401 - native object.
    """Open a regular file and return it as a file of the native engine, which owns the descriptor.

    Raises
    ------
    ApiError
        The kernel does not open the file, or the path is a folder (EISDIR).
    UsageError
        The path is a pipe, a device or a socket.
    """
    try:
        # Without O_NONBLOCK, open of a pipe would block until its other end is opened. Regular files ignore the flag.
        native_file = open_file(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise make_kernel_error("open", path, error) from error
    file_mode = os.fstat(native_file.fileno()).st_mode
    if stat.S_ISREG(file_mode):
        return native_file
    if stat.S_ISDIR(file_mode):
        raise make_kernel_error("open", path, OSError(errno.EISDIR, os.strerror(errno.EISDIR)))
    message = f"{path} is not a regular file"
    raise UsageError(message)


def make_kernel_error(operation: str, path: str, error: OSError) -> ApiError:
    """Return the ApiError for a failed system call on `path`."""
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
