"""Test payloads in which every byte depends on its position and on a seed.

A payload of one repeated byte cannot show a shifted, swapped or half-written transfer. Here the bytes at
``offset_bytes`` of the stream of a seed are always the same, so any part can be generated and checked without the rest.
The stream is SHAKE-128 of the seed and the block number. The standard library generates it at several hundred MB/s,
without numpy.
"""

from __future__ import annotations

import hashlib

from gdrkit.errors import DataMismatch, UsageError

__all__ = ["check", "find_mismatch", "payload"]

_BLOCK_BYTES = 1 << 20
# Bytes from the first wrong one on that an error contains.
_EXCERPT_BYTES = 16


def payload(length_bytes: int, *, seed: int, offset_bytes: int = 0) -> bytes:
    """Return the bytes ``[offset_bytes, offset_bytes + length_bytes)`` of the stream of `seed`.

    Parameters
    ----------
    length_bytes : int
        Number of bytes, 0 or more.
    seed : int
        Seed of the stream, 0 to 2**64 - 1.
    offset_bytes : int
        Offset in the stream.

    Raises
    ------
    UsageError
        The length or the offset is negative, or the seed is out of range.
    """
    if length_bytes < 0 or offset_bytes < 0 or not 0 <= seed < 1 << 64:
        message = (
            "length_bytes and offset_bytes must be at least 0, and seed must be in 0 to 2**64 - 1, "
            f"not {length_bytes}, {offset_bytes} and {seed}"
        )
        raise UsageError(message)
    block, skip = divmod(offset_bytes, _BLOCK_BYTES)
    parts = []
    needed = skip + length_bytes
    while needed > 0:
        # Only the needed part of a block is generated, so that small payloads are cheap.
        parts.append(_block(seed, block, min(needed, _BLOCK_BYTES)))
        needed -= _BLOCK_BYTES
        block += 1
    return b"".join(parts)[skip:]


def find_mismatch(expected: bytes | bytearray | memoryview, actual: bytes | bytearray | memoryview) -> int | None:
    """Return the offset of the first byte that differs, or None if all bytes are equal.

    If only the lengths differ, the offset is the end of the shorter one.
    """
    common = min(len(expected), len(actual))
    low, high = 0, common
    left, right = memoryview(expected), memoryview(actual)
    if left[:common] == right[:common]:
        return None if len(expected) == len(actual) else common
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def check(actual: bytes | bytearray | memoryview, *, seed: int, offset_bytes: int = 0) -> None:
    """Compare `actual`, byte by byte, with the stream of `seed` from `offset_bytes` on.

    Raises
    ------
    DataMismatch
        A byte differs. The error has the offset of the first wrong byte, and the bytes from there on.
    """
    expected = payload(len(actual), seed=seed, offset_bytes=offset_bytes)
    first = find_mismatch(expected, actual)
    if first is not None:
        raise DataMismatch(
            first_offset_bytes=first,
            expected=expected[first : first + _EXCERPT_BYTES],
            actual=bytes(actual[first : first + _EXCERPT_BYTES]),
            length_bytes=len(actual),
        )


def _block(seed: int, number: int, length_bytes: int) -> bytes:
    return hashlib.shake_128(seed.to_bytes(8, "little") + number.to_bytes(8, "little")).digest(length_bytes)
