"""Copies of files through device or host memory.

While one chunk is written, the next chunk is read. Holes of the source stay holes in the copy. The new file gets its
name when it is complete. Until then, other programs find the old file or no file, and a copy that fails leaves no
file.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, pattern
from gdrkit.errors import DataMismatch, UsageError
from gdrkit.gds.buffer import HOST
from gdrkit.gds.file import File
from gdrkit.gds.new_file import new_file, open_destination
from gdrkit.gds.opening import make_kernel_error
from gdrkit.gds.ranges import data_ranges
from gdrkit.gds.result import Route
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.gds.opening import Access, DirectPathMode
    from gdrkit.gds.ranges import Range
    from gdrkit.gds.result import TransferResult
    from gdrkit.gds.transfer import Transfer

__all__ = ["CHUNK_BYTES", "CopyResult", "CopyTotals", "chunk_buffers", "copy_file"]

# Default size of a chunk, in bytes.
CHUNK_BYTES = 256 * MIB
# Number of buffers of the size of a chunk. One is filled while the other one is written.
_BUFFERS_COUNT = 2
# Largest number of ranges of a sparse file that one transfer moves.
_BATCH_RANGES_MAX = 1024
# Bytes per read(2) of a file whose size is unknown.
_READ_CALL_BYTES = MIB
_UNKNOWN_SIZE_REASON = "the kernel does not report the size of the file, so it was read by read(2) to its end"
# Number of bytes of each file that are read and compared at a time.
_COMPARE_BYTES = 16 * MIB
# Number of bytes, from the first difference on, that the error of a failed comparison shows.
_EXCERPT_BYTES = 16


@dataclass(slots=True)
class CopyTotals:
    """Totals of all reads or of all writes of a copy.

    Attributes
    ----------
    routes : dict of str to int
        Bytes per route.
    direct_io_bytes : int
        Bytes that bypassed the page cache.
    why_not_direct : str
        The first reason why bytes did not take a direct path; empty if all did, or if the caller did not want one.
    """

    routes: dict[str, int] = field(default_factory=dict)
    direct_io_bytes: int = 0
    why_not_direct: str = ""

    def add(self, result: TransferResult) -> None:
        """Add the result of one transfer."""
        if result.bytes:
            self.routes[result.route.value] = self.routes.get(result.route.value, 0) + result.bytes
        self.direct_io_bytes += result.direct_io_bytes
        self.why_not_direct = self.why_not_direct or result.why_not_direct


@dataclass(slots=True)
class CopyResult:
    """The result of a copy.

    Attributes
    ----------
    source, destination : str
        Paths of the two files.
    bytes : int
        Size of the copy.
    hole_bytes : int
        Bytes in holes, which were neither read nor written.
    duration_s : float
        Time from the call until the new file has its name, without the comparison, in seconds.
    read, write : CopyTotals
        Totals of the reads and of the writes.
    is_checked : bool
        Whether both files were compared byte by byte.
    """

    source: str
    destination: str
    bytes: int = 0
    hole_bytes: int = 0
    duration_s: float = 0.0
    read: CopyTotals = field(default_factory=CopyTotals)
    write: CopyTotals = field(default_factory=CopyTotals)
    is_checked: bool = False


def copy_file(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    device_index: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    access: Access = "automatic",
    direct: DirectPathMode = "preferred",
    durable: bool = False,
    check: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> CopyResult:
    """Copy a file and return the result.

    Parameters
    ----------
    source : path
        A regular file. The new file gets the size that the source has when the call begins. A file whose size the
        kernel does not report (procfs, sysfs) is read to its end.
    destination : path
        The new file, or the folder for it. A regular file of that name is replaced; a symbolic link is followed. The
        permission bits equal the bits that cp would set: see :func:`~gdrkit.gds.new_file.new_file`.
    device_index : int
        Index of the CUDA device through whose memory the bytes pass; :data:`~gdrkit.gds.HOST` for host memory.
    chunk_bytes : int
        Size of a chunk, in bytes. Two chunks of memory are allocated.
    access, direct : str
        See :class:`~gdrkit.gds.File`.
    durable : bool
        Wait until the disk has the bytes and the name of the new file.
    check : bool
        Compare both files byte by byte before the new file gets its name.
    on_progress : callable or None
        Function that is called with the number of bytes read so far and the size of the file. If it raises an error,
        the copy ends.

    Raises
    ------
    TransferFailed
        A read or a write failed; see :class:`~gdrkit.gds.Transfer`.
    ApiError
        A file cannot be opened, created, synced or named, or memory cannot be allocated.
    UsageError
        Source and destination are the same file, the destination is a device, a FIFO or a socket, or a size is invalid.
    DataMismatch
        The check found a byte that differs. No new file is left.
    """
    if chunk_bytes < 1:
        message = f"chunk_bytes must be at least 1, not {chunk_bytes}"
        raise UsageError(message)
    destination_path = Path(destination)
    destination_path = destination_path / Path(source).name if destination_path.is_dir() else destination_path
    start_s = time.monotonic()
    result = CopyResult(os.fspath(source), str(destination_path))
    with contextlib.ExitStack() as stack:
        source_file = stack.enter_context(File(source, access=access, direct=direct))
        source_status = os.fstat(source_file.fileno())
        opened_destination = stack.enter_context(open_destination(destination_path))
        if opened_destination.is_same_file(source_status):
            message = f"{source} and {destination_path} are the same file"
            raise UsageError(message)
        with new_file(
            opened_destination, source_mode=source_status.st_mode, access=access, direct=direct, durable=durable
        ) as copy:
            compare_s = 0.0
            if _is_size_unknown(source_file, source_status):
                _copy_to_end(source_file, copy, result, on_progress, check=check)
            else:
                result.bytes = source_status.st_size
                buffer_bytes = min(chunk_bytes, max(result.bytes, 1))
                with chunk_buffers(device_index, buffer_bytes, _BUFFERS_COUNT) as buffers:
                    _copy_ranges(source_file, copy, buffers, result, on_progress)
                if check:
                    compare_start_s = time.monotonic()
                    _compare_files(source_file.fileno(), copy.fileno(), length_bytes=result.bytes)
                    compare_s = time.monotonic() - compare_start_s
            result.is_checked = check
    result.duration_s = time.monotonic() - start_s - compare_s
    return result


def _is_size_unknown(file: File, source_status: os.stat_result) -> bool:
    """Return whether st_size differs from the number of bytes that can be read, as in procfs (0) and sysfs (a page)."""
    if source_status.st_blocks:
        return False  # The file is on a disk, so the kernel knows its size.
    try:
        has_last_byte = bool(os.pread(file.fileno(), 1, max(source_status.st_size - 1, 0)))
    except OSError as error:
        if source_status.st_size:
            return False  # The copy will fail at this byte too, and its error reports how many bytes were read before.
        raise make_kernel_error("read", file.path, error) from error
    # The size is wrong if a file of size 0 has a byte, or if a file of another size does not have its last byte.
    return has_last_byte == (source_status.st_size == 0)


def _copy_to_end(
    source_file: File, copy: File, result: CopyResult, on_progress: Callable[[int, int], None] | None, *, check: bool
) -> None:
    """Copy a file whose size is unknown.

    With `check`, compare each chunk as soon as it is written: a second read of the source may return other bytes.
    """
    chunk = bytearray(_READ_CALL_BYTES)
    result.read.why_not_direct = _UNKNOWN_SIZE_REASON
    while True:
        try:
            read_bytes = os.readv(source_file.fileno(), [chunk])
        except OSError as error:
            raise make_kernel_error("read", source_file.path, error) from error
        if read_bytes == 0:
            break
        offset_bytes = result.bytes
        result.write.add(copy.write_from(chunk, file_offset_bytes=offset_bytes, length_bytes=read_bytes))
        if check:
            _check_same_bytes(chunk[:read_bytes], os.pread(copy.fileno(), read_bytes, offset_bytes), offset_bytes)
        result.bytes += read_bytes
        if on_progress is not None:
            on_progress(result.bytes, result.bytes)
    if result.bytes:
        result.read.routes[Route.POSIX.value] = result.bytes


def _copy_ranges(
    source_file: File,
    copy: File,
    buffers: list[Any],
    result: CopyResult,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Copy the data ranges of a file. While one buffer is written to the copy, the next one is filled."""
    pending_writes: list[Transfer | None] = [None] * len(buffers)
    chunk_bytes = len(buffers[0]) if isinstance(buffers[0], bytearray) else buffers[0].length_bytes

    def make_progress_callback(offset_bytes: int) -> Callable[[int, int], None] | None:
        if on_progress is None:
            return None
        return lambda done_bytes, _total: on_progress(offset_bytes + done_bytes, result.bytes)

    # The number of bytes that are not in holes, and the end of the last data range.
    data_bytes = data_end_offset = 0
    for batch_index, ranges in enumerate(
        _split_into_batches(data_ranges(source_file.fileno(), result.bytes), chunk_bytes)
    ):
        buffer_index = batch_index % len(buffers)
        if (previous_write := pending_writes[buffer_index]) is not None:
            result.write.add(previous_write.result())
        read_transfer = source_file.start_readv(buffers[buffer_index], ranges)
        batch_offset = ranges[0][0]
        result.read.add(read_transfer.result(on_progress=make_progress_callback(batch_offset)))
        pending_writes[buffer_index] = copy.start_writev(buffers[buffer_index], ranges)
        data_bytes += sum(file_range[1] for file_range in ranges)
        last_offset, last_length = ranges[-1][:2]
        data_end_offset = last_offset + last_length
    for pending_write in pending_writes:
        if pending_write is not None:
            # With a callback, the wait runs Python code many times per second, so that Ctrl-C takes effect.
            result.write.add(pending_write.result(on_progress=lambda _done, _total: None))
    result.hole_bytes = result.bytes - data_bytes
    if data_end_offset < result.bytes:
        # The file ends with a hole.
        try:
            os.ftruncate(copy.fileno(), result.bytes)
        except OSError as error:
            raise make_kernel_error("ftruncate", copy.path, error) from error
        if on_progress is not None:
            on_progress(result.bytes, result.bytes)


