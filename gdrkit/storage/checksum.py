"""CRC32C (Castagnoli), the checksum of frames and of chunks of files.

The native engine computes the checksum by the processor's CRC32C instruction. If the engine cannot be loaded, this
module uses a table, which is some thousand times slower.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, TypeAlias, cast

from gdrkit.errors import SetupMissing
from gdrkit.storage._native import engine

__all__ = ["crc32c", "crc32c_by_table"]

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_REVERSED_POLYNOMIAL = 0x82F63B78  # The polynomial 0x1EDC6F41 with reversed bits.


class _Crc32c(Protocol):
    """The type of :func:`crc32c`."""

    def __call__(self, data: Buffer, initial: int = 0) -> int: ...


def _build_table() -> tuple[int, ...]:
    """Return the CRC32C of each of the 256 bytes, without the inversions at the begin and the end."""
    entries = []
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = entry >> 1 ^ (_REVERSED_POLYNOMIAL if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


_TABLE = _build_table()


def crc32c_by_table(data: Buffer, initial: int = 0) -> int:
    """Return the CRC32C of `data`, computed by a table; see :func:`crc32c`."""
    register = ~initial & 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        register = register >> 8 ^ _TABLE[(register ^ byte) & 0xFF]
    return ~register & 0xFFFFFFFF


def crc32c(data: Buffer, initial: int = 0) -> int:
    """Return the CRC32C of `data`. `initial` is the CRC32C of the bytes before `data`."""
    return _choose_fastest_function()(data, initial)


@cache
def _choose_fastest_function() -> _Crc32c:
    """Return the function of the native engine, or of this module if the engine cannot be loaded."""
    try:
        return cast("_Crc32c", engine.crc32c)
    except SetupMissing:
        return crc32c_by_table
