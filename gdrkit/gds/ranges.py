"""Ranges of files and of memory, checked before anything moves.

Level 4.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.gds.target import Target

__all__ = ["Range", "check_range", "extents_of", "length_in", "let_go_unless_begun"]

# (file offset, length) or (file offset, length, buffer offset), in bytes.
Range = tuple[int, int] | tuple[int, int, int]

_LARGEST = (1 << 63) - 1


def check_range(what: str, offset: int, length: int) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless a file may have such a range."""
    if offset < 0 or length < 0 or offset + length > _LARGEST:
        message = f"no {what} of {length} bytes at {offset}"
        raise UsageError(message)


def length_in(target: Target, offset: int, length: int | None) -> int:
    """The length of a part of the memory that must be inside it; None: up to its end."""
    found = target.length_bytes - offset if length is None else length
    if offset < 0 or found < 0 or offset + found > target.length_bytes:
        message = f"{found} bytes at {offset} are not inside memory of {target.length_bytes} bytes"
        raise UsageError(message)
    return found


def extents_of(target: Target, ranges: Iterable[Range]) -> list[int]:
    """Four numbers for each range: 0, offset in the file, address, length."""
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


@contextlib.contextmanager
def let_go_unless_begun(target: Target) -> Iterator[None]:
    """Tell the owner of the memory when what would have used it is not begun."""
    try:
        yield
    except BaseException:
        target.release()
        raise
