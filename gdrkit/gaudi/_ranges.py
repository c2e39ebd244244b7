"""First-fit allocator of a range of addresses.

It is used for the memory of Gaudi 1, which the program itself has to allocate because the driver only counts, and for
pools.
"""

from __future__ import annotations

import threading
from bisect import insort

from gdrkit.units import align_up

__all__ = ["FirstFit"]


class FirstFit:
    """The free parts of ``[base, base + length)``. It is thread-safe.

    Parameters
    ----------
    base, length_bytes : int
        The range.
    alignment_bytes : int
        A power of two. Parts begin at absolute multiples of it, and their sizes are rounded up to multiples of it.
    """

    def __init__(self, base: int, length_bytes: int, *, alignment_bytes: int) -> None:
        self._alignment_bytes = alignment_bytes
        self._lock = threading.Lock()
        first = align_up(base, alignment_bytes=alignment_bytes)
        end = base + length_bytes
        self._free: list[tuple[int, int]] = [(first, end)] if first < end else []

    def take(self, length_bytes: int) -> int | None:
        """Allocate the lowest free part that is large enough. Return its address, or None if there is none."""
        aligned_bytes = align_up(length_bytes, alignment_bytes=self._alignment_bytes)
        with self._lock:
            for at, (begin, end) in enumerate(self._free):
                if end - begin >= aligned_bytes:
                    self._free[at : at + 1] = [(begin + aligned_bytes, end)] if end - begin > aligned_bytes else []
                    return begin
        return None

    def give_back(self, address: int, length_bytes: int) -> None:
        """Free a part, and join it with its free neighbours."""
        end = address + align_up(length_bytes, alignment_bytes=self._alignment_bytes)
        with self._lock:
            insort(self._free, (address, end))
            joined: list[tuple[int, int]] = []
            for begin, stop in self._free:
                if joined and joined[-1][1] == begin:
                    joined[-1] = (joined[-1][0], stop)
                else:
                    joined.append((begin, stop))
            self._free = joined

    @property
    def largest_bytes(self) -> int:
        """Size of the largest free part in bytes."""
        with self._lock:
            return max((end - begin for begin, end in self._free), default=0)
