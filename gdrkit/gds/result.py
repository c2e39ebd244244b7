"""Results and errors of transfers: how many bytes arrived, and which route they took."""

from __future__ import annotations

import errno
from collections.abc import Mapping  # noqa: TC003 - the documentation reads the types of a NamedTuple.
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from gdrkit.cufile import Route
from gdrkit.errors import Api, ApiError, Reason
from gdrkit.gds._native import api_error

if TYPE_CHECKING:
    from gdrkit.gds._native import Failure

__all__ = [
    "DIRECT_ROUTES",
    "NO_COUNTERS",
    "Route",
    "TransferFailed",
    "TransferResult",
    "error_without_failed_call",
    "short_transfer_error",
]

# The direct routes. If a direct path is required, a transfer over another route fails.
DIRECT_ROUTES = frozenset({Route.P2P, Route.NVFS, Route.RDMA})
# The value of TransferResult.counters if cuFile did not move the bytes.
NO_COUNTERS: Mapping[str, int] = MappingProxyType({})


class TransferResult(NamedTuple):
    """The result of a transfer.

    Attributes
    ----------
    bytes : int
        Bytes that arrived.
    route : Route
        The route that the bytes took.
    direct_io_bytes : int
        Bytes that bypassed the page cache (O_DIRECT).
    range_bytes : tuple of int
        For each range of the transfer, the number of bytes from its beginning that arrived without a gap.
    duration_s : float
        Time from the call to the last byte, in seconds.
    why_not_direct : str
        The reason why the bytes did not take a direct path; empty if they did, or if the caller did not want one.
    counters : mapping
        The evidence of the route: the increase of each counter of libcufile or nvidia-fs. Other transfers at the same
        time increase these counters, too. The mapping is empty if cuFile did not move the bytes.
    """

    bytes: int
    route: Route
    direct_io_bytes: int
    range_bytes: tuple[int, ...]
    duration_s: float
    why_not_direct: str = ""
    counters: Mapping[str, int] = NO_COUNTERS


class TransferFailed(ApiError):
    """A transfer failed: not all bytes arrived, or it did not take the required direct path.

    Even with ETIMEDOUT this error is not a TimeoutError, because a TimeoutError of :meth:`Transfer.result` means that
    the transfer continues.

    Attributes
    ----------
    partial_result : TransferResult
        The result up to the error. Its number of bytes is a lower bound: more bytes may have arrived.
    """

    partial_result: TransferResult

    @classmethod
    def _find_builtin_class(cls, errno_value: int) -> type[OSError]:
        return OSError if errno_value == errno.ETIMEDOUT else super()._find_builtin_class(errno_value)


def error_without_failed_call(
    arguments: Mapping[str, object], detail: str, *, reason: Reason = Reason.END_OF_FILE
) -> TransferFailed:
    """Return the error of a transfer in which no call failed, but which ended early or did not take a required path.

    The caller sets the attribute `partial_result`.
    """
    return TransferFailed(
        api=Api.NONE,
        operation="transfer",
        status=None,
        status_name=reason.name,
        arguments=arguments,
        reason=reason,
        detail=detail,
    )


def short_transfer_error(failure: Failure | None, arguments: dict[str, object], result: TransferResult) -> ApiError:
    """Return the error of a transfer that moved too few bytes: the failed call, or the end of the file."""
    arguments = {**arguments, "transferred_bytes": result.bytes}
    if failure is None:
        error: ApiError = error_without_failed_call(arguments, "the file ends before the last requested byte")
    else:
        error = api_error(failure, arguments=arguments, error_class=TransferFailed)
    if isinstance(error, TransferFailed):
        error.partial_result = result
    return error
