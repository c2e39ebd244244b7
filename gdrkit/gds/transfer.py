"""Transfers as futures.

A :class:`Transfer` keeps the memory and the file alive until the last byte has moved, even if the caller drops the
future. The result reports how many bytes arrived and which route they took.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from gdrkit.errors import ApiError, GdrkitError, Reason, UsageError
from gdrkit.gds._native import Failure, api_error, native
from gdrkit.gds.event_loop import loop_waits
from gdrkit.gds.result import (
    DIRECT_ROUTES,
    NO_COUNTERS,
    Route,
    TransferFailed,
    TransferResult,
    error_without_failed_call,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import NoReturn

    from gdrkit.gds.buffer import TransferBuffer

__all__ = ["Transfer", "TransferJob", "transfers_of"]

# Interval of progress reports, in seconds.
_PROGRESS_INTERVAL_S = 0.05
# Longer timeouts count as no limit: a hundred years, in seconds.
_TIMEOUT_S_MAX = 100 * 365 * 86400.0

# `extents` of Transfer has four numbers for each range: index of the file, offset in the file, address, length.
_NUMBERS_PER_EXTENT = 4


class TransferJob(Protocol):
    """The interface of an object that moves the bytes of one transfer: a job of the engine or of a direct path."""

    def wait(self, timeout_us: int) -> bool:
        """Wait at most `timeout_us`, or without limit if it is negative. Return whether the job is over."""

    def notify(self, queue: Any, token: int) -> None:  # noqa: ANN401 - native object.
        """Add the token to a native completion queue when the job is over; at once if it is over already."""

    def cancel(self) -> None:
        """Start no further chunks. Chunks in progress complete."""

    def progress(self) -> dict[str, Any]:
        """Return a dict with ``bytes``, ``direct_bytes``, ``cancelled``, ``failure`` and ``duration_s``.

        ``bytes`` is the number of bytes that arrived so far, and ``direct_bytes`` how many of them bypassed the page
        cache. ``failure`` is a ``_native.Failure`` or None. ``duration_s`` is valid when the job is over.

        Further keys are optional: ``route`` (without it, the copy engine moved the bytes), ``why_not_direct``,
        ``counters`` (the increase of the counters that show the route), ``failed_extent`` (the index of the failed
        range) and ``failed_part`` (the arguments that name the failed part of the transfer).
        """

    def arrived(self) -> Sequence[int]:
        """Return how many bytes of each range arrived. The result is valid when the job is over."""


# Each transfer has a number, its token. `native.in_progress` has all transfers in progress, by their tokens. It keeps
# them alive, because their memory must not be freed before they end. `native.ended` has the transfers whose job is
# over. The dictionaries and the native queue of the ended jobs need no lock, so that a finalizer may start a transfer.
_tokens = itertools.count(1)


def transfers_of(file: object) -> list[Transfer]:
    """Return the transfers in progress of an open file."""
    return [transfer for transfer in native.in_progress.copy().values() if file in transfer.files]


class _JobOfParent:
    """A placeholder, in a forked child, for the job of a transfer of the parent process. Every call raises an error."""

    def __getattr__(self, name: str) -> NoReturn:
        message = "the transfer was started before the fork, so that only the parent process can wait for it"
        raise UsageError(message)


def _after_fork_in_child() -> None:
    if "gdrkit.gds._engine" not in sys.modules:
        return
    # Only the parent has the threads that end the transfers. The child cannot know when they end, so it never frees
    # their memory and their jobs, which a thread of the parent may have locked.
    for transfer in tuple(native.in_progress.values()):
        native.keep_forever((transfer.job, transfer.buffer))
        transfer.job = _JobOfParent()
    native.in_progress.clear()
    native.ended.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Transfer:
    """A transfer in progress, as a future.

    The methods of :class:`gdrkit.gds.File` and :func:`gdrkit.gds.read_files` create a transfer before they submit its
    job. If an interrupt ends such a call before the job is queued, the call releases the memory. Otherwise the memory
    stays in use until the job ends.

    Attributes
    ----------
    job : TransferJob
        The job that moves the bytes.
    extents : sequence of int
        Four numbers for each range: index in `files`, offset in the file, address, length in bytes.
    buffer : TransferBuffer or None
        The memory. It is released when the transfer is over.
    files : sequence
        The open files, which stay alive until the transfer is over, or the paths of files that the job opens.
    token : int
        Number that identifies the transfer in ``in_progress``, ``ended`` and ``ended_jobs`` of the native engine.
    why_not_direct : str
        The reason why no direct path was used; empty if one was used, or if the caller did not want one.
    """

    __slots__ = (
        "__weakref__",
        "_device_index",
        "_is_direct_required",
        "_outcome",
        "buffer",
        "extents",
        "files",
        "job",
        "token",
        "why_not_direct",
    )

    def __init__(self, buffer: TransferBuffer, files: tuple[object, ...], *, direct_required: bool = False) -> None:
        self.job: TransferJob
        self.extents: Sequence[int] = ()
        self.buffer: TransferBuffer | None = buffer
        self.files = files
        self.why_not_direct = ""
        self._is_direct_required = direct_required
        self._device_index = buffer.device_index
        # The result and the error, in one tuple, so that a thread sees both or none of them. None until _finish().
        self._outcome: tuple[TransferResult, GdrkitError | None] | None = None
        self.token = next(_tokens)
        # A caller may drop a future without calling result(). The next transfer that is created after the end of the
        # job releases the memory of that future here.
        if native.collect_ended():
            for transfer in tuple(native.ended.values()):
                transfer.release()

    def start(self, job: TransferJob, start_function: Callable[[Any], object], argument: object) -> None:
        """Store the job, and call `start_function` with `argument`, which starts the job.

        If `start_function` is written in C, such as the method of a queue, no interrupt can come between the two steps.
        So the transfer has a job if and only if the job was started.
        """
        job.notify(native.ended_jobs, self.token)
        native.start(self, job, start_function, argument)

    def discard(self) -> None:
        """Release the memory after the start has failed, unless a job uses the memory."""
        if not hasattr(self, "job") or self.job.wait(0):
            self.release()

    @property
    def bytes_moved(self) -> int:
        """Number of bytes that have arrived so far."""
        return int(self.job.progress()["bytes"])

    @property
    def length_bytes(self) -> int:
        """Number of bytes that were requested."""
        return sum(self.extents[3::_NUMBERS_PER_EXTENT])

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
        _, error = self._finish()
        return None if error is None else error.clone()

    def result(
        self, timeout_s: float | None = None, *, on_progress: Callable[[int, int], None] | None = None
    ) -> TransferResult:
        """Wait until the transfer is over and return its result.

        Parameters
        ----------
        timeout_s : float or None
            Longest time to wait, in seconds. A negative time is the same as 0. None and infinity mean no limit.
        on_progress : callable or None
            Function that is called about twenty times per second, and at the end, with the number of bytes that arrived
            and the number of bytes requested. If it raises an error, the transfer is cancelled.

        Raises
        ------
        TransferFailed
            A system call or the driver failed (``errno``, ``status``), a file was too short (END_OF_FILE), a caller
            cancelled the transfer (CANCELLED), or a required direct path was not taken (NOT_DIRECT). The names in
            capitals are reasons. ``partial_result`` is the result up to the error.
        TimeoutError
            The transfer was not over in time. It continues.
        UsageError
            The timeout is not a number (NaN).
        """
        if on_progress is None:
            self._wait(timeout_s)
        else:
            self._wait_with_progress(timeout_s, on_progress)
        result, error = self._finish()
        if error is not None:
            raise error.clone()
        return result

    def __await__(self) -> Generator[Any, None, TransferResult]:
        """Wait in a coroutine, and return or raise as :meth:`result`. No thread waits; the event loop does.

        If the coroutine is cancelled, the transfer is cancelled, and CancelledError is raised when it is over.
        """
        cancelled_error: asyncio.CancelledError | None = None
        while not self.job.wait(0):
            try:
                yield from loop_waits().wait_for(self.job.notify)
            except asyncio.CancelledError as error:
                cancelled_error = error
                self.job.cancel()
            except ApiError:  # LoopWaits found no free descriptor for the event loop.
                self._cancel_and_wait()
                raise
        if cancelled_error is not None:
            self._finish()
            raise cancelled_error
        return self.result()

    def _wait(self, timeout_s: float | None) -> None:
        if not self.job.wait(_to_timeout_us(timeout_s)):
            raise self._make_timeout_error()

    def _wait_with_progress(self, timeout_s: float | None, on_progress: Callable[[int, int], None]) -> None:
        deadline_s = None if _to_timeout_us(timeout_s) < 0 else time.monotonic() + (timeout_s or 0)
        is_late = False
        try:
            while not is_late and not self.job.wait(int(_PROGRESS_INTERVAL_S * 1e6)):
                on_progress(self.bytes_moved, self.length_bytes)
                is_late = deadline_s is not None and time.monotonic() >= deadline_s and not self.job.wait(0)
            if not is_late:
                on_progress(self.bytes_moved, self.length_bytes)
        except BaseException:
            self._cancel_and_wait()
            raise
        if is_late:
            raise self._make_timeout_error()

    def _cancel_and_wait(self) -> None:
        """Cancel the transfer, wait for the chunks in progress, and release the memory."""
        self.job.cancel()
        self.job.wait(-1)
        self._finish()

    def _make_timeout_error(self) -> TimeoutError:
        return TimeoutError(f"{self.bytes_moved} of {self.length_bytes} bytes moved so far")

    def _finish(self) -> tuple[TransferResult, GdrkitError | None]:
        """Release the memory of a transfer that is over, and return the result and the error of the transfer.

        Several threads may call this method at the same time without a lock, because all of them compute the same
        outcome.
        """
        if self._outcome is None:
            try:
                progress, range_bytes = self.job.progress(), tuple(self.job.arrived())
            except BaseException:
                self.release()
                raise
            # The count of a range ends at its first gap, so the total does not count bytes after a gap either.
            total_bytes = sum(range_bytes)
            result = TransferResult(
                total_bytes,
                progress.get("route", Route.ENGINE),
                min(progress["direct_bytes"], total_bytes),
                range_bytes,
                progress["duration_s"],
                self.why_not_direct or progress.get("why_not_direct", ""),
                progress.get("counters", NO_COUNTERS),
            )
            self._outcome = result, self._make_error(progress, result)
        self.release()
        return self._outcome

    def release(self) -> None:
        """Release the memory of a transfer that is over or was not started. Further calls do nothing."""
        buffer = self.buffer
        if buffer is not None:
            buffer.release()
            self.buffer = None
        native.in_progress.pop(self.token, None)
        native.ended.pop(self.token, None)

    def _make_error(self, progress: dict[str, Any], result: TransferResult) -> GdrkitError | None:
        """Return the error of a transfer that is over, or None if it succeeded."""
        failure: Failure | None = progress["failure"]
        requested_bytes = tuple(self.extents[3::_NUMBERS_PER_EXTENT])
        is_complete = failure is None and not progress["cancelled"] and result.range_bytes == requested_bytes
        if is_complete and not (self._is_direct_required and result.bytes and result.route not in DIRECT_ROUTES):
            return None
        failed_range_index: int | None = progress.get("failed_extent") if failure is not None else None
        if failure is None and not progress["cancelled"] and not is_complete:
            failed_range_index = next(
                index for index, count in enumerate(result.range_bytes) if count != requested_bytes[index]
            )
        arguments = {
            **self._make_error_arguments(failed_range_index),
            "transferred_bytes": result.bytes,
            **progress.get("failed_part", {}),
        }
        detail = f"{result.bytes} of {self.length_bytes} bytes were moved"
        if failure is not None:
            error = api_error(failure, arguments=arguments, error_class=TransferFailed, detail=detail)
        elif progress["cancelled"]:
            error = error_without_failed_call(arguments, detail, reason=Reason.CANCELLED)
        elif not is_complete:
            error = error_without_failed_call(arguments, detail)
        else:
            detail = f"the route of the bytes is {result.route.value}: {result.why_not_direct}"
            error = error_without_failed_call(arguments, detail, reason=Reason.NOT_DIRECT)
        if isinstance(error, TransferFailed):
            error.partial_result = result
        return error

    def _make_error_arguments(self, failed_range_index: int | None) -> dict[str, object]:
        """Return the arguments that an error shows. They name the file and the offset of the failed range, if known.

        If `failed_range_index` is None, and the transfer has a single range, that range is named.
        """
        arguments: dict[str, object] = {"device_index": self._device_index, "length_bytes": self.length_bytes}
        if failed_range_index is None and len(self.extents) == _NUMBERS_PER_EXTENT:
            failed_range_index = 0
        if len(self.files) > 1:
            arguments["files_count"] = len(self.files)
        if len(self.files) == 1 or failed_range_index is not None:
            file = self.files[
                0 if failed_range_index is None else self.extents[_NUMBERS_PER_EXTENT * failed_range_index]
            ]
            arguments["path"] = str(getattr(file, "path", file))
        if failed_range_index is not None:
            arguments["file_offset_bytes"] = self.extents[_NUMBERS_PER_EXTENT * failed_range_index + 1]
        return arguments


def _to_timeout_us(timeout_s: float | None) -> int:
    """Return the timeout in microseconds; -1 for no limit."""
    if timeout_s is None or timeout_s > _TIMEOUT_S_MAX:
        return -1
    if math.isnan(timeout_s):
        message = "timeout_s must be a number of seconds, or None for no limit, not nan"
        raise UsageError(message)
    return int(max(timeout_s, 0) * 1e6)
