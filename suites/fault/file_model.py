"""Model of a file whose writers may be killed.

After a kill, the file must have every acknowledged write. Of any other write, it may have some pages of some segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gdrkit import pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SEGMENT_BYTES", "FileModel", "Write"]

# The server transfers an operation in segments of this size. The kernel then copies each segment page by page.
SEGMENT_BYTES = 256 << 10
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Write:
    """A write of `length` bytes of the pattern of `seed` at `offset`."""

    offset: int
    length: int
    seed: int

    @property
    def data(self) -> bytes:
        """The bytes of the write."""
        return pattern.payload(self.length, seed=self.seed)

    def boundaries(self) -> list[int]:
        """Return the offsets between which the write happens as a whole or not at all."""
        end = self.offset + self.length
        pages = range(self.offset // _PAGE_BYTES * _PAGE_BYTES + _PAGE_BYTES, end, _PAGE_BYTES)
        return sorted({self.offset, end, *pages, *range(self.offset, end, SEGMENT_BYTES)})

    def fields(self) -> tuple[int, int, int]:
        """Return offset, length and seed, for a command of the client."""
        return (self.offset, self.length, self.seed)


class FileModel:
    """The expected contents of a file, and the writes in progress.

    Attributes
    ----------
    image : bytearray
        The contents after all acknowledged writes.
    acknowledged : int
        Number of acknowledged writes.
    """

    def __init__(self, image: bytes) -> None:
        self.image = bytearray(image)
        self._in_progress: list[Write] = []
        self.acknowledged = 0

    def submitted(self, writes: Sequence[Write]) -> None:
        """Add writes, which may happen from now on. They must not overlap any other write in progress."""
        self._in_progress += writes

    def completed(self, write: Write) -> None:
        """Acknowledge a write: the file must have it from now on."""
        self._in_progress.remove(write)
        self.image[write.offset : write.offset + write.length] = write.data
        self.acknowledged += 1

    def settle(self, contents: bytes) -> None:
        """Check the contents of the file after all writes have ended, and continue with these contents."""
        assert len(contents) == len(self.image), f"the file has {len(contents)} bytes instead of {len(self.image)}"
        settled = bytearray(self.image)
        for write in self._in_progress:
            data = write.data
            for begin, end in pairwise(write.boundaries()):
                actual = contents[begin:end]
                assert actual in {bytes(self.image[begin:end]), data[begin - write.offset : end - write.offset]}, (
                    f"bytes {begin} to {end} of {write} are neither old nor new, of {self._in_progress}: "
                    f"{actual[:16].hex()} ..., {len(actual) - actual.count(0)} bytes are not 0"
                )
                settled[begin:end] = actual
        lost = pattern.find_mismatch(settled, contents)
        assert lost is None, f"an acknowledged write is lost: byte {lost} is not what was written"
        self.image = settled
        self._in_progress.clear()
