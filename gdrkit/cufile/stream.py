"""Reads and writes by cuFile that a CUDA stream executes in order."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Self

from gdrkit.cufile import _cufile, _results
from gdrkit.errors import Reason, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.cufile.buffer import TransferRange
    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.interfaces import CudaStream

__all__ = ["PendingTransfer", "RegisteredStream", "StreamFlags"]


class StreamFlags(enum.IntFlag):
    """The arguments that do not change after a transfer is queued (``CU_FILE_STREAM_*``)."""

    NOTHING = 0
    BUFFER_OFFSET = 1
    FILE_OFFSET = 2
    LENGTH = 4
    PAGE_ALIGNED = 8
    ALL = 15


class PendingTransfer:
    """A transfer that is queued on a stream. Synchronize the stream, then call :meth:`bytes`.

    :meth:`FileHandle.read_async` and :meth:`FileHandle.write_async` create it.
    """

    def __init__(
        self,
        operation: str,
        stream: CudaStream,
        transfer: TransferRange,
        *,
        on_end: Callable[[PendingTransfer], None],
    ) -> None:
        self._operation = operation
        self._stream: CudaStream | None = stream
        self._transfer = transfer
        self._end_callback = on_end
        self._arguments = _cufile.AsyncArguments(
            length_bytes=transfer.length_bytes,
            file_offset=transfer.file_offset_bytes,
            buffer_offset=transfer.offset_bytes,
        )

    def call_arguments(self) -> dict[str, int]:
        """Return the arguments of the call after the file and before the stream, in the order of ``cufile.h``."""
        length, file_offset, buffer_offset, result = self._arguments.addresses()
        return {
            "bufPtr_base": self._transfer.address,
            "size_p": length,
            "file_offset_p": file_offset,
            "bufPtr_offset_p": buffer_offset,
            "bytes_p": result,
        }

    @property
    def done(self) -> bool:
        """Whether the stream has completed the transfer and all of its other work.

        The result does not show whether the transfer is done, because libcufile sets it to 0 in the call. So the
        property queries the stream.
        """
        stream = self._stream  # Another thread may set the attribute to None.
        if stream is not None and (stream.closed or stream.query()):
            self._stream = stream = None
        return stream is None

    def bytes(self) -> int:
        """Return the number of bytes moved.

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
        self._end_callback(self)
        result = self._arguments.result
        if result < 0:
            arguments = {"size": self._transfer.length_bytes, "file_offset": self._transfer.file_offset_bytes}
            raise _results.make_result_error(operation=self._operation, result=result, arguments=arguments)
        return result


class RegisteredStream:
    """A CUDA stream that is registered with cuFile, so that cuFile prepares resources for it; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. If the stream is still registered when the driver closes, the driver deregisters it.
    stream : int
        The CUDA driver's handle of the stream. This object must be closed before the stream is destroyed.
    flags : StreamFlags
        Arguments that do not change after a transfer is queued.

    Raises
    ------
    ApiError
        CU_FILE_INVALID_VALUE: there is no such stream.
    """

    def __init__(self, driver: Driver, stream: int, *, flags: StreamFlags = StreamFlags.NOTHING) -> None:
        driver.check_open()
        self.stream = stream
        _cufile.call("cuFileStreamRegister", "stream_register", stream=stream, flags=int(flags))
        self._handle = Handle("cufile.stream")
        self._remove_close_callback = driver.on_close(self.close)
        self._is_closed = False

    def close(self) -> None:
        """Deregister the stream; a second close does nothing."""
        if self._is_closed:
            return
        _cufile.call("cuFileStreamDeregister", "stream_deregister", stream=self.stream)
        self._is_closed = True
        self._remove_close_callback()
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
