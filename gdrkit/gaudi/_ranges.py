"""Parts of a range, handed out by first fit.

Level 2, pure. The memory of a Gaudi1 is shared out by the program itself (its driver only counts), and so is a pool.
"""

from __future__ import annotations

import threading
from bisect import insort

from gdrkit.units import align_up

__all__ = ["FirstFit"]


class FirstFit:
    """The free parts of ``[base, base + length)``; thread-safe.

    Parameters
    ----------
    base, length_bytes : int
        The range.
    alignment_bytes : int
        A power of two: parts begin at multiples of it, counted from 0, and take whole ones.
    """

    def __init__(self, base: int, length_bytes: int, *, alignment_bytes: int) -> None:
        self._alignment_bytes = alignment_bytes
        self._lock = threading.Lock()
        first = align_up(base, alignment_bytes=alignment_bytes)
        end = base + length_bytes
        self._free: list[tuple[int, int]] = [(first, end)] if first < end else []

    def take(self, length_bytes: int) -> int | None:
        """The address of a free part, the lowest that is large enough; None when there is none."""
        wanted = align_up(length_bytes, alignment_bytes=self._alignment_bytes)
        with self._lock:
            for at, (begin, end) in enumerate(self._free):
                if end - begin >= wanted:
                    self._free[at : at + 1] = [(begin + wanted, end)] if end - begin > wanted else []
                    return begin
        return None

    def give_back(self, address: int, length_bytes: int) -> None:
        """Take a part back, and join it with its free neighbours."""
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
        """The size of the largest free part."""
        with self._lock:
            return max((end - begin for begin, end in self._free), default=0)
