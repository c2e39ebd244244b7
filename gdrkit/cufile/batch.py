"""Batches: many transfers by one call, whose ends are asked for later.

Level 2. A batch keeps the memory and the files of what it was given until it has said how each of them ended.
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
    """Which way (``CUfileOpcode_t``)."""

    READ = 0
    WRITE = 1


class Ended(enum.IntEnum):
    """How a transfer of a batch stands (``CUfileStatus_t``)."""

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
    """How one transfer ended.

    Attributes
    ----------
    request : Request
        What was asked for.
    status : Ended
        How it ended.
    bytes : int
        How many bytes moved; 0 unless it is complete.
    error : ApiError or None
        Why it failed.
    """

    request: Request
    status: Ended
    bytes: int
    error: ApiError | None


class Batch:
    """Room for transfers that are submitted together; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver, which destroys it at the latest.
    capacity : int
        How many transfers it may hold that nobody has asked for yet.

    Raises
    ------
    ApiError
        CU_FILE_INVALID_VALUE: more than :attr:`Properties.max_batch_io`.
    """

    def __init__(self, driver: Driver, capacity: int) -> None:
        driver.check_open()
        if capacity <= 0:
            message = f"no batch has room for {capacity}"
            raise UsageError(message)
        self.capacity = capacity
        self._number = int(_cufile.call("cuFileBatchIOSetUp", "batch_io_set_up", nr=capacity))
        self._handle = Handle("cufile.batch")
        self._leave = driver.adopt(self.close)
        self._cookies = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._kept: list[object] = []
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Of how many transfers nobody knows yet how they ended."""
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin these transfers; all of them or none.

        Raises
        ------
        ApiError
            CU_FILE_BATCH_FULL: there is no room; ask :meth:`status` first.
        UsageError
            Something about a request cannot be right.
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
        # The library may look at what it was given until the last of it has ended.
        self._kept.append(made)

    def status(self, *, count_min: int = 0, timeout_s: float | None = None) -> list[Event]:
        """How transfers ended, each once.

        Parameters
        ----------
        count_min : int
            For how many to wait.
        timeout_s : float or None
            How long; None: until there are as many.
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
        """Take back what has not begun; :meth:`status` says which."""
        self._check_open()
        _cufile.call("cuFileBatchIOCancel", "batch_io_cancel", batch_idp=self._number)

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and give the batch back; a second close does nothing."""
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
