"""Entries of a region cache, and their index by address.

The index makes no calls and requires the lock of the cache. The chunks of memory are sorted by address and never
overlap, so one binary search finds a range, however many entries there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import Registration

__all__ = ["AllocationKey", "CacheEntry", "EntryIndex", "end_of", "overlaps"]

# The (base, length, buffer id) of every chunk of an allocation, in order of their addresses.
AllocationKey = tuple[tuple[int, int, int], ...]


def end_of(key: AllocationKey) -> int:
    """Return the address after the last byte."""
    return key[-1][0] + key[-1][1]


def overlaps(key: AllocationKey, begin: int, end: int) -> bool:
    """Return whether the chunks of `key` overlap [begin, end)."""
    return key[0][0] < end and begin < end_of(key)


class CacheEntry:
    """One registered allocation in a region cache."""

    __slots__ = (
        "alive",
        "base",
        "end",
        "is_claimed",
        "is_present",
        "key",
        "known_by",
        "lease_marks",
        "linked",
        "memory",
        "registration",
        "release",
    )

    def __init__(
        self,
        key: AllocationKey,
        memory: DeviceBuffer,
        registration: Registration,
        release: Callable[[CacheEntry], None],
    ) -> None:
        self.key = key
        self.base = key[0][0]
        self.end = end_of(key)
        self.memory = memory
        self.registration = registration
        self.release = release
        self.is_present = memory.presence(key)
        self.known_by: list[DeviceBuffer] = []  # The buffers for which EntryIndex.known has this entry.
        # One item for each lease. Items are added under the lock of the cache and removed without it.
        self.lease_marks: list[None] = []
        self.linked = False
        self.is_claimed = False  # Whether a thread is deregistering it.
        # Whether the memory was not released. Closing the device also releases it.
        self.alive = True
        memory.before_release(self._on_memory_release)

    @property
    def leases(self) -> int:
        """The number of leases. `list.copy` and `list.pop` are atomic against each other, also without a GIL."""
        return len(self.lease_marks.copy())

    @property
    def length_bytes(self) -> int:
        """Size of the registered memory in bytes."""
        return self.end - self.base

    def _on_memory_release(self) -> None:
        self.alive = False


class _Chunk:
    __slots__ = ("base", "end", "entries")

    def __init__(self, base: int, end: int) -> None:
        self.base = base
        self.end = end
        self.entries: list[CacheEntry] = []


class EntryIndex:
    """The linked entries of a region cache, indexed by their chunks and ordered by their last use.

    Attributes
    ----------
    used : OrderedDict
        All linked entries, least recently used first.
    known : dict
        Maps memory of gdrkit that an earlier lookup found to the entry that covers all of it. Most hits need only this.
    """

    def __init__(self, *, regions_max: int, bytes_max: int) -> None:
        self.used: OrderedDict[CacheEntry, None] = OrderedDict()
        self.known: dict[DeviceBuffer, CacheEntry] = {}
        self._regions_max = regions_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._bases: list[int] = []
        self._chunks: list[_Chunk] = []  # In the order of _bases.

    def find(self, address: int, end: int) -> CacheEntry | None:
        """Return an entry that contains all of [address, end), or None."""
        at = bisect_right(self._bases, address)
        if at:
            for entry in self._chunks[at - 1].entries:
                if entry.base <= address and end <= entry.end:
                    return entry
        return None

    def remember(self, memory: DeviceBuffer, entry: CacheEntry) -> None:
        """Add `memory` to `known` if the linked `entry` contains all of it, so that later lookups need no search."""
        begin = memory.address
        if memory not in self.known and entry.base <= begin and begin + memory.length_bytes <= entry.end:
            self.known[memory] = entry
            entry.known_by.append(memory)

    def overlapping(self, begin: int, end: int) -> list[CacheEntry]:
        """Return the entries that overlap [begin, end), each once."""
        entries: dict[CacheEntry, None] = {}
        for chunk in self._chunks[max(bisect_right(self._bases, begin) - 1, 0) :]:
            if chunk.base >= end:
                break
            if chunk.end > begin:
                entries.update(dict.fromkeys(chunk.entries))
        return list(entries)

    def invalidated_by(self, key: AllocationKey) -> list[CacheEntry]:
        """Return the entries with a chunk that cannot exist any more, because the chunks of `key` exist."""
        facts = set(key)
        return [
            entry
            for entry in self.overlapping(key[0][0], end_of(key))
            if any(fact not in facts and overlaps(key, fact[0], fact[0] + fact[1]) for fact in entry.key)
        ]

    def add(self, entry: CacheEntry) -> None:
        """Link an entry. The caller has unlinked the entries that it outdates."""
        for base, length_bytes, _buffer_id in entry.key:
            at = bisect_left(self._bases, base)
            if at == len(self._bases) or self._bases[at] != base:
                self._bases.insert(at, base)
                self._chunks.insert(at, _Chunk(base, base + length_bytes))
            self._chunks[at].entries.append(entry)
        self.used[entry] = None
        self._bytes += entry.length_bytes

    def remove(self, entry: CacheEntry) -> None:
        """Unlink an entry."""
        for base, _length_bytes, _buffer_id in entry.key:
            at = bisect_left(self._bases, base)
            self._chunks[at].entries.remove(entry)
            if not self._chunks[at].entries:
                del self._chunks[at]
                del self._bases[at]
        for memory in entry.known_by:
            del self.known[memory]
        entry.known_by.clear()
        del self.used[entry]
        self._bytes -= entry.length_bytes

    @property
    def is_over_limit(self) -> bool:
        """Whether the number of regions or of bytes is above its limit."""
        return len(self.used) > self._regions_max or self._bytes > self._bytes_max

    def eviction_candidates(self) -> list[CacheEntry]:
        """Return the entries to evict so that the limits hold, least recently used first.

        Leased entries are skipped: they could not be deregistered now, and the next lookup would register the same
        memory a second time.
        """
        entries: list[CacheEntry] = []
        count, length_bytes = len(self.used) - self._regions_max, self._bytes - self._bytes_max
        if count > 0 or length_bytes > 0:
            for entry in tuple(self.used):
                if entry.leases:
                    # A leased entry is in use now, so it moves to the most recently used end.
                    self.used.move_to_end(entry)
                    continue
                entries.append(entry)
                count, length_bytes = count - 1, length_bytes - entry.length_bytes
                if count <= 0 and length_bytes <= 0:
                    break
        return entries
