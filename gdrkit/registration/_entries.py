"""What a region cache holds, by address.

Level 3. Pure bookkeeping, under the lock of the cache: chunks of memory are kept in order of their addresses and never
overlap, so a range is found by one binary search, however many there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import Registration

__all__ = ["Entry", "Index", "Key", "end_of", "overlaps"]

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

    __slots__ = (
        "alive",
        "base",
        "end",
        "give_back",
        "holders",
        "is_present",
        "is_taken",
        "key",
        "known_by",
        "linked",
        "memory",
        "registration",
    )

    def __init__(
        self, key: Key, memory: DeviceBuffer, registration: Registration, give_back: Callable[[Entry], None]
    ) -> None:
        self.key = key
        self.base = key[0][0]
        self.end = end_of(key)
        self.memory = memory
        self.registration = registration
        self.give_back = give_back
        self.is_present = memory.presence(key)
        self.known_by: list[DeviceBuffer] = []  # Who finds it without a search.
        # One item for each lease: an item is added under the lock of the cache, and taken out without it.
        self.holders: list[None] = []
        self.linked = False
        self.is_taken = False  # By a thread that deregisters it.
        # Closing the device closes what lies on it, also this.
        self.alive = True
        memory.before_release(self._end)

    @property
    def leases(self) -> int:
        """How many. Copying a list and taking an item out of it exclude each other, also without a GIL."""
        return len(self.holders.copy())

    @property
    def length_bytes(self) -> int:
        """How much is registered."""
        return self.end - self.base

    def _end(self) -> None:
        self.alive = False


class _Chunk:
    __slots__ = ("base", "end", "entries")

    def __init__(self, base: int, end: int) -> None:
        self.base = base
        self.end = end
        self.entries: list[Entry] = []


class Index:
    """The linked entries, by the chunks under them, and when each was used last.

    Attributes
    ----------
    used : OrderedDict
        All of them, least recently used first.
    known : dict
        Memory of gdrkit that was found before, and the entry over all of it: most hits end their search here.
    """

    def __init__(self, *, regions_max: int, bytes_max: int) -> None:
        self.used: OrderedDict[Entry, None] = OrderedDict()
        self.known: dict[DeviceBuffer, Entry] = {}
        self._regions_max = regions_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._bases: list[int] = []
        self._chunks: list[_Chunk] = []  # Of the same order.

    def find(self, address: int, end: int) -> Entry | None:
        """An entry that holds the whole range."""
        at = bisect_right(self._bases, address)
        if at:
            for entry in self._chunks[at - 1].entries:
                if entry.base <= address and end <= entry.end:
                    return entry
        return None

    def learn(self, memory: DeviceBuffer, entry: Entry) -> None:
        """Find a linked entry by the memory itself from now on, if it holds all of it."""
        begin = memory.address
        if memory not in self.known and entry.base <= begin and begin + memory.length_bytes <= entry.end:
            self.known[memory] = entry
            entry.known_by.append(memory)

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        """Every entry that has a byte of the range, each once."""
        found: dict[Entry, None] = {}
        for chunk in self._chunks[max(bisect_right(self._bases, begin) - 1, 0) :]:
            if chunk.base >= end:
                break
            if chunk.end > begin:
                found.update(dict.fromkeys(chunk.entries))
        return list(found)

    def outdated_by(self, key: Key) -> list[Entry]:
        """The entries over chunks that cannot be there any more, since those of `key` are."""
        facts = set(key)
        return [
            entry
            for entry in self.overlapping(key[0][0], end_of(key))
            if any(fact not in facts and overlaps(key, fact[0], fact[0] + fact[1]) for fact in entry.key)
        ]

    def add(self, entry: Entry) -> None:
        """Link it; nothing that it outdates may be linked."""
        for base, length_bytes, _buffer_id in entry.key:
            at = bisect_left(self._bases, base)
            if at == len(self._bases) or self._bases[at] != base:
                self._bases.insert(at, base)
                self._chunks.insert(at, _Chunk(base, base + length_bytes))
            self._chunks[at].entries.append(entry)
        self.used[entry] = None
        self._bytes += entry.length_bytes

    def remove(self, entry: Entry) -> None:
        """Unlink it."""
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
    def is_over(self) -> bool:
        """Whether a limit is passed."""
        return len(self.used) > self._regions_max or self._bytes > self._bytes_max

    def too_much(self) -> list[Entry]:
        """What has to go for the limits, least recently used first. What is leased stays: it could not be deregistered,
        and the next lookup would register it a second time.
        """
        found: list[Entry] = []
        count, length_bytes = len(self.used) - self._regions_max, self._bytes - self._bytes_max
        if count > 0 or length_bytes > 0:
            for entry in tuple(self.used):
                if entry.leases:
                    # In use now, so it is not what was used least recently.
                    self.used.move_to_end(entry)
                    continue
                found.append(entry)
                count, length_bytes = count - 1, length_bytes - entry.length_bytes
                if count <= 0 and length_bytes <= 0:
                    break
        return found
