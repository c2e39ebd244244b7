"""Checks of ranges of files and of memory, done before anything moves."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.gds.target import Target

__all__ = ["Range", "check_range", "data_ranges", "extents_of", "length_in", "released_on_error"]

# (file offset, length) or (file offset, length, buffer offset), in bytes.
Range = tuple[int, int] | tuple[int, int, int]

_LARGEST = (1 << 63) - 1


def check_range(what: str, offset: int, length: int) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless offset and length are valid for a file."""
    if offset < 0 or length < 0 or offset + length > _LARGEST:
        message = f"no {what} of {length} bytes at {offset}"
        raise UsageError(message)


def length_in(target: Target, offset: int, length: int | None) -> int:
    """Return the length of a part of the memory; None means up to its end. Fail if the part is not inside it."""
    found = target.length_bytes - offset if length is None else length
    if offset < 0 or found < 0 or offset + found > target.length_bytes:
        message = f"{found} bytes at {offset} are not inside memory of {target.length_bytes} bytes"
        raise UsageError(message)
    return found


def extents_of(target: Target, ranges: Iterable[Range]) -> list[int]:
    """Return four numbers for each range: 0, offset in the file, address, length."""
    extents: list[int] = []
    following = 0
    for each in ranges:
        offset, length, at = (*each, following)[:3]
        check_range("file range", offset, length)
        if at < 0 or at + length > target.length_bytes:
            message = f"{length} bytes at {at} are not inside memory of {target.length_bytes} bytes"
            raise UsageError(message)
        extents += (0, offset, target.address + at, length)
        following = at + length
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
def released_on_error(target: Target) -> Iterator[None]:
    """Release the memory if the block, which starts a transfer, fails."""
    try:
        yield
    except BaseException:
        target.release()
        raise
