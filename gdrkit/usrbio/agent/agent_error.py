"""The error of a request to an agent: an errno and a text, which the agent sends to the client."""

from __future__ import annotations

import errno

from gdrkit.errors import ApiError, GdrkitError, Reason, RegistrationFailed, UsageError, errno_name

__all__ = ["AgentError", "as_agent_error"]

_ERRNO_BY_REASON = {
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


class AgentError(GdrkitError):
    """The agent refused a request of a client, or the request failed.

    Attributes
    ----------
    errno : int
        A positive errno, with which the function of the C interface fails.
    """

    def __init__(self, error_number: int, message: str) -> None:
        super().__init__(f"{message} ({errno_name(error_number)})", reason=Reason.OTHER)
        self.errno = error_number


def as_agent_error(error: GdrkitError | OSError) -> AgentError:
    """Return the error to send to the client: with the errno of `error` if it has one, else the errno of its reason."""
    if isinstance(error, AgentError):
        return error
    if isinstance(error, ApiError) and error.errno:
        return AgentError(error.errno, str(error))
    if isinstance(error, OSError):
        return AgentError(error.errno or errno.EIO, str(error.strerror or error))
    if isinstance(error, RegistrationFailed):
        return AgentError(_ERRNO_BY_REASON.get(error.reason, errno.EIO), str(error))
    default_errno = errno.EINVAL if isinstance(error, UsageError) else errno.EIO
    return AgentError(_ERRNO_BY_REASON.get(error.reason, default_errno), str(error))
