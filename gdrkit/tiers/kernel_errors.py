"""Conversion of failed system calls (OSError) to :class:`ApiError`, with the reason and what to do."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, errno_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["busy_error", "convert_os_errors", "kernel_error"]

_REASON_BY_ERRNO = {
    errno.ENOSPC: Reason.NO_SPACE,
    errno.EDQUOT: Reason.NO_SPACE,
    errno.EFBIG: Reason.NO_SPACE,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
    errno.EROFS: Reason.NO_PERMISSION,
    errno.EIO: Reason.IO_ERROR,
    errno.ELOOP: Reason.BAD_ARGUMENT,
    errno.ENOTDIR: Reason.BAD_ARGUMENT,
    errno.EISDIR: Reason.BAD_ARGUMENT,
    errno.ENAMETOOLONG: Reason.BAD_ARGUMENT,
    errno.EEXIST: Reason.CONFLICT,
    errno.EAGAIN: Reason.BUSY,
    errno.EBUSY: Reason.BUSY,
    errno.EOPNOTSUPP: Reason.NOT_SUPPORTED,
}
_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "free space in that tier: run gdrkit tiers migrate, or configure a smaller capacity for it",
    errno.EDQUOT: "free space in that tier, or request a larger quota",
    errno.EACCES: "give this user read and write permission for the tier",
    errno.EPERM: "give this user the permission, or run as root",
    errno.EROFS: "the tier is mounted read-only; if that is not intended, see dmesg for the cause",
    errno.EIO: "the device failed: see the kernel log, and do not use the tier",
    errno.ELOOP: "a name in a tier must not contain a symbolic link",
    errno.ENOTDIR: "a part of the name is a file, not a folder",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOENT: "run gdrkit tiers check, which compares the catalogue with the tiers",
    errno.EEXIST: "run gdrkit tiers check, which lists the files that are in two tiers",
}


def kernel_error(error: OSError, operation: str, **arguments: object) -> ApiError:
    """Return the exception for a failed system call, with its errno and what to do."""
    error_number = error.errno or errno.EIO
    return ApiError(
        api=Api.KERNEL,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments=arguments,
        reason=_REASON_BY_ERRNO.get(error_number, Reason.OTHER),
        what_to_do=_ADVICE_BY_ERRNO.get(error_number, ""),
        detail=str(error.strerror or error),
    )


def busy_error(operation: str, detail: str, **arguments: object) -> ApiError:
    """Return the exception for a file that is in use. The caller may try again later."""
    return ApiError(
        api=Api.KERNEL,
        operation=operation,
        status=errno.EBUSY,
        status_name=errno_name(errno.EBUSY),
        errno=errno.EBUSY,
        arguments=arguments,
        reason=Reason.BUSY,
        what_to_do="try again when the file is no longer in use",
        detail=detail,
    )


@contextmanager
def convert_os_errors(operation: str, **arguments: object) -> Iterator[None]:
    """Convert an OSError in this block to an :class:`ApiError`."""
    try:
        yield
    except ApiError:
        raise  # An ApiError of the kernel is an OSError too, but needs no conversion.
    except OSError as error:
        raise kernel_error(error, operation, **arguments) from error
