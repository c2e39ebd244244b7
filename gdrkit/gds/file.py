"""The class :class:`File`, which reads files into device or host memory and writes files from it.

If a direct path is proven for a file, its bytes take that path. Otherwise the copy engine moves the bytes, and one
warning names the cause. The result of each call reports the route that its bytes took.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Self

from gdrkit.errors import ClosedResource, UsageError
from gdrkit.gds._native import call_native, native
from gdrkit.gds.buffer import HOST, TransferBuffer, describe_buffer
from gdrkit.gds.direct import FileDirectPaths, report_fallback
from gdrkit.gds.engine import engine_for
from gdrkit.gds.opening import (
    OPEN_FLAGS,
    Access,
    DirectPathMode,
    OpenDescriptor,
    check_choices,
    make_kernel_error,
    open_regular,
)
from gdrkit.gds.ranges import check_range, make_extents, resolve_length_bytes
from gdrkit.gds.result import Route, TransferResult, short_transfer_error
from gdrkit.gds.transfer import Transfer, transfers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from gdrkit.gds.ranges import Range

__all__ = ["File"]


class File:
    """An open file, for transfers to and from device or host memory.

    Parameters
    ----------
    path : str or path-like
        Path of a regular file.
    mode : str
        ``r`` to read, ``r+`` to read and write, ``w`` to write and truncate or create, ``x`` to create a new file only.
    access : str
        I/O path of the copy engine. ``automatic`` reads cached ranges and ranges below 256 KiB through the page cache,
        and other ranges with O_DIRECT. It writes through the page cache. ``buffered`` always uses the page cache.
        ``direct`` reads with O_DIRECT. It also writes with O_DIRECT, except ranges below 256 KiB and partial blocks.
    direct : str
        Use of a direct path, which moves bytes between disk and device without host memory. ``preferred`` uses a direct
        path if one is proven for the file. ``required`` makes calls fail if no path is proven. ``never`` uses the copy
        engine.

    Raises
    ------
    ApiError
        The kernel does not open the file: ENOENT, EACCES, EISDIR ...
    UsageError
        The path is not a regular file, or an argument is not one of the allowed values.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        access: Access = "automatic",
        direct: DirectPathMode = "preferred",
    ) -> None:
        if mode not in OPEN_FLAGS:
            message = f"mode must be one of {', '.join(map(repr, OPEN_FLAGS))}, not {mode!r}"
            raise UsageError(message)
        check_choices(access, direct)
        self._set_up(open_regular(os.fspath(path), OPEN_FLAGS[mode]), os.fspath(path), mode != "r", access, direct)

    @classmethod
    def from_descriptor(
        cls, fd: int, *, path: str, writable: bool, access: Access = "automatic", direct: DirectPathMode = "preferred"
    ) -> Self:
        """Return a File for the descriptor of an open regular file.

        The File owns the descriptor. If this method raises an error, the descriptor is closed.

        Parameters
        ----------
        fd : int
            The descriptor, which the File owns.
        path : str
            Path of the file, for errors.
        writable : bool
            Whether the descriptor is open for writing.
        access, direct : str
            See the class.
        """
        return cls.from_native(native.OpenFile(fd), path=path, writable=writable, access=access, direct=direct)

    @classmethod
    def from_native(
        cls,
        native_file: Any,  # noqa: ANN401 - native object.
        *,
        path: str,
        writable: bool,
        access: Access = "automatic",
        direct: DirectPathMode = "preferred",
    ) -> Self:
        """Return a File for an open file of the native engine; see :meth:`from_descriptor` for the parameters."""
        check_choices(access, direct)
        file = cls.__new__(cls)
        file._set_up(native_file, path, writable, access, direct)  # noqa: SLF001 - same class.
        return file

    def _set_up(self, native_file: Any, path: str, writable: bool, access: Access, direct: DirectPathMode) -> None:  # noqa: FBT001, ANN401
        self.path = path
        self.access: Access = access
        self.direct: DirectPathMode = direct
        self.writable = writable
        self._descriptor = OpenDescriptor(native_file, path)
        self._direct_paths = FileDirectPaths(direct)

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._descriptor.closed

    @property
    def native_file(self) -> Any:  # noqa: ANN401 - native object.
        """The file of the native engine. It counts the calls and the jobs that use the file."""
        return self._descriptor.native_file

    @property
    def size_bytes(self) -> int:
        """Current size of the file, in bytes."""
        try:
            return int(call_native(self.native_file.size_bytes))
        except native.FileClosed:
            raise ClosedResource(self.path) from None

    def fileno(self) -> int:
        """Return the file descriptor. This object still owns it."""
        return self._descriptor.fileno()

    def cached_share(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> float:
        """Return the share of a range that is in the page cache, from 0 to 1."""
        self.fileno()  # This raises ClosedResource if the file is closed.
        length_bytes = max(self.size_bytes - offset_bytes, 0) if length_bytes is None else length_bytes
        check_range("range", offset_bytes, length_bytes)
        if length_bytes == 0:
            return 0.0
        with self.hold_open() as native_file:
            cached_pages_count, pages_count = call_native(native_file.residency, offset_bytes, length_bytes)
        return cached_pages_count / pages_count if pages_count else 0.0

    def read_into(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferResult:
        """Read a range of the file into memory, and wait until all bytes are there.

        Parameters
        ----------
        buffer : object
            See :func:`gdrkit.gds.describe_buffer`.
        file_offset_bytes : int
            Offset of the range in the file, in bytes.
        length_bytes : int or None
            Size of the range in bytes. None: up to the end of the memory or of the file, whichever comes first.
        buffer_offset_bytes : int
            Offset in the memory at which the bytes of the range begin, in bytes.
        on_progress : callable or None
            See :meth:`Transfer.result`.

        Raises
        ------
        TransferFailed
            See :meth:`Transfer.result`. With the reason END_OF_FILE: the file has fewer bytes than requested.
        UsageError
            A size or an offset is invalid, or the memory cannot be used.
        ClosedResource
            The file or the memory was closed.
        """
        memory = describe_buffer(buffer, writable=True)
        result = None
        if on_progress is None:
            result = self._move_short(memory, file_offset_bytes, length_bytes, buffer_offset_bytes)
        return result or self._start_range(memory, file_offset_bytes, length_bytes, buffer_offset_bytes).result(
            on_progress=on_progress
        )

    def write_from(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        durable: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferResult:
        """Write memory into a range of the file, and wait until the kernel has the data.

        The other parameters and the errors are the same as in :meth:`read_into`. If `length_bytes` is None, the memory
        is written up to its end.

        Parameters
        ----------
        durable : bool
            Wait until the disk has the data. If the file's `access` is ``automatic``, the bytes then bypass the page
            cache, because the kernel would have to write them from the page cache to the disk anyway.
        """
        memory = describe_buffer(buffer, writable=False)
        result = None
        if on_progress is None and not durable:
            result = self._move_short(memory, file_offset_bytes, length_bytes, buffer_offset_bytes, write=True)
        return result or self._start_range(
            memory, file_offset_bytes, length_bytes, buffer_offset_bytes, write=True, durable=durable
        ).result(on_progress=on_progress)

    def readv(self, buffer: object, ranges: Iterable[Range]) -> TransferResult:
        """Read many ranges into one buffer as one transfer. Many small ranges share one copy to the device.

        Parameters
        ----------
        buffer : object
            See :func:`gdrkit.gds.describe_buffer`.
        ranges : iterable
            For each range (file offset, length, buffer offset), in bytes. A range without a buffer offset follows the
            previous range in the buffer.
        """
        return self.start_readv(buffer, ranges).result()

    def writev(self, buffer: object, ranges: Iterable[Range]) -> TransferResult:
        """Write parts of one buffer into many ranges as one transfer; see :meth:`readv`."""
        return self.start_writev(buffer, ranges).result()

    def start_read_into(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
    ) -> Transfer:
        """Start :meth:`read_into` and return its future."""
        memory = describe_buffer(buffer, writable=True)
        return self._start_range(memory, file_offset_bytes, length_bytes, buffer_offset_bytes)

    def start_write_from(
        self,
        buffer: object,
        *,
        file_offset_bytes: int = 0,
        length_bytes: int | None = None,
        buffer_offset_bytes: int = 0,
        durable: bool = False,
    ) -> Transfer:
        """Start :meth:`write_from` and return its future."""
        memory = describe_buffer(buffer, writable=False)
        return self._start_range(
            memory, file_offset_bytes, length_bytes, buffer_offset_bytes, write=True, durable=durable
        )

    def start_readv(self, buffer: object, ranges: Iterable[Range]) -> Transfer:
        """Start :meth:`readv` and return its future."""
        return self._start_ranges(buffer, ranges, write=False)

    def start_writev(self, buffer: object, ranges: Iterable[Range]) -> Transfer:
        """Start :meth:`writev` and return its future."""
        return self._start_ranges(buffer, ranges, write=True)

    def sync(self) -> None:
        """Wait until the written data is on the disk (fdatasync)."""
        with self._descriptor.hold_open():
            try:
                os.fdatasync(self.fileno())
            except OSError as error:
                raise make_kernel_error("fdatasync", self.path, error) from error

    def close(self) -> None:
        """Wait for the transfers of the file, including transfers that other threads are starting, and close it.

        A second close does nothing. A close during another close waits for the first.

        Raises
        ------
        ApiError
            EDEADLK: a signal handler or a finalizer calls this method, and the code that it interrupted uses the file.
            Any other error is an error of close(2); the file is closed nevertheless.
        """
        self._descriptor.close(self._finish_transfers)

    def hold_open(self) -> AbstractContextManager[Any]:
        """Return a context manager with the native file. :meth:`close` waits for the end of its block."""
        return self._descriptor.hold_open()

    def _finish_transfers(self) -> None:
        """Wait until the transfers of the file are over, and close its direct paths."""
        for transfer in transfers_of(self):
            transfer.exception()  # This waits until the transfer is over.
        self._direct_paths.close()

    def _start_ranges(self, buffer: object, ranges: Iterable[Range], *, write: bool) -> Transfer:
        memory = describe_buffer(buffer, writable=not write)
        transfer = Transfer(memory, (self,), direct_required=self.direct == "required")
        try:
            self._start_transfer(transfer, memory, make_extents(memory, ranges), write=write)
        except BaseException:
            transfer.discard()
            raise
        return transfer

    def _start_range(
        self,
        memory: TransferBuffer,
        file_offset_bytes: int,
        length_bytes: int | None,
        buffer_offset_bytes: int,
        *,
        write: bool = False,
        durable: bool = False,
    ) -> Transfer:
        """Start a transfer of one range. A read of unknown length ends at the end of the file."""
        transfer = Transfer(memory, (self,), direct_required=self.direct == "required")
        try:
            range_bytes = resolve_length_bytes(memory, buffer_offset_bytes, length_bytes)
            check_range("file range", file_offset_bytes, range_bytes)
            if length_bytes is None and not write:
                range_bytes = min(range_bytes, max(self.size_bytes - file_offset_bytes, 0))
            extents = [0, file_offset_bytes, memory.address + buffer_offset_bytes, range_bytes]
            self._start_transfer(transfer, memory, extents, write=write, durable=durable)
        except BaseException:
            transfer.discard()
            raise
        return transfer

    def _start_transfer(
        self, transfer: Transfer, memory: TransferBuffer, extents: list[int], *, write: bool, durable: bool = False
    ) -> None:
        """Start a transfer on a direct path or by the engine. :meth:`_move_short` makes short transfers without it."""
        if write and not self.writable:
            raise self._make_read_only_error()
        transfer.extents = extents
        why_not_direct = self._direct_paths.reason_for_engine(memory)
        if why_not_direct is None:
            with self.hold_open():
                direct_path, why_not_direct = self._direct_paths.find(self.fileno(), memory, extents)
                if direct_path is not None:
                    direct_path.submit(write=write, extents=extents, durable=durable, memory=memory, transfer=transfer)
                    return
            report_fallback(why_not_direct, self.path, required=self.direct == "required")
        transfer.why_not_direct = why_not_direct
        try:
            engine_for(memory.device_index).submit(
                write=write,
                device_index=memory.device_index,
                files=[self._descriptor.native_file],
                extents=extents,
                access="direct" if durable and self.access == "automatic" else self.access,
                durable=durable,
                transfer=transfer,
            )
        except native.FileClosed:
            raise ClosedResource(self.path) from None

    def _move_short(
        self,
        memory: TransferBuffer,
        file_offset_bytes: int,
        length_bytes: int | None,
        buffer_offset_bytes: int,
        *,
        write: bool = False,
    ) -> TransferResult | None:
        """Move a short range through the page cache on the calling thread, which has a lower latency than a worker.

        Return None if the range is not short, or may take a direct path; the caller then starts a transfer. Otherwise
        release the memory, and return the result or raise an error.
        """
        start_s = time.monotonic()
        try:
            range_bytes = resolve_length_bytes(memory, buffer_offset_bytes, length_bytes)
            is_host_write = write and memory.device_index == HOST
            if range_bytes > (native.SMALL_HOST_WRITE_BYTES_MAX if is_host_write else native.SMALL_BYTES_MAX):
                return None
            if self.access == "direct" or (why_not_direct := self._direct_paths.reason_for_engine(memory)) is None:
                return None
            check_range("file range", file_offset_bytes, range_bytes)
            if write and not self.writable:
                raise self._make_read_only_error()  # noqa: TRY301 - the memory is released below.
            moved_bytes, failure = engine_for(memory.device_index).transfer_small(
                write,
                self._descriptor.native_file,
                file_offset_bytes,
                memory.address + buffer_offset_bytes,
                range_bytes,
                memory.device_index,
            )
        except native.FileClosed:
            memory.release()
            raise ClosedResource(self.path) from None
        except BaseException:
            memory.release()
            raise
        memory.release()
        duration_s = time.monotonic() - start_s
        result = TransferResult(moved_bytes, Route.ENGINE, 0, (moved_bytes,), duration_s, why_not_direct)
        # A read without a length may end at the end of the file.
        if failure is None and (moved_bytes == range_bytes or (length_bytes is None and not write)):
            return result
        arguments = {"path": self.path, "file_offset_bytes": file_offset_bytes, "length_bytes": range_bytes}
        raise short_transfer_error(failure, arguments, result)

    def _make_read_only_error(self) -> UsageError:
        message = f"{self.path} was opened for reading only"
        return UsageError(message, what_to_do="open it with mode 'r+' or 'w'")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"File({self.path!r}{', closed' if self.closed else ''})"
