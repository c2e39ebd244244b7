"""Conversion of errors of the kernel to the errors of gdrkit."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, errno_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["busy", "kernel_error", "told"]

_REASONS = {
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
_TO_DO = {
    errno.ENOSPC: "make room in that tier: gdrkit tiers migrate, or a smaller capacity in its configuration",
    errno.EDQUOT: "make room in that tier, or ask for a larger quota",
    errno.EACCES: "let this user read and write the tier",
    errno.EPERM: "let this user do that, or be root",
    errno.EROFS: "the tier is mounted read-only: dmesg says why, if nobody asked for it",
    errno.EIO: "the device failed: look into the kernel's log, and take the tier out of use",
    errno.ELOOP: "a name in a tier must not lead through a symbolic link",
    errno.ENOTDIR: "a part of the name is a file",
    errno.EISDIR: "name a file",
    errno.ENOENT: "gdrkit tiers check compares the catalogue with the tiers",
    errno.EEXIST: "gdrkit tiers check names the files that are in two tiers",
}


def kernel_error(error: OSError, operation: str, **arguments: object) -> ApiError:
    """Return the exception for a failed system call, with its errno and what to do."""
    number = error.errno or errno.EIO
    return ApiError(
        api=Api.KERNEL,
        operation=operation,
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments=arguments,
        reason=_REASONS.get(number, Reason.OTHER),
        what_to_do=_TO_DO.get(number, ""),
        detail=str(error.strerror or error),
    )


def busy(operation: str, why: str, **arguments: object) -> ApiError:
    """Return the exception for a file that is in use. The caller may try again later."""
    return ApiError(
        api=Api.KERNEL,
        operation=operation,
        status=errno.EBUSY,
        status_name=errno_name(errno.EBUSY),
        errno=errno.EBUSY,
        arguments=arguments,
        reason=Reason.BUSY,
        what_to_do="try again when it is no longer used",
        detail=why,
    )


@contextmanager
def told(operation: str, **arguments: object) -> Iterator[None]:
    """Convert an OSError in this block to an :class:`ApiError`."""
    try:
        yield
    except OSError as error:
        raise kernel_error(error, operation, **arguments) from error
