"""Ranges of files and of memory: their checks, which are done before anything moves, and the extents of a transfer.

The extents of a transfer are one flat list with four numbers for each range: index of the file, offset in the file,
address, length in bytes. The copy engine takes this list as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.gds.buffer import TransferBuffer

__all__ = ["Range", "check_range", "data_ranges", "extents_of", "part_length", "released_on_error"]

# (file offset, length) or (file offset, length, buffer offset), in bytes.
Range = tuple[int, int] | tuple[int, int, int]

_OFFSET_MAX = (1 << 63) - 1


def check_range(what: str, offset_bytes: int, length_bytes: int) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless offset and length are valid for a file."""
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > _OFFSET_MAX:
        message = f"a {what} must be inside 0 to 2**63 - 1, not {length_bytes} bytes at offset {offset_bytes}"
        raise UsageError(message)


def part_length(buffer: TransferBuffer, offset_bytes: int, length_bytes: int | None) -> int:
    """Return the length of a part of the memory; None means up to its end.

    Raises
    ------
    UsageError
        The part is not inside the memory.
    """
    length = buffer.length_bytes - offset_bytes if length_bytes is None else length_bytes
    if offset_bytes < 0 or length < 0 or offset_bytes + length > buffer.length_bytes:
        message = f"{length} bytes at offset {offset_bytes} are not inside memory of {buffer.length_bytes} bytes"
        raise UsageError(message)
    return length


def extents_of(buffer: TransferBuffer, ranges: Iterable[Range]) -> list[int]:
    """Return the extents of ranges of one file, whose index is 0.

    Raises
    ------
    UsageError
        A range is not valid for a file, or not inside the memory.
    """
    extents: list[int] = []
    next_offset = 0
    for each in ranges:
        file_offset, length, buffer_offset = (*each, next_offset)[:3]
        check_range("file range", file_offset, length)
        # The comparison is inline, because a call may have many thousand ranges.
        if buffer_offset < 0 or buffer_offset + length > buffer.length_bytes:
            part_length(buffer, buffer_offset, length)
        extents += (0, file_offset, buffer.address + buffer_offset, length)
        next_offset = buffer_offset + length
    return extents


def data_ranges(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each data range of a file (not a hole); the whole file if SEEK_DATA is not supported."""
    at = 0
    while at < size_bytes:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno != errno.EINVAL:
                raise
            yield at, size_bytes
            return
        if begin >= size_bytes:
            return
        end = min(os.lseek(fd, begin, os.SEEK_HOLE), size_bytes)
        yield begin, end
        at = end


@contextlib.contextmanager
def released_on_error(buffer: TransferBuffer) -> Iterator[None]:
    """Release the memory if the block, which starts a transfer, fails."""
    try:
        yield
    except BaseException:
        buffer.release()
        raise
