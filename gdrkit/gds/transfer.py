"""Transfers as futures, and their results and errors.

A :class:`Transfer` is a future. It keeps the memory and the file alive until the last byte has moved, even if the
caller drops the future. Its result reports how many bytes arrived and which route they took.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping  # noqa: TC003 - a NamedTuple evaluates its annotations.
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gdrkit import forks
from gdrkit.cufile import Route
from gdrkit.errors import Api, ApiError, GdrkitError, Reason
from gdrkit.gds._native import Failure, api_error
from gdrkit.gds.totals import count_transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from gdrkit.gds.buffer import TransferBuffer

__all__ = [
    "Route",
    "Transfer",
    "TransferFailed",
    "TransferJob",
    "TransferSet",
    "Transferred",
    "short_transfer_error",
]

# Interval of progress reports, in seconds.
_PROGRESS_S = 0.05
# The direct routes. If a direct path is required, a transfer over another route fails.
DIRECT_ROUTES = frozenset({Route.P2P, Route.NVFS, Route.RDMA})


class Transferred(NamedTuple):
    """The result of a transfer.

    Attributes
    ----------
    bytes : int
        Bytes that arrived.
    route : Route
        The route that the bytes took.
    direct_io_bytes : int
        Bytes that bypassed the page cache (O_DIRECT).
    parts : tuple of int
        For each range, the number of bytes that arrived from its beginning without a gap.
    duration_s : float
        Time from the call to the last byte, in seconds.
    why_not_direct : str
        The reason why the bytes did not take a direct path; empty if they did, or if the caller did not want one.
    counters : mapping
        The evidence of the route: the increase of the counters of libcufile or nvidia-fs. Transfers that ran together
        have the increase of all of them. Empty if cuFile did not move the bytes.
    """

    bytes: int
    route: Route
    direct_io_bytes: int
    parts: tuple[int, ...]
    duration_s: float
    why_not_direct: str = ""
    counters: Mapping[str, int] = MappingProxyType({})


class TransferFailed(ApiError):
    """A transfer ended before all bytes had arrived.

    Even with ETIMEDOUT this error is not a TimeoutError, because a TimeoutError of :meth:`Transfer.result` means that
    the transfer continues.

    Attributes
    ----------
    transferred : Transferred
        The result up to the error. More bytes than it counts may have been moved.
    """

    transferred: Transferred

    @classmethod
    def _builtin_class(cls, number: int) -> type[OSError]:
        return OSError if number == errno.ETIMEDOUT else super()._builtin_class(number)


class TransferJob(Protocol):
    """The interface of an object that moves the bytes of one transfer: a job of the engine or of a direct path."""

    @property
    def route(self) -> Route:
        """The route that the bytes took. It is valid when the job is over."""

    @property
    def why_not_direct(self) -> str:
        """The reason why the route is not direct; empty if it is direct, or if the caller wanted no direct path."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The increase of the counters that show the route; empty if there are none."""

    def wait(self, timeout_us: int) -> bool:
        """Wait at most `timeout_us`, or without limit if it is negative. Return whether the job is over."""

    def cancel(self) -> None:
        """Start no further chunks."""

    def progress(self) -> dict[str, Any]:
        """Return ``bytes``, ``direct_bytes``, ``cancelled`` and ``failure`` (``_native.Failure`` or None).

        ``failed_part`` is optional: the arguments that name the failed part of the transfer.
        """

    def arrived(self) -> Sequence[int]:
        """Return how many bytes of each range arrived. It is valid when the job is over."""


class TransferSet:
    """A set of transfers in progress, in the order in which :meth:`add` returns them. It is thread-safe.

    A transfer leaves the set when it is settled: its result is stored and its memory is released.
    """

    def __init__(self) -> None:
        # Every transfer takes the lock several times. A ForkSafeLock would add two Python calls each time.
        self._lock = threading.Lock()
        self._transfers: OrderedDict[Transfer, None] = OrderedDict()
        forks.register(self)

    def add(self, transfer: Transfer, *, rotated_count: int = 0) -> list[Transfer]:
        """Add a transfer. Return the first `rotated_count` other transfers, and move them to the end of the set."""
        with self._lock:
            rotated = list(itertools.islice(self._transfers, rotated_count))
            for other in rotated:
                self._transfers.move_to_end(other)
            self._transfers[transfer] = None
        return rotated

    def discard(self, transfer: Transfer) -> None:
        """Remove a transfer, if it is in the set."""
        with self._lock:
            self._transfers.pop(transfer, None)

    def all(self) -> list[Transfer]:
        """Return the transfers that are in the set now."""
        with self._lock:
            return list(self._transfers)

    def after_fork_in_child(self) -> None:
        """Remove all transfers in a forked child, because only the parent has their threads. Keep their memory."""
        self._lock = threading.Lock()
        _transfers_of_parent.extend(self._transfers)
        self._transfers.clear()


