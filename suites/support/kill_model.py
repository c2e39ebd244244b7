"""What a file may hold after a death: every acknowledged write, and of the others each page of each segment as it was
or as it should have become.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gdrkit import pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SEGMENT_BYTES", "FileModel", "Write"]

# Where an operation can be cut in two: the server moves it in segments, and the kernel copies each page by page.
SEGMENT_BYTES = 256 << 10
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Write:
    """One write: the payload of `seed`, at `offset`."""

    offset: int
    length: int
    seed: int

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return pattern.payload(self.length, seed=self.seed)

    def cuts(self) -> list[int]:
        """The offsets between which it happens as a whole or not at all."""
        end = self.offset + self.length
        pages = range(self.offset // _PAGE_BYTES * _PAGE_BYTES + _PAGE_BYTES, end, _PAGE_BYTES)
        return sorted({self.offset, end, *pages, *range(self.offset, end, SEGMENT_BYTES)})

    def told(self) -> tuple[int, int, int]:
        """As a client is told."""
        return (self.offset, self.length, self.seed)


def _said(found: bytes) -> str:
    return f"{found[:16].hex()} ..., {len(found) - found.count(0)} bytes that are not 0"


class FileModel:
    """The acknowledged bytes of one file, and the writes that are under way."""

    def __init__(self, image: bytes) -> None:
        self.image = bytearray(image)
        self._open: list[Write] = []
        self.acknowledged = 0

    def submitted(self, writes: Sequence[Write]) -> None:
        """From now on they may have happened; those that are under way together do not overlap."""
        self._open += writes

    def completed(self, write: Write) -> None:
        """Its completion was seen: it has happened."""
        self._open.remove(write)
        self.image[write.offset : write.offset + write.length] = write.data
        self.acknowledged += 1

    def settle(self, found: bytes) -> None:
        """Compare with what was read when nothing is under way any more, and go on from there."""
        assert len(found) == len(self.image), f"the file has {len(found)} bytes instead of {len(self.image)}"
        now = bytearray(self.image)
        for write in self._open:
            data = write.data
            for at, end in pairwise(write.cuts()):
                new = data[at - write.offset : end - write.offset]
                assert found[at:end] in {bytes(self.image[at:end]), new}, (
                    f"bytes {at} to {end} of {write} are neither old nor new, of {self._open}: {_said(found[at:end])}"
                )
                now[at:end] = found[at:end]
        wrong = pattern.find_mismatch(now, found)
        assert wrong is None, f"an acknowledged write is lost: byte {wrong} is not what was written"
        self.image = now
        self._open.clear()
