"""Files that are registered with cuFile, and transfers between them and memory.

Each method for transfers makes one call of cuFile. As with pread and pwrite, fewer bytes than requested mean the end of
the file or a full disk.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from gdrkit.cufile import _cufile, _layout, _results
from gdrkit.cufile.buffer import BufferRange, find_registration
from gdrkit.cufile.stream import PendingTransfer
from gdrkit.errors import ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.interfaces import CudaStream, Memory

__all__ = ["FileHandle"]


class FileHandle:
    """A file that is registered with cuFile; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. If the file is still registered when the driver closes, the driver deregisters it.
    fd : int
        Descriptor of an open regular file. The caller owns the descriptor, and must close it after this object. Direct
        transfers require a descriptor with O_DIRECT.
    keep : object
        An object that owns the descriptor. The handle keeps it alive as long as the file is registered.

    Raises
    ------
    ApiError
        The library failed. CU_FILE_HANDLE_NOT_REGISTERED (5027) means that the file is on tmpfs, or that the machine
        has no udev database. :func:`gdrkit.cufile.obstacles` reports the cause.
    """

    def __init__(self, driver: Driver, fd: int, *, keep: object = None) -> None:
        driver.check_open()
        if fd < 0:
            message = f"fd must be an open descriptor, not {fd}"
            raise UsageError(message, reason=Reason.BAD_DESCRIPTOR)
        self.driver = driver
        self.fd = fd
        self._descriptor_owner = keep
        self._native_handles: list[int] = []  # The CUfileHandle_t of the file, or empty before the registration.
        # These objects contain the arguments of transfers on streams. This set keeps them alive, because a stream reads
        # and writes the arguments after the call has returned.
        self._pending_transfers: set[PendingTransfer] = set()
        self._is_closed = False
        self._live_handle = Handle("cufile.file")
        self._remove_close_callback = driver.on_close(self.close)
        try:
            _cufile.register_file(fd, self._native_handles)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the file was deregistered."""
        return self._is_closed

    @property
    def native_handle(self) -> int:
        """The CUfileHandle_t of the file."""
        if self._is_closed:
            resource = "the cuFile handle"
            raise ClosedResource(resource)
        return self._native_handles[0]

    def read(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> int:
        """Read into memory and return the number of bytes that arrived.

        Parameters
        ----------
        memory : Memory
            Memory to read into.
        file_offset_bytes : int
            Offset in the file, in bytes.
        offset_bytes, length_bytes : int
            Part of the memory, in bytes. If `length_bytes` is None, the part ends at the end of the memory.

        Raises
        ------
        ApiError
            The file system failed (``errno`` is set), or cuFile failed (``status`` is a CUfileOpError).
        UsageError
            An offset or a length is negative or too large, or the part is not inside the memory.
        """
        return self._transfer("cuFileRead", "read", BufferRange(memory, offset_bytes, length_bytes), file_offset_bytes)

    def write(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> int:
        """Write from memory and return the number of bytes written; see :meth:`read`."""
        part = BufferRange(memory, offset_bytes, length_bytes)
        return self._transfer("cuFileWrite", "write", part, file_offset_bytes)

    def readv(self, parts: Sequence[BufferRange], *, file_offset_bytes: int = 0) -> int:
        """Read a contiguous range of the file into several parts of memory (cuFile 1.19 or newer); see :meth:`read`."""
        return self._transfer_vectors("cuFileReadv", "readv", parts, file_offset_bytes)

    def writev(self, parts: Sequence[BufferRange], *, file_offset_bytes: int = 0) -> int:
        """Write several parts of memory to a contiguous range of the file (cuFile 1.19 or newer); see :meth:`readv`."""
        return self._transfer_vectors("cuFileWritev", "writev", parts, file_offset_bytes)

    def read_async(
        self,
        stream: CudaStream,
        memory: Memory,
        *,
        file_offset_bytes: int = 0,
        offset_bytes: int = 0,
        length_bytes: int | None = None,
    ) -> PendingTransfer:
        """Queue a read on a CUDA stream; see :meth:`read`.

        All unfinished transfers of one registered buffer must be on the same stream, because libcufile 1.15 in compat
        mode mixes up the bytes of different streams.

        Raises
        ------
        UsageError
            ``BUSY``: the memory is registered, and another stream has not finished its work with it. This error is
            raised only if the driver allows compat mode.
        """
        part = BufferRange(memory, offset_bytes, length_bytes)
        return self._queue_transfer("cuFileReadAsync", "read_async", stream, part, file_offset_bytes)

    def write_async(
        self,
        stream: CudaStream,
        memory: Memory,
        *,
        file_offset_bytes: int = 0,
        offset_bytes: int = 0,
        length_bytes: int | None = None,
    ) -> PendingTransfer:
        """Queue a write on a CUDA stream; see :meth:`read_async`."""
        part = BufferRange(memory, offset_bytes, length_bytes)
        return self._queue_transfer("cuFileWriteAsync", "write_async", stream, part, file_offset_bytes)

    def close(self) -> None:
        """Deregister the file; a second close does nothing.

        Raises
        ------
        UsageError
            ``BUSY``: a transfer that was queued on a stream is not complete.
        """
        if self._is_closed:
            return
        unfinished_count = sum(not transfer.done for transfer in self._pending_transfers)
        if unfinished_count:
            message = f"the file has {format_count(unfinished_count, 'pending transfer')} in streams"
            raise UsageError(message, reason=Reason.BUSY, what_to_do="synchronize the streams first")
        self._pending_transfers.clear()
        deregister = _cufile.load().handle_deregister
        # cuFileHandleDeregister reports no error. No signal handler runs between the next two statements, so that an
        # interrupt neither leaves the file registered nor deregisters it twice.
        self._is_closed = True
        for native_handle in self._native_handles:
            deregister(native_handle)
        self._descriptor_owner = None
        self._remove_close_callback()
        self._live_handle.release()

    def _transfer(self, operation: str, function_name: str, part: BufferRange, file_offset_bytes: int) -> int:
        transfer_range = part.at(file_offset_bytes)
        with transfer_range.memory.current():
            return _cufile.call_transfer(
                operation,
                function_name,
                fh=self.native_handle,
                bufPtr_base=transfer_range.address,
                size=transfer_range.length_bytes,
                file_offset=transfer_range.file_offset_bytes,
                bufPtr_offset=transfer_range.offset_bytes,
            )

    def _transfer_vectors(
        self, operation: str, function_name: str, parts: Sequence[BufferRange], file_offset_bytes: int
    ) -> int:
        if _cufile.library_version() < _layout.VECTORS_VERSION_MIN:
            raise _results.make_missing_function_error(operation, version=_cufile.format_version(), since="1.19")
        if not parts:
            message = "parts must have at least one part of memory"
            raise UsageError(message)
        # Only the memory ranges of these objects are used. Their file offsets are wrong, except for the first one.
        transfer_ranges = [part.at(file_offset_bytes) for part in parts]
        io_vectors = _cufile.make_io_vectors(
            [(part_range.address + part_range.offset_bytes, part_range.length_bytes) for part_range in transfer_ranges]
        )
        with transfer_ranges[0].memory.current():
            return _cufile.call_transfer(
                operation, function_name, fh=self.native_handle, iov=io_vectors, file_offset=file_offset_bytes, flags=0
            )

    def _queue_transfer(
        self, operation: str, function_name: str, stream: CudaStream, part: BufferRange, file_offset_bytes: int
    ) -> PendingTransfer:
        transfer_range = part.at(file_offset_bytes)
        if find_registration(transfer_range.address) is None:
            # cuFile documents an offset in the buffer for registered memory only. With other memory and such an offset,
            # libcufile 1.15 fails with EIO in compat mode.
            transfer_range = transfer_range._replace(
                address=transfer_range.address + transfer_range.offset_bytes, offset_bytes=0
            )
        registration = find_registration(transfer_range.address)
        pending_transfer = PendingTransfer(
            operation, stream, transfer_range, on_result_read=self._pending_transfers.discard
        )
        with contextlib.nullcontext() if registration is None else registration.use_stream(stream, operation):
            # The transfer is added before the call, because the stream may use its arguments at once.
            self._pending_transfers.add(pending_transfer)
            try:
                with stream.current():
                    _cufile.call(
                        operation,
                        function_name,
                        fh=self.native_handle,
                        **pending_transfer.call_arguments(),
                        stream=stream.handle,
                    )
            except GdrkitError:
                self._pending_transfers.discard(pending_transfer)
                raise
            # After another exception, such as an interrupt, the stream may use the arguments, so the transfer stays in
            # the set.
        return pending_transfer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