# All transfers in progress. The set keeps them alive, because their memory must not be freed before they end.
_transfers_in_progress = TransferSet()
# In a forked child: the transfers of the parent. The child cannot know when they end, so it never frees their memory.
_transfers_of_parent: list[Transfer] = []
# Number of transfers in progress that each new transfer polls. Each new transfer adds one and polls two, so every
# transfer is polled again and again.
_POLLED_COUNT = 2


@dataclass(eq=False)
class Transfer:
    """A transfer in progress, as a future.

    The methods of :class:`gdrkit.gds.File` and :func:`gdrkit.gds.read_files` create it.

    Attributes
    ----------
    job : TransferJob
        The job that moves the bytes.
    lengths : sequence of int
        Requested length of each range, in bytes.
    buffer : TransferBuffer or None
        The memory. It is released when the transfer is over.
    arguments : mapping
        Arguments of the call, for errors.
    why_not_direct : str
        The reason why no direct path was used; empty if one was used, or if the caller did not want one.
    direct_required : bool
        Whether a route that is not direct is an error.
    keep : object
        Objects that must live until the transfer is over.
    groups : tuple of TransferSet
        The set of the transfers of each file.
    name_part : callable or None
        Function that returns the arguments, for errors, that name the range of this index.
    """

    job: TransferJob
    lengths: Sequence[int]
    buffer: TransferBuffer | None
    arguments: Mapping[str, object]
    why_not_direct: str = ""
    direct_required: bool = False
    keep: object = None
    groups: tuple[TransferSet, ...] = ()
    name_part: Callable[[int], Mapping[str, object]] | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _result: Transferred | None = None
    _error: GdrkitError | None = None

    def __post_init__(self) -> None:
        for group in self.groups:
            group.add(self)
        # A caller may drop a future without a call of result(). Then a later transfer settles the dropped one here.
        for transfer in _transfers_in_progress.add(self, rotated_count=_POLLED_COUNT):
            if transfer.job.wait(0):
                transfer._settle()  # noqa: SLF001 - same class.

    @property
    def bytes_moved(self) -> int:
        """Number of bytes that have arrived so far."""
        return int(self.job.progress()["bytes"])

    @property
    def length_bytes(self) -> int:
        """Number of bytes that were requested."""
        return sum(self.lengths)

    def done(self) -> bool:
        """Return whether the transfer is over."""
        return self.job.wait(0)

    def cancel(self) -> bool:
        """Start no further chunks. Chunks in progress complete. Return False if all chunks had been started."""
        self.job.cancel()
        return bool(self.job.progress()["cancelled"])

    def exception(self, timeout_s: float | None = None) -> GdrkitError | None:
        """Wait, and return the error that :meth:`result` would raise, or None."""
        self._wait(timeout_s)
        self._settle()
        return None if self._error is None else self._error.clone()

    def result(
        self, timeout_s: float | None = None, *, on_progress: Callable[[int, int], None] | None = None
    ) -> Transferred:
        """Wait until the transfer is over and return its result.

        Parameters
        ----------
        timeout_s : float or None
            Longest time to wait, in seconds; None for no limit.
        on_progress : callable or None
            Called about twenty times per second, and at the end, with the bytes that arrived and the bytes requested.
            An exception that it raises cancels the transfer.

        Raises
        ------
        TransferFailed
            A system call or the driver failed (``errno``, ``status``), a file was too short (END_OF_FILE), a caller
            cancelled the transfer (CANCELLED), or a required direct path was not taken (NOT_DIRECT). ``transferred``
            is the result up to the error.
        TimeoutError
            The transfer was not over in time. It continues.
        """
        if on_progress is None:
            self._wait(timeout_s)
        else:
            self._watch(timeout_s, on_progress)
        self._settle()
        if self._error is not None:
            raise self._error.clone()
        assert self._result is not None  # noqa: S101 - a settled transfer without an error has a result.
        return self._result

    def __await__(self) -> Generator[Any, None, Transferred]:
        """Wait in a coroutine, and return or raise as :meth:`result`. A thread of the loop's executor waits.

        If the coroutine is cancelled, the transfer is cancelled, and CancelledError is raised when it is over.
        """
        return self._wait_in_coroutine().__await__()

    async def _wait_in_coroutine(self) -> Transferred:
        waiting = asyncio.get_running_loop().run_in_executor(None, self.job.wait, -1)
        cancelled: asyncio.CancelledError | None = None
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError as error:
                cancelled = error
                self.job.cancel()
        if cancelled is not None:
            self._settle()
            raise cancelled
        return self.result()

    def _wait(self, timeout_s: float | None) -> None:
        if not self.job.wait(-1 if timeout_s is None else int(timeout_s * 1e6)):
            raise self._timeout_error()

    def _watch(self, timeout_s: float | None, on_progress: Callable[[int, int], None]) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        is_late = False
        try:
            while not is_late and not self.job.wait(int(_PROGRESS_S * 1e6)):
                on_progress(self.bytes_moved, self.length_bytes)
                is_late = deadline_s is not None and time.monotonic() >= deadline_s and not self.job.wait(0)
            if not is_late:
                on_progress(self.bytes_moved, self.length_bytes)
        except BaseException:
            self.job.cancel()
            self.job.wait(-1)
            self._settle()
            raise
        if is_late:
            raise self._timeout_error()

    def _timeout_error(self) -> TimeoutError:
        return TimeoutError(f"{self.bytes_moved} of {self.length_bytes} bytes moved so far")

    def _settle(self) -> None:
        """Store the result and the error of a transfer that is over, and release its memory. Later calls do nothing."""
        with self._lock:
            if self._result is not None:
                return
            progress, parts = self.job.progress(), tuple(self.job.arrived())
            # The parts do not contain bytes after a gap, so the total does not count them either.
            total_bytes = sum(parts)
            self._result = Transferred(
                bytes=total_bytes,
                route=self.job.route,
                direct_io_bytes=min(int(progress["direct_bytes"]), total_bytes),
                parts=parts,
                duration_s=time.monotonic() - self._began_s,
                why_not_direct=self.why_not_direct or self.job.why_not_direct,
                counters=self.job.counters,
            )
            self._error = self._error_of(progress, self._result)
            count_transfer(self._result.route, total_bytes)
            if self.buffer is not None:
                self.buffer.release()
            self.buffer = self.keep = None
        for group in self.groups:
            group.discard(self)
        _transfers_in_progress.discard(self)

    def _short_part(self, parts: tuple[int, ...]) -> Mapping[str, object]:
        """Return the arguments that name the first range that is not complete."""
        if self.name_part is None:
            return {}
        return self.name_part(next(index for index, part in enumerate(parts) if part != self.lengths[index]))

    def _error_of(self, progress: dict[str, Any], result: Transferred) -> GdrkitError | None:
        """Return the error of a transfer that is over, or None if it succeeded."""
        failure: Failure | None = progress["failure"]
        is_complete = failure is None and not progress["cancelled"] and result.parts == tuple(self.lengths)
        if is_complete and not (self.direct_required and result.bytes and result.route not in DIRECT_ROUTES):
            return None
        arguments = {**self.arguments, "transferred_bytes": result.bytes, **progress.get("failed_part", {})}
        detail = f"{result.bytes} of {self.length_bytes} bytes were moved"
        if failure is not None:
            if self.name_part is not None:
                arguments.update(self.name_part(progress["failed_extent"]))
            error = api_error(failure, arguments=arguments, error_class=TransferFailed, detail=detail)
        elif progress["cancelled"]:
            error = _early_end_error(arguments, detail, reason=Reason.CANCELLED)
        elif not is_complete:
            error = _early_end_error({**arguments, **self._short_part(result.parts)}, detail)
        else:
            detail = f"the route of the bytes is {result.route.value}: {result.why_not_direct}"
            error = _early_end_error(arguments, detail, reason=Reason.NOT_DIRECT)
        if isinstance(error, TransferFailed):
            error.transferred = result
        return error


def _early_end_error(
    arguments: Mapping[str, object], detail: str, *, reason: Reason = Reason.END_OF_FILE
) -> TransferFailed:
    """Return the error for a transfer that ended early, or took a route that is not direct, without a failed call."""
    return TransferFailed(
        api=Api.NONE,
        operation="transfer",
        status=None,
        status_name=reason.name,
        arguments=arguments,
        reason=reason,
        detail=detail,
    )


def short_transfer_error(failure: Failure | None, arguments: dict[str, object], result: Transferred) -> ApiError:
    """Return the error of a short transfer that failed, or that reached the end of the file (`failure` is None)."""
    arguments = {**arguments, "transferred_bytes": result.bytes}
    if failure is None:
        error: ApiError = _early_end_error(arguments, "the file has fewer bytes")
    else:
        error = api_error(failure, arguments=arguments, error_class=TransferFailed)
    if isinstance(error, TransferFailed):
        error.transferred = result
    return error
