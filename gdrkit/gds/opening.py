"""Opening of regular files, and conversion of OSError to the errors of gdrkit."""

from __future__ import annotations

import errno
import os
import stat

from gdrkit.errors import Api, ApiError, UsageError, errno_name
from gdrkit.gds._native import reason_of

__all__ = ["open_regular", "os_error"]


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
