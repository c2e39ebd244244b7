"""Entries of a region cache, and their index by address.

An entry is linked while lookups can find it in the index. An unlinked entry only waits for its deregistration.

The index calls no driver, and its callers hold the lock of the cache. The chunks of memory are sorted by address and
never overlap, so one binary search finds a range.

A signal handler that raises an exception, as the handler of Ctrl-C does, may interrupt a change of the index. The next
call then repairs the index.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import Registration

__all__ = ["AllocationKey", "CacheEntry", "EntryIndex", "end_address", "overlaps"]

# The (base, length, buffer id) of every chunk of an allocation, in order of their addresses.
AllocationKey = tuple[tuple[int, int, int], ...]


def end_address(key: AllocationKey) -> int:
    """Return the address after the last byte of the last chunk."""
    return key[-1][0] + key[-1][1]


def overlaps(key: AllocationKey, begin: int, end: int) -> bool:
    """Return whether the chunks of `key` overlap [begin, end)."""
    return key[0][0] < end and begin < end_address(key)


class CacheEntry:
    """One registered allocation in a region cache."""

    __slots__ = (
        "all_chunks_exist",
        "base",
        "deregistering_thread_id",
        "end",
        "finish_lease",
        "has_failed",
        "indexed_memories",
        "is_alive",
        "is_linked",
        "key",
        "lease_marks",
        "memory",
        "registration",
    )

    def __init__(
        self,
        key: AllocationKey,
        memory: DeviceBuffer,
        registration: Registration,
        finish_lease: Callable[[CacheEntry], None],
    ) -> None:
        self.key = key
        self.base = key[0][0]
        self.end = end_address(key)
        self.memory = memory
        self.registration = registration
        self.finish_lease = finish_lease  # A function to call after the mark of a lease was removed.
        self.all_chunks_exist = memory.make_existence_check(key)  # A function that asks the driver about the chunks.
        self.indexed_memories: list[DeviceBuffer] = []  # The keys of EntryIndex.by_memory whose value is this entry.
        # One item for each lease. Items are added under the lock of the cache and removed without it.
        self.lease_marks: list[None] = []
        self.is_linked = False
        self.deregistering_thread_id = 0  # The thread that is deregistering the entry; 0 if none.
        self.has_failed = False  # Whether libibverbs failed to deregister the entry.
        # False after the memory was released, either by itself or with its device.
        self.is_alive = True
        memory.before_release(self._mark_memory_released)

    @property
    def lease_count(self) -> int:
        """The number of leases. No lock is needed: `list.copy` and `list.pop` are atomic, even without a GIL."""
        return len(self.lease_marks.copy())

    @property
    def can_be_deregistered(self) -> bool:
        """Whether the entry is neither linked nor leased, and no thread is deregistering it."""
        return not (self.is_linked or self.deregistering_thread_id or self.lease_count)

    @property
    def length_bytes(self) -> int:
        """Size of the registered memory in bytes."""
        return self.end - self.base

    def release_lease(self) -> None:
        """End a lease that has no :class:`Lease` object."""
        self.lease_marks.pop()
        self.finish_lease(self)

    def _mark_memory_released(self) -> None:
        self.is_alive = False


class _Chunk:
    """One chunk of memory, and the entries that contain it."""

    __slots__ = ("base", "end", "entries")

    def __init__(self, base: int, end: int) -> None:
        self.base = base
        self.end = end
        self.entries: list[CacheEntry] = []


class EntryIndex:
    """The linked entries of a region cache, indexed by their chunks and ordered by their last use.

    Attributes
    ----------
    by_last_use : OrderedDict
        All linked entries, least recently used first.
    by_memory : dict
        Maps a memory object of an earlier lookup to the entry that covers all of this memory. Most hits need only this
        dict. It has only memory that gdrkit owns.
    """

    def __init__(self, *, regions_max: int, bytes_max: int) -> None:
        self.by_last_use: OrderedDict[CacheEntry, None] = OrderedDict()
        self.by_memory: dict[DeviceBuffer, CacheEntry] = {}
        self._regions_max = regions_max
        self._bytes_max = bytes_max
        self._linked_bytes = 0
        self._bases: list[int] = []
        self._chunks: list[_Chunk] = []  # In the order of _bases.
        self._is_changing = False  # Whether add() or remove() is running, or was interrupted by an exception.

    def find(self, address: int, end: int) -> CacheEntry | None:
        """Return an entry that contains all of [address, end), or None."""
        self._repair()
        position = bisect_right(self._bases, address)
        if position:
            for entry in self._chunks[position - 1].entries:
                if entry.base <= address and end <= entry.end:
                    return entry
        return None

    def remember(self, memory: DeviceBuffer, entry: CacheEntry) -> None:
        """Add `memory` to `by_memory` if the linked `entry` contains all of it. Then later lookups need no search."""
        begin = memory.address
        if memory not in self.by_memory and entry.base <= begin and begin + memory.length_bytes <= entry.end:
            self.by_memory[memory] = entry
            entry.indexed_memories.append(memory)

    def find_overlapping(self, begin: int, end: int) -> list[CacheEntry]:
        """Return the entries that overlap [begin, end), each once."""
        self._repair()
        entries: dict[CacheEntry, None] = {}
        for chunk in self._chunks[max(bisect_right(self._bases, begin) - 1, 0) :]:
            if chunk.base >= end:
                break
            if chunk.end > begin:
                entries.update(dict.fromkeys(chunk.entries))
        return list(entries)

    def find_invalidated_entries(self, key: AllocationKey) -> list[CacheEntry]:
        """Return the entries with a chunk that no longer exists.

        The chunks of `key` exist now. Another chunk that overlaps one of these chunks no longer exists.
        """
        existing_chunks = set(key)
        return [
            entry
            for entry in self.find_overlapping(key[0][0], end_address(key))
            if any(
                (base, size, buffer_id) not in existing_chunks and overlaps(key, base, base + size)
                for base, size, buffer_id in entry.key
            )
        ]

    def add(self, entry: CacheEntry) -> None:
        """Link an entry. The caller has already unlinked the entries of :meth:`find_invalidated_entries`."""
        self._repair()
        self._is_changing = True
        self._add_chunks(entry)
        # No signal handler runs between the next statements.
        self.by_last_use[entry] = None
        entry.is_linked = True
        self._is_changing = False

    def remove(self, entry: CacheEntry) -> None:
        """Unlink an entry. If it is not linked, do nothing."""
        self._repair()
        if not entry.is_linked:
            return
        self._is_changing = True
        # A signal handler may lease a linked entry, which must then be in `by_last_use`.
        # This statement must precede the count of the leases; see RegionCache._finish_lease.
        entry.is_linked = False
        for base, _length_bytes, _buffer_id in entry.key:
            position = bisect_left(self._bases, base)
            self._chunks[position].entries.remove(entry)
            if not self._chunks[position].entries:
                del self._chunks[position]
                del self._bases[position]
        for memory in entry.indexed_memories:
            self.by_memory.pop(memory, None)
        entry.indexed_memories.clear()
        self._linked_bytes -= entry.length_bytes
        del self.by_last_use[entry]
        self._is_changing = False

    def _add_chunks(self, entry: CacheEntry) -> None:
        for base, length_bytes, _buffer_id in entry.key:
            position = bisect_left(self._bases, base)
            if position == len(self._bases) or self._bases[position] != base:
                self._bases.insert(position, base)
                self._chunks.insert(position, _Chunk(base, base + length_bytes))
            self._chunks[position].entries.append(entry)
        self._linked_bytes += entry.length_bytes

    def _repair(self) -> None:
        """Build the index anew from the linked entries, if an exception has interrupted its last change."""
        if not self._is_changing:
            return
        self._bases, self._chunks, self._linked_bytes = [], [], 0
        for entry in tuple(self.by_last_use):
            if entry.is_linked:
                self._add_chunks(entry)
            else:
                self.by_last_use.pop(entry)
        for memory, entry in tuple(self.by_memory.items()):
            if not entry.is_linked:
                self.by_memory.pop(memory)
        self._is_changing = False

    @property
    def is_over_limit(self) -> bool:
        """Whether the number of regions or of bytes is above its limit."""
        return len(self.by_last_use) > self._regions_max or self._linked_bytes > self._bytes_max

    def select_evictions(self) -> list[CacheEntry]:
        """Return the entries to evict so that the limits hold, least recently used first.

        Leased entries are skipped: they could not be deregistered now, and the next lookup would register the same
        memory a second time.
        """
        self._repair()
        entries: list[CacheEntry] = []
        excess_count, excess_bytes = len(self.by_last_use) - self._regions_max, self._linked_bytes - self._bytes_max
        if excess_count > 0 or excess_bytes > 0:
            for entry in tuple(self.by_last_use):
                if entry.lease_count:
                    # A leased entry is in use now, so it moves to the most recently used end.
                    self.by_last_use.move_to_end(entry)
                    continue
                entries.append(entry)
                excess_count, excess_bytes = excess_count - 1, excess_bytes - entry.length_bytes
                if excess_count <= 0 and excess_bytes <= 0:
                    break
        return entries
