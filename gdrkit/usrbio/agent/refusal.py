"""What an agent answers when it does not do what it was asked: an errno and a sentence.

Level 5.
"""

from __future__ import annotations

import errno

from gdrkit.errors import ApiError, GdrkitError, Reason, RegistrationFailed, UsageError, errno_name

__all__ = ["Refused", "refusal_of"]

_BY_REASON = {
    Reason.NO_ROUTE: errno.EOPNOTSUPP,
    Reason.MALFORMED: errno.EINVAL,
    Reason.NO_DEVICE: errno.ENODEV,
    Reason.NO_PERMISSION: errno.EACCES,
    Reason.MEMLOCK_TOO_LOW: errno.ENOMEM,
    Reason.OUT_OF_MEMORY: errno.ENOMEM,
    Reason.PEER_GONE: errno.EREMOTEIO,
    Reason.TIMEOUT: errno.ETIMEDOUT,
    Reason.BUSY: errno.EBUSY,
    Reason.CLOSED: errno.ESHUTDOWN,
    Reason.NOT_SUPPORTED: errno.EOPNOTSUPP,
    Reason.BAD_DESCRIPTOR: errno.EBADF,
}


class Refused(GdrkitError):
    """The answer of an agent to a request that it does not carry out.

    Attributes
    ----------
    errno : int
        Positive; what the C interface returns, with its sign.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"{message} ({errno_name(number)})", reason=Reason.OTHER)
        self.errno = number


def refusal_of(error: GdrkitError | OSError) -> Refused:
    """The answer to give for an error: its own errno where it has one, else the nearest to its reason."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, OSError):
        return Refused(error.errno or errno.EIO, str(error.strerror or error))
    if isinstance(error, ApiError) and error.errno:
        return Refused(error.errno, str(error))
    if isinstance(error, RegistrationFailed):
        return Refused(_BY_REASON.get(error.reason, errno.EIO), str(error))
    default = errno.EINVAL if isinstance(error, UsageError) else errno.EIO
    return Refused(_BY_REASON.get(error.reason, default), str(error))