def _split_into_batches(ranges: Iterator[tuple[int, int]], batch_bytes: int) -> Iterator[list[Range]]:
    """Split ranges (begin, end) of a file into batches: lists of (offset, length), together at most `batch_bytes`."""
    batch: list[Range] = []
    free_bytes = batch_bytes
    for begin, end in ranges:
        offset = begin
        while offset < end:
            range_bytes = min(free_bytes, end - offset)
            batch.append((offset, range_bytes))
            offset, free_bytes = offset + range_bytes, free_bytes - range_bytes
            if free_bytes == 0 or len(batch) == _BATCH_RANGES_MAX:
                yield batch
                batch, free_bytes = [], batch_bytes
    if batch:
        yield batch


@contextlib.contextmanager
def chunk_buffers(device_index: int, length_bytes: int, count: int) -> Iterator[list[Any]]:
    """Allocate `count` buffers of `length_bytes` for a block, in memory of a device or of the host.

    :data:`~gdrkit.gds.HOST` is the index of the host.
    """
    if device_index == HOST:
        yield [bytearray(length_bytes) for _ in range(count)]
        return
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(cuda.Device(device_index))
        yield [stack.enter_context(device.allocate(length_bytes)) for _ in range(count)]


def _compare_files(source_fd: int, copy_fd: int, *, length_bytes: int) -> None:
    """Compare the first `length_bytes` of two files, and raise DataMismatch at the first difference."""
    for offset in range(0, length_bytes, _COMPARE_BYTES):
        compared_bytes = min(_COMPARE_BYTES, length_bytes - offset)
        _check_same_bytes(
            os.pread(source_fd, compared_bytes, offset), os.pread(copy_fd, compared_bytes, offset), offset
        )


def _check_same_bytes(expected: bytes | bytearray, actual: bytes, offset_bytes: int) -> None:
    """Raise DataMismatch unless the bytes are equal. `offset_bytes` is the offset of their first byte in the files."""
    mismatch_index = pattern.find_mismatch(expected, actual)
    if mismatch_index is not None:
        shown_slice = slice(mismatch_index, mismatch_index + _EXCERPT_BYTES)
        raise DataMismatch(
            first_offset_bytes=offset_bytes + mismatch_index,
            expected=bytes(expected[shown_slice]),
            actual=actual[shown_slice],
            length_bytes=len(expected),
        )
