"""Model of the contents of a file whose writers may be killed.

After a kill, the file must contain every acknowledged write. It may contain any pages of the other submitted writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gdrkit import pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SEGMENT_BYTES", "FileModel", "Write"]

# The storage server transfers an operation in segments of this length. The kernel copies a segment page by page.
SEGMENT_BYTES = 256 << 10
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Write:
    """A write of `length_bytes` bytes at `offset_bytes` of the file. The data is the test pattern of `seed`."""

    offset_bytes: int
    length_bytes: int
    seed: int

    @property
    def data(self) -> bytes:
        """The bytes of the write."""
        return pattern.payload(self.length_bytes, seed=self.seed)

    def list_boundaries(self) -> list[int]:
        """Return the offsets that divide the write into ranges that are each written completely or not at all."""
        end = self.offset_bytes + self.length_bytes
        page_offsets = range(self.offset_bytes // _PAGE_BYTES * _PAGE_BYTES + _PAGE_BYTES, end, _PAGE_BYTES)
        return sorted({self.offset_bytes, end, *page_offsets, *range(self.offset_bytes, end, SEGMENT_BYTES)})

    def to_tuple(self) -> tuple[int, int, int]:
        """Return offset, length and seed, as the command ``write`` of the client takes them."""
        return (self.offset_bytes, self.length_bytes, self.seed)


class FileModel:
    """The expected contents of a file, and the writes in progress.

    Attributes
    ----------
    contents : bytearray
        The contents after all acknowledged writes.
    acknowledged_count : int
        Number of acknowledged writes.
    """

    def __init__(self, contents: bytes) -> None:
        self.contents = bytearray(contents)
        self._writes_in_progress: list[Write] = []
        self.acknowledged_count = 0

    def submit(self, writes: Sequence[Write]) -> None:
        """Add writes that the file may contain from now on. They must not overlap any other write in progress."""
        self._writes_in_progress += writes

    def acknowledge(self, write: Write) -> None:
        """Mark a write as acknowledged. The file must contain it from now on."""
        self._writes_in_progress.remove(write)
        self.contents[write.offset_bytes : write.offset_bytes + write.length_bytes] = write.data
        self.acknowledged_count += 1

    def check_and_adopt(self, actual: bytes) -> None:
        """Check the actual contents of the file after all writes have ended, and make them the expected contents."""
        assert len(actual) == len(self.contents), f"the file has {len(actual)} bytes instead of {len(self.contents)}"
        adopted_contents = bytearray(self.contents)
        for write in self._writes_in_progress:
            data = write.data
            for begin, end in pairwise(write.list_boundaries()):
                actual_range = actual[begin:end]
                assert actual_range in {
                    bytes(self.contents[begin:end]),
                    data[begin - write.offset_bytes : end - write.offset_bytes],
                }, (
                    f"bytes {begin} to {end} of {write} are neither the old nor the new data: "
                    f"{actual_range[:16].hex()} ..., {len(actual_range) - actual_range.count(0)} bytes are not 0; "
                    f"writes in progress: {self._writes_in_progress}"
                )
                adopted_contents[begin:end] = actual_range
        mismatch_offset = pattern.find_mismatch(adopted_contents, actual)
        assert mismatch_offset is None, f"an acknowledged write is lost: the byte at {mismatch_offset} is wrong"
        self.contents = adopted_contents
        self._writes_in_progress.clear()
