"""First-fit allocator for parts of a range of addresses.

It allocates the parts of memory pools, and the memory of Gaudi 1. The driver of Gaudi 1 does not allocate memory, so
the program has to do that.
"""

from __future__ import annotations

import threading
from bisect import insort

from gdrkit.units import align_up

__all__ = ["FirstFit"]


class FirstFit:
    """A thread-safe allocator that stores the free parts of ``[base_address, base_address + length_bytes)``.

    Parameters
    ----------
    base_address, length_bytes : int
        Address and size of the range, in bytes.
    alignment_bytes : int
        A power of two. The addresses of the parts are multiples of it, and their sizes are rounded up to multiples.
    """

    def __init__(self, base_address: int, length_bytes: int, *, alignment_bytes: int) -> None:
        self._alignment_bytes = alignment_bytes
        self._lock = threading.Lock()
        first_address = align_up(base_address, alignment_bytes=alignment_bytes)
        end_address = base_address + length_bytes
        # Begin and end addresses of the free parts, in ascending order.
        self._free_ranges: list[tuple[int, int]] = [(first_address, end_address)] if first_address < end_address else []

    def allocate(self, length_bytes: int) -> int | None:
        """Allocate the lowest free part that is large enough. Return its address, or None if there is no such part."""
        aligned_bytes = align_up(length_bytes, alignment_bytes=self._alignment_bytes)
        with self._lock:
            for index, (begin, end) in enumerate(self._free_ranges):
                if end - begin >= aligned_bytes:
                    self._free_ranges[index : index + 1] = (
                        [(begin + aligned_bytes, end)] if end - begin > aligned_bytes else []
                    )
                    return begin
        return None

    def free(self, address: int, length_bytes: int) -> None:
        """Free a part, and join it with its free neighbours."""
        end_address = address + align_up(length_bytes, alignment_bytes=self._alignment_bytes)
        with self._lock:
            insort(self._free_ranges, (address, end_address))
            joined_ranges: list[tuple[int, int]] = []
            for begin, range_end in self._free_ranges:
                if joined_ranges and joined_ranges[-1][1] == begin:
                    joined_ranges[-1] = (joined_ranges[-1][0], range_end)
                else:
                    joined_ranges.append((begin, range_end))
            self._free_ranges = joined_ranges

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free part in bytes."""
        with self._lock:
            return max((end - begin for begin, end in self._free_ranges), default=0)
