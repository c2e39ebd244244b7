"""Reads and writes that a CUDA stream executes in order.

This package does not import CUDA, so the stream object itself reports when it is done. The memory that an asynchronous
call reads and writes later is kept here until the call is over.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, Self

from gdrkit.cufile import _cufile, _results
from gdrkit.cufile.handle import check_piece
from gdrkit.errors import Reason, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.handle import FileHandle, Piece

__all__ = ["Fixed", "Pending", "RegisteredStream", "Stream"]

_CUFILE_BASE = 5000


class Stream(Protocol):
    """The interface of a CUDA stream."""

    @property
    def handle(self) -> int:
        """The driver's handle of the stream."""

    @property
    def closed(self) -> bool:
        """Whether the stream was destroyed, after all of its work was done."""

    def query(self) -> bool:
        """Return whether all work of the stream is done."""

    def current(self) -> AbstractContextManager[object]:
        """Make the context of the stream current in this thread during a block."""


class Fixed(enum.IntFlag):
    """The properties of a transfer that are known when it is queued (``CU_FILE_STREAM_*``)."""

    NOTHING = 0
    BUFFER_OFFSET = 1
    FILE_OFFSET = 2
    LENGTH = 4
    PAGE_ALIGNED = 8
    ALL = 15


class Pending:
    """A transfer that is queued on a stream. Synchronize the stream, then call :meth:`bytes`."""

    def __init__(
        self, handle: FileHandle, stream: Stream, cells: _cufile.Cells, operation: str, arguments: dict[str, object]
    ) -> None:
        self._handle = handle
        self._stream: Stream | None = stream
        self._cells = cells
        self._operation = operation
        self._arguments = arguments

    @classmethod
    def begin(
        cls, names: tuple[str, str], handle: FileHandle, stream: Stream, piece: Piece, file_offset_bytes: int
    ) -> Self:
        """Queue a transfer; see :meth:`FileHandle.read_async`."""
        length_bytes = check_piece(piece, file_offset_bytes=file_offset_bytes)
        cells = _cufile.Cells(
            length_bytes=length_bytes, file_offset=file_offset_bytes, buffer_offset=piece.offset_bytes
        )
        operation, function = names
        length, file_offset, buffer_offset, result = cells.addresses()
        shown: dict[str, object] = {"size": length_bytes, "file_offset": file_offset_bytes}
        pending = cls(handle, stream, cells, operation, shown)
        # The handle keeps it before the call, because the stream may execute the transfer at once.
        handle.hold(pending)
        try:
            with stream.current():
                _cufile.call(
                    operation,
                    function,
                    fh=handle.number,
                    bufPtr_base=piece.memory.address,
                    size_p=length,
                    file_offset_p=file_offset,
                    bufPtr_offset_p=buffer_offset,
                    bytes_p=result,
                    stream=stream.handle,
                )
        except BaseException:
            handle.let_go(pending)
            raise
        return pending

    @property
    def done(self) -> bool:
        """Whether the stream has done the transfer and all of its other work.

        The stream is queried, because libcufile sets the result to 0 at the call already.
        """
        stream = self._stream  # Another thread may also read it.
        if stream is not None and (stream.closed or stream.query()):
            self._stream = stream = None
        return stream is None

    def bytes(self) -> int:
        """Return the bytes moved.

        Raises
        ------
        UsageError
            ``BUSY``: the transfer is not done; synchronize the stream first.
        ApiError
            The transfer failed: in the file system (``errno``), or in cuFile (a CUfileOpError as status).
        """
        if not self.done:
            message = f"{self._operation} is not done"
            raise UsageError(message, reason=Reason.BUSY, what_to_do="synchronize the stream first")
        self._handle.let_go(self)
        result = self._cells.result
        if result < -_CUFILE_BASE:
            raise _results.error_of(operation=self._operation, status=-result, arguments=self._arguments)
        if result < 0:
            raise _results.errno_error(operation=self._operation, number=-result, arguments=self._arguments)
        return result


class RegisteredStream:
    """A CUDA stream that is registered with cuFile, which keeps resources for its transfers; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. It deregisters the stream when it closes, at the latest.
    stream : int
        The CUDA driver's handle of the stream. The stream must be destroyed after this object.
    fixed : Fixed
        Properties that will be known when a transfer is queued.

    Raises
    ------
    ApiError
        CU_FILE_INVALID_VALUE: there is no such stream.
    """

    def __init__(self, driver: Driver, stream: int, *, fixed: Fixed = Fixed.NOTHING) -> None:
        driver.check_open()
        self.stream = stream
        _cufile.call("cuFileStreamRegister", "stream_register", stream=stream, flags=int(fixed))
        self._handle = Handle("cufile.stream")
        self._leave = driver.on_close(self.close)
        self._closed = False

    def close(self) -> None:
        """Deregister the stream; a second close does nothing."""
        if self._closed:
            return
        _cufile.call("cuFileStreamDeregister", "stream_deregister", stream=self.stream)
        self._closed = True
        self._leave()
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
