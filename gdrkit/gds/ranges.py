"""Checks of file ranges and memory ranges before a transfer, and their conversion to extents.

The extents of a transfer are one flat list with four numbers for each range: index of the file, offset in the file,
address, length in bytes. The native copy engine takes this list without further conversion.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.gds.buffer import TransferBuffer

__all__ = ["Range", "check_range", "data_ranges", "make_extents", "resolve_length_bytes"]

# (file offset, length) or (file offset, length, buffer offset), in bytes.
Range = tuple[int, int] | tuple[int, int, int]

# Largest offset in a file: the largest value of off_t (64 bits, signed).
_OFFSET_MAX = (1 << 63) - 1


def check_range(range_name: str, offset_bytes: int, length_bytes: int) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless the range is valid for a file.

    The error calls the range `range_name`.
    """
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > _OFFSET_MAX:
        message = f"a {range_name} must be inside 0 to 2**63 - 1, not {length_bytes} bytes at offset {offset_bytes}"
        raise UsageError(message)


def resolve_length_bytes(buffer: TransferBuffer, offset_bytes: int, length_bytes: int | None) -> int:
    """Return the length of a part of the memory. `length_bytes` None means up to the end of the memory.

    Raises
    ------
    UsageError
        The part is not inside the memory.
    """
    part_bytes = buffer.length_bytes - offset_bytes if length_bytes is None else length_bytes
    if offset_bytes < 0 or part_bytes < 0 or offset_bytes + part_bytes > buffer.length_bytes:
        message = f"{part_bytes} bytes at offset {offset_bytes} are not inside memory of {buffer.length_bytes} bytes"
        raise UsageError(message)
    return part_bytes


def make_extents(buffer: TransferBuffer, ranges: Iterable[Range]) -> list[int]:
    """Return the extents for ranges of a single file, whose index is 0, and of the memory of `buffer`.

    Raises
    ------
    UsageError
        A range is not valid for a file, or not inside the memory.
    """
    extents: list[int] = []
    address, memory_bytes = buffer.address, buffer.length_bytes
    next_buffer_offset = 0
    for file_range in ranges:
        file_offset, length = file_range[0], file_range[1]
        buffer_offset = file_range[2] if len(file_range) > 2 else next_buffer_offset  # noqa: PLR2004 - see Range.
        next_buffer_offset = buffer_offset + length
        # The two functions below raise the errors. They are called only for invalid ranges, because two calls for each
        # of thousands of ranges would take too long.
        if file_offset < 0 or length < 0 or file_offset + length > _OFFSET_MAX:
            check_range("file range", file_offset, length)
        if buffer_offset < 0 or next_buffer_offset > memory_bytes:
            resolve_length_bytes(buffer, buffer_offset, length)
        extents += (0, file_offset, address + buffer_offset, length)
    return extents


def data_ranges(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each range of a file that contains data, so the holes are left out.

    If the file system does not support SEEK_DATA, the complete file is one data range.
    """
    offset = 0
    while offset < size_bytes:
        try:
            begin = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # There is no data after the offset.
                return
            if error.errno != errno.EINVAL:
                raise
            yield offset, size_bytes
            return
        if begin >= size_bytes:
            return
        end = min(os.lseek(fd, begin, os.SEEK_HOLE), size_bytes)
        yield begin, end
        offset = end
