"""Batches: many transfers that one call submits, and whose results are polled.

A batch keeps the memory and the files of its transfers alive until it has reported the result of each.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.cufile import _cufile, _results
from gdrkit.cufile.handle import check_piece
from gdrkit.errors import ClosedResource, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.handle import FileHandle, Piece
    from gdrkit.errors import ApiError

__all__ = ["Batch", "Ended", "Event", "Opcode", "Request"]

_CUFILE_BASE = 5000


class Opcode(enum.IntEnum):
    """Direction of a transfer (``CUfileOpcode_t``)."""

    READ = 0
    WRITE = 1


class Ended(enum.IntEnum):
    """State of a transfer in a batch (``CUfileStatus_t``)."""

    WAITING = 0x01
    PENDING = 0x02
    INVALID = 0x04
    CANCELED = 0x08
    COMPLETE = 0x10
    TIMEOUT = 0x20
    FAILED = 0x40


@dataclass(frozen=True, slots=True)
class Request:
    """One transfer of a batch."""

    opcode: Opcode
    handle: FileHandle
    piece: Piece
    file_offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """The result of one transfer.

    Attributes
    ----------
    request : Request
        The request of this transfer.
    status : Ended
        Final state of the transfer.
    bytes : int
        Bytes moved; 0 unless the transfer is complete.
    error : ApiError or None
        The error if the transfer failed, otherwise None.
    """

    request: Request
    status: Ended
    bytes: int
    error: ApiError | None


class Batch:
    """A batch of transfers that are submitted together; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. It destroys the batch when it closes, at the latest.
    capacity : int
        Largest number of transfers whose result was not fetched yet.

    Raises
    ------
    ApiError
        CU_FILE_INVALID_VALUE: `capacity` is above :attr:`Properties.max_batch_io`.
    """

    def __init__(self, driver: Driver, capacity: int) -> None:
        driver.check_open()
        if capacity <= 0:
            message = f"no batch has room for {capacity}"
            raise UsageError(message)
        self.capacity = capacity
        self._number = int(_cufile.call("cuFileBatchIOSetUp", "batch_io_set_up", nr=capacity))
        self._handle = Handle("cufile.batch")
        self._leave = driver.on_close(self.close)
        self._cookies = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._kept: list[object] = []
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Number of transfers whose result was not fetched yet."""
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit these transfers, all of them or none.

        Raises
        ------
        ApiError
            CU_FILE_BATCH_FULL: the batch is full; call :meth:`status` first.
        UsageError
            A request is invalid.
        """
        self._check_open()
        if not requests:
            message = "no request was given"
            raise UsageError(message)
        new = {next(self._cookies): request for request in requests}
        made = _cufile.entries([_row(cookie, request) for cookie, request in new.items()])
        with requests[0].piece.memory.current():
            _cufile.submit(self._number, made)
        self._requests |= new
        # The library may read the array until the last of its transfers has ended.
        self._kept.append(made)

    def status(self, *, count_min: int = 0, timeout_s: float | None = None) -> list[Event]:
        """Return the results of transfers that ended, each once.

        Parameters
        ----------
        count_min : int
            Number of results to wait for.
        timeout_s : float or None
            Longest time to wait, in seconds. None: until there are `count_min` results.
        """
        self._check_open()
        if count_min > self.outstanding or (timeout_s is not None and timeout_s < 0):
            message = f"no {count_min} of {self.outstanding} transfers can end within {timeout_s} s"
            raise UsageError(message)
        if not self._requests:
            return []
        found = _cufile.events(self._number, count_min=count_min, count_max=max(self.capacity, 1), timeout_s=timeout_s)
        ended = [_event(self._requests.pop(cookie), status, result) for cookie, status, result in found]
        if not self._requests:
            self._kept.clear()
        return ended

    def cancel(self) -> None:
        """Cancel the transfers that have not started; :meth:`status` reports which."""
        self._check_open()
        _cufile.call("cuFileBatchIOCancel", "batch_io_cancel", batch_idp=self._number)

    def close(self) -> None:
        """Cancel transfers that have not started, wait for the others and destroy the batch. Later calls do nothing."""
        if self._closed:
            return
        _cufile.call("cuFileBatchIODestroy", "batch_io_destroy", batch_idp=self._number)
        self._closed = True
        self._requests.clear()
        self._kept.clear()
        self._leave()
        self._handle.release()

    def _check_open(self) -> None:
        if self._closed:
            what = "the batch"
            raise ClosedResource(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _row(cookie: int, request: Request) -> tuple[int, int, int, int, int, int, int]:
    length_bytes = check_piece(request.piece, file_offset_bytes=request.file_offset_bytes)
    return (
        request.handle.number,
        int(request.opcode),
        request.piece.memory.address,
        request.file_offset_bytes,
        request.piece.offset_bytes,
        length_bytes,
        cookie,
    )


def _event(request: Request, status: int, result: int) -> Event:
    error: ApiError | None = None
    if result < 0:
        operation = f"batch {request.opcode.name.lower()}"
        arguments = {"file_offset": request.file_offset_bytes}
        if result < -_CUFILE_BASE:
            error = _results.error_of(operation=operation, status=-result, arguments=arguments)
        else:
            error = _results.errno_error(operation=operation, number=-result, arguments=arguments)
    return Event(request, Ended(status), max(result, 0), error)
