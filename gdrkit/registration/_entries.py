"""What a region cache holds, by address.

Level 3. Pure bookkeeping, under the lock of the cache: chunks of memory are kept in order of their addresses and never
overlap, so a range is found by one binary search, however many there are.
"""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import Registration

__all__ = ["Entry", "Flight", "Index", "Key", "end_of", "overlaps"]

# (base, length, buffer id) of every chunk, in order.
Key = tuple[tuple[int, int, int], ...]


def end_of(key: Key) -> int:
    """The address behind the last byte."""
    return key[-1][0] + key[-1][1]


def overlaps(key: Key, begin: int, end: int) -> bool:
    """Whether any byte is in both."""
    return key[0][0] < end and begin < end_of(key)


class Entry:
    """One registered allocation."""

    __slots__ = ("base", "end", "key", "leases", "linked", "memory", "registration")

    def __init__(self, key: Key, memory: DeviceBuffer, registration: Registration) -> None:
        self.key = key
        self.base = key[0][0]
        self.end = end_of(key)
        self.memory = memory
        self.registration = registration
        self.leases = 0
        self.linked = False

    @property
    def length_bytes(self) -> int:
        """How much is registered."""
        return self.end - self.base


class Flight:
    """One registration under way, and who waits for it."""

    __slots__ = ("done", "entry", "error", "key", "unlinked", "waiters")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.done = threading.Event()
        self.entry: Entry | None = None
        self.error: Exception | None = None
        self.unlinked = False
        self.waiters = 0


class _Chunk:
    __slots__ = ("end", "entries", "fact")

    def __init__(self, fact: tuple[int, int, int]) -> None:
        self.fact = fact
        self.end = fact[0] + fact[1]
        self.entries: list[Entry] = []


class Index:
    """The linked entries, by the chunks under them."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._chunks: dict[int, _Chunk] = {}

    def find(self, address: int, end: int) -> Entry | None:
        """An entry that holds the whole range."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        chunk = self._chunks[self._bases[at]]
        if address < chunk.end:
            for entry in chunk.entries:
                if entry.base <= address and end <= entry.end:
                    return entry
        return None

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        """Every entry that has a byte of the range, each once."""
        at = max(bisect.bisect_right(self._bases, begin) - 1, 0)
        found: dict[Entry, None] = {}
        for base in self._bases[at:]:
            if base >= end:
                break
            if self._chunks[base].end > begin:
                found.update(dict.fromkeys(self._chunks[base].entries))
        return list(found)

    def outdated_by(self, key: Key) -> list[Entry]:
        """The entries over chunks that cannot be there any more, since those of `key` are."""
        facts = set(key)
        return [
            entry
            for entry in self.overlapping(key[0][0], end_of(key))
            if any(
                fact not in facts and any(fact[0] < base + size and base < fact[0] + fact[1] for base, size, _ in key)
                for fact in entry.key
            )
        ]

    def add(self, entry: Entry) -> None:
        """Link it; nothing that it outdates may be linked."""
        for fact in entry.key:
            chunk = self._chunks.get(fact[0])
            if chunk is None:
                chunk = self._chunks[fact[0]] = _Chunk(fact)
                bisect.insort(self._bases, fact[0])
            chunk.entries.append(entry)

    def remove(self, entry: Entry) -> None:
        """Unlink it."""
        for base, _size, _id in entry.key:
            chunk = self._chunks[base]
            chunk.entries.remove(entry)
            if not chunk.entries:
                del self._chunks[base]
                del self._bases[bisect.bisect_left(self._bases, base)]
