"""Test payloads in which every byte depends on its position and on a seed.

A payload of one repeated byte cannot show a shifted, swapped or half-written transfer. Here each seed defines an
endless stream of bytes. Any range of the stream can be generated and checked without the bytes before it, because each
block of the stream is the SHAKE-128 hash of the seed and the block number. The standard library computes the hash at
several hundred MB/s, without numpy.
"""

from __future__ import annotations

import hashlib

from gdrkit.errors import DataMismatch, UsageError

__all__ = ["check", "find_mismatch", "payload"]

_BLOCK_BYTES = 1 << 20
# Number of expected and of actual bytes that an error shows, from the first wrong byte on.
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
    block_number, skipped_bytes = divmod(offset_bytes, _BLOCK_BYTES)
    blocks = []
    remaining_bytes = skipped_bytes + length_bytes
    while remaining_bytes > 0:
        # The last block is generated only up to the needed length, so that small payloads are cheap.
        blocks.append(_make_block(seed, block_number, min(remaining_bytes, _BLOCK_BYTES)))
        remaining_bytes -= _BLOCK_BYTES
        block_number += 1
    return b"".join(blocks)[skipped_bytes:]


def find_mismatch(expected: bytes | bytearray | memoryview, actual: bytes | bytearray | memoryview) -> int | None:
    """Return the offset of the first byte that differs, or None if all bytes are equal.

    If one argument is a prefix of the other, the offset is the length of the shorter argument.
    """
    common_bytes = min(len(expected), len(actual))
    expected_view, actual_view = memoryview(expected), memoryview(actual)
    if expected_view[:common_bytes] == actual_view[:common_bytes]:
        return None if len(expected) == len(actual) else common_bytes
    # Binary search. All bytes before equal_end are equal, and at least one byte in [equal_end, mismatch_end) differs.
    equal_end, mismatch_end = 0, common_bytes
    while mismatch_end - equal_end > 1:
        middle = (equal_end + mismatch_end) // 2
        if expected_view[equal_end:middle] == actual_view[equal_end:middle]:
            equal_end = middle
        else:
            mismatch_end = middle
    return equal_end


def check(actual: bytes | bytearray | memoryview, *, seed: int, offset_bytes: int = 0) -> None:
    """Compare `actual`, byte by byte, with the stream of `seed` from `offset_bytes` on.

    Raises
    ------
    DataMismatch
        A byte differs. The error contains the offset of the first wrong byte, and up to 16 expected and actual bytes
        from this offset on.
    """
    expected = payload(len(actual), seed=seed, offset_bytes=offset_bytes)
    mismatch_offset = find_mismatch(expected, actual)
    if mismatch_offset is not None:
        raise DataMismatch(
            first_offset_bytes=mismatch_offset,
            expected=expected[mismatch_offset : mismatch_offset + _EXCERPT_BYTES],
            actual=bytes(actual[mismatch_offset : mismatch_offset + _EXCERPT_BYTES]),
            length_bytes=len(actual),
        )


def _make_block(seed: int, block_number: int, length_bytes: int) -> bytes:
    return hashlib.shake_128(seed.to_bytes(8, "little") + block_number.to_bytes(8, "little")).digest(length_bytes)
