"""CRC32C (Castagnoli), the checksum of frames and of chunks of files.

The engine computes it by the processor's CRC32C instruction. If the engine was not built, a table is used, which is
some thousand times slower.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, TypeAlias, cast

from gdrkit.errors import SetupMissing
from gdrkit.storage._native import engine

__all__ = ["crc32c", "crc32c_by_table"]

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_POLYNOMIAL = 0x82F63B78  # The polynomial 0x1EDC6F41 with reversed bits.


class _Crc32c(Protocol):
    def __call__(self, data: Buffer, initial: int = 0) -> int: ...


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = entry >> 1 ^ (_POLYNOMIAL if entry & 1 else 0)
        entries.append(entry)
    return tuple(entries)


_TABLE = _table()


def crc32c_by_table(data: Buffer, initial: int = 0) -> int:
    """Return the CRC32C, computed by a table; see :func:`crc32c`."""
    value = ~initial & 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        value = value >> 8 ^ _TABLE[(value ^ byte) & 0xFF]
    return ~value & 0xFFFFFFFF


def crc32c(data: Buffer, initial: int = 0) -> int:
    """Return the CRC32C of `data`. `initial` is the CRC32C of the bytes before it."""
    return _fastest()(data, initial)


@cache
def _fastest() -> _Crc32c:
    try:
        return cast("_Crc32c", engine().crc32c)
    except SetupMissing:
        return crc32c_by_table
