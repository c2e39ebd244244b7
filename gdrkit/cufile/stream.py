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
    """Promises of the caller about the transfers on a stream (``CU_FILE_STREAM_*``), so that cuFile can prepare them.

    ``BUFFER_OFFSET``, ``FILE_OFFSET`` and ``LENGTH`` promise that this argument does not change after the transfer is
    queued. ``PAGE_ALIGNED`` promises that the length and both offsets are multiples of 4096.
    """

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
        transfer_range: TransferRange,
        *,
        on_result_read: Callable[[PendingTransfer], None],
    ) -> None:
        self._operation = operation
        self._stream: CudaStream | None = stream
        self._transfer_range = transfer_range
        self._on_result_read = on_result_read
        self._arguments = _cufile.AsyncArguments(
            length_bytes=transfer_range.length_bytes,
            file_offset=transfer_range.file_offset_bytes,
            buffer_offset=transfer_range.offset_bytes,
        )

    def call_arguments(self) -> dict[str, int]:
        """Return the arguments of cuFileReadAsync and cuFileWriteAsync, except the file handle and the stream."""
        length_address, file_offset_address, buffer_offset_address, result_address = self._arguments.addresses()
        return {
            "bufPtr_base": self._transfer_range.address,
            "size_p": length_address,
            "file_offset_p": file_offset_address,
            "bufPtr_offset_p": buffer_offset_address,
            "bytes_p": result_address,
        }

    @property
    def done(self) -> bool:
        """Whether the stream has completed the transfer and all of its other work, or was closed.

        A result of 0 does not show that the transfer is done, because libcufile sets the result to 0 when it queues the
        transfer. So this property queries the stream.
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
            The file system failed (``errno`` is set), or cuFile failed (``status`` is a CUfileOpError).
        """
        if not self.done:
            message = f"{self._operation} is not done"
            raise UsageError(message, reason=Reason.BUSY, what_to_do="synchronize the stream first")
        self._on_result_read(self)
        result = self._arguments.result
        if result < 0:
            arguments = {
                "size": self._transfer_range.length_bytes,
                "file_offset": self._transfer_range.file_offset_bytes,
            }
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
        Promises about the transfers on the stream.

    Raises
    ------
    ApiError
        CU_FILE_INVALID_VALUE: there is no such stream.
    """

    def __init__(self, driver: Driver, stream: int, *, flags: StreamFlags = StreamFlags.NOTHING) -> None:
        driver.check_open()
        self.stream = stream
        _cufile.call("cuFileStreamRegister", "stream_register", stream=stream, flags=int(flags))
        self._live_handle = Handle("cufile.stream")
        self._remove_close_callback = driver.on_close(self.close)
        self._is_closed = False

    def close(self) -> None:
        """Deregister the stream; a second close does nothing."""
        if self._is_closed:
            return
        _cufile.call("cuFileStreamDeregister", "stream_deregister", stream=self.stream)
        self._is_closed = True
        self._remove_close_callback()
        self._live_handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
