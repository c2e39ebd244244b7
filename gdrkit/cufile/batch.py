"""Batches of transfers: one call submits many transfers, and the caller polls for their results.

A batch keeps the memory and the files of its transfers alive until the caller has fetched all of their results.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.cufile import _cufile, _results
from gdrkit.errors import ClosedResource, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.cufile.buffer import BufferRange
    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.handle import FileHandle
    from gdrkit.errors import ApiError

__all__ = ["BatchEvent", "BatchRequest", "BatchStatus", "IoBatch", "Opcode"]


class Opcode(enum.IntEnum):
    """Direction of a transfer (``CUfileOpcode_t``)."""

    READ = 0
    WRITE = 1


class BatchStatus(enum.IntEnum):
    """State of a transfer in a batch (``CUfileStatus_t``)."""

    WAITING = 0x01
    PENDING = 0x02
    INVALID = 0x04
    CANCELED = 0x08
    COMPLETE = 0x10
    TIMEOUT = 0x20
    FAILED = 0x40


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One transfer of a batch.

    Attributes
    ----------
    opcode : Opcode
        Direction of the transfer.
    handle : FileHandle
        The file.
    part : BufferRange
        The part of the memory that a read fills or a write reads.
    file_offset_bytes : int
        Offset in the file, in bytes.
    """

    opcode: Opcode
    handle: FileHandle
    part: BufferRange
    file_offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """The result of one transfer.

    Attributes
    ----------
    request : BatchRequest
        The request of this transfer.
    status : BatchStatus
        Final state of the transfer.
    bytes : int
        Number of bytes moved; 0 if the transfer failed.
    error : ApiError or None
        The error if the transfer failed, otherwise None.
    """

    request: BatchRequest
    status: BatchStatus
    bytes: int
    error: ApiError | None


class IoBatch:
    """A batch of transfers that are submitted together; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. If the batch is still open when the driver closes, the driver destroys the batch.
    capacity : int
        Largest number of outstanding transfers. A transfer is outstanding until :meth:`fetch_events` has returned its
        result.

    Raises
    ------
    ApiError
        CU_FILE_INVALID_VALUE: `capacity` is above :attr:`Properties.max_batch_io`.
    """

    def __init__(self, driver: Driver, capacity: int) -> None:
        driver.check_open()
        if capacity <= 0:
            message = f"capacity must be above 0, not {capacity}"
            raise UsageError(message)
        self.capacity = capacity
        self._batch_id = int(_cufile.call("cuFileBatchIOSetUp", "batch_io_set_up", nr=capacity))
        self._live_handle = Handle("cufile.batch")
        self._remove_close_callback = driver.on_close(self.close)
        self._cookies = itertools.count(1)
        self._requests: dict[int, BatchRequest] = {}
        # The parameter arrays of the submitted transfers. libcufile may read an array until all of its transfers have
        # ended.
        self._submitted_parameter_arrays: list[object] = []
        self._is_closed = False

    @property
    def outstanding(self) -> int:
        """Number of submitted transfers whose results :meth:`fetch_events` has not returned."""
        return len(self._requests)

    def submit(self, requests: Sequence[BatchRequest]) -> None:
        """Submit the transfers. If the method raises an exception, it has submitted none of them.

        Raises
        ------
        ApiError
            CU_FILE_BATCH_FULL: the batch is full; call :meth:`fetch_events` first.
        UsageError
            A request is invalid.
        """
        self._check_open()
        if not requests:
            message = "requests must have at least one request"
            raise UsageError(message)
        request_by_cookie = {next(self._cookies): request for request in requests}
        parameter_array = _cufile.make_io_parameters(
            [_make_io_request(cookie, request) for cookie, request in request_by_cookie.items()]
        )
        with requests[0].part.memory.current():
            _cufile.submit_batch(self._batch_id, parameter_array)
        self._requests |= request_by_cookie
        self._submitted_parameter_arrays.append(parameter_array)

    def fetch_events(self, *, count_min: int = 0, timeout_s: float | None = None) -> list[BatchEvent]:
        """Return the results of transfers that have ended, and forget them. Each result is returned once.

        Parameters
        ----------
        count_min : int
            Smallest number of results to wait for. All results that are ready are returned.
        timeout_s : float or None
            Longest time to wait, in seconds. None: wait without limit until there are `count_min` results.

        Raises
        ------
        UsageError
            `count_min` is larger than :attr:`outstanding`, or `timeout_s` is negative.
        """
        self._check_open()
        if count_min > self.outstanding:
            message = (
                f"count_min must be at most {self.outstanding}, the number of outstanding transfers, not {count_min}"
            )
            raise UsageError(message)
        if timeout_s is not None and timeout_s < 0:
            message = f"timeout_s must be at least 0, not {timeout_s}"
            raise UsageError(message)
        if not self._requests:
            return []
        raw_events = _cufile.fetch_batch_events(
            self._batch_id, count_min=count_min, count_max=max(self.capacity, 1), timeout_s=timeout_s
        )
        events = [_parse_event(self._requests.pop(cookie), status, result) for cookie, status, result in raw_events]
        if not self._requests:
            self._submitted_parameter_arrays.clear()
        return events

    def cancel(self) -> None:
        """Cancel the transfers that have not started. :meth:`fetch_events` returns their results with CANCELED."""
        self._check_open()
        _cufile.call("cuFileBatchIOCancel", "batch_io_cancel", batch_idp=self._batch_id)

    def close(self) -> None:
        """Cancel transfers that have not started, wait for the rest, and destroy the batch.

        A second close does nothing.
        """
        if self._is_closed:
            return
        _cufile.call("cuFileBatchIODestroy", "batch_io_destroy", batch_idp=self._batch_id)
        self._is_closed = True
        self._requests.clear()
        self._submitted_parameter_arrays.clear()
        self._remove_close_callback()
        self._live_handle.release()

    def _check_open(self) -> None:
        if self._is_closed:
            resource = "the batch"
            raise ClosedResource(resource)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _make_io_request(cookie: int, request: BatchRequest) -> tuple[int, int, int, int, int, int, int]:
    """Return the transfer as a request of :func:`gdrkit.cufile._cufile.make_io_parameters`."""
    transfer_range = request.part.at(request.file_offset_bytes)
    return (
        request.handle.native_handle,
        int(request.opcode),
        transfer_range.address,
        transfer_range.file_offset_bytes,
        transfer_range.offset_bytes,
        transfer_range.length_bytes,
        cookie,
    )


def _parse_event(request: BatchRequest, status: int, result: int) -> BatchEvent:
    """Return the event of a request. `result` is a number of bytes, a negative errno or a negative CUfileOpError."""
    final_status = BatchStatus(status)
    operation = f"batch {request.opcode.name.lower()}"
    arguments = {"file_offset": request.file_offset_bytes}
    error: ApiError | None = None
    if result < 0:
        error = _results.make_result_error(operation=operation, result=result, arguments=arguments)
    elif final_status not in {BatchStatus.COMPLETE, BatchStatus.CANCELED}:
        error = _results.make_batch_status_error(
            operation=operation, status_name=final_status.name, arguments=arguments
        )
    return BatchEvent(request, final_status, 0 if error is not None else result, error)
