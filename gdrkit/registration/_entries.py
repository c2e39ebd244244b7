"""Entries of a region cache (registered allocations), and their index by address.

An entry is linked while lookups can find it in the index. An unlinked entry only waits for its deregistration.

An entry has one or more chunks. Memory of cuMemAlloc is one chunk. VMM memory can have several: each physical
allocation that is mapped there is a chunk. The index sorts the chunks of all linked entries by address. Chunks never
overlap, so one binary search finds the entry of a range. The index calls no driver, and its callers hold the lock of
the cache.

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

# The (base address, length in bytes, buffer id) of every chunk of an allocation, in order of their addresses. The
# buffer id is the number that the driver gave the chunk. The driver never uses a buffer id again.
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
        "base",
        "check_chunks_exist",
        "deregistering_thread_id",
        "deregistration_failed",
        "end",
        "finish_lease",
        "indexed_memories",
        "is_linked",
        "is_memory_alive",
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
        self.finish_lease = finish_lease  # A function to call after an item of lease_marks was removed.
        self.check_chunks_exist = memory.make_existence_check(key)  # A function. It asks the driver at each call.
        self.indexed_memories: list[DeviceBuffer] = []  # The keys of EntryIndex.by_memory whose value is this entry.
        # One None for each lease, so the length counts leases. Items are added under the lock of the cache and removed
        # without it.
        self.lease_marks: list[None] = []
        self.is_linked = False
        self.deregistering_thread_id = 0  # The thread that is deregistering the entry; 0 if none.
        self.deregistration_failed = False  # Whether libibverbs failed to deregister the entry.
        # False after the memory was released, either by itself or with its device.
        self.is_memory_alive = True
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
        """End a lease that a lookup has counted, but for which it has not created a :class:`Lease` object."""
        self.lease_marks.pop()
        self.finish_lease(self)

    def _mark_memory_released(self) -> None:
        self.is_memory_alive = False


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
        Maps the memory object of an earlier lookup to the entry that contains all of this memory. Most hits need only
        this dict. Its memory objects belong to gdrkit, which unlinks the entry before it frees such memory. So no value
        is stale.
    """

    def __init__(self, *, regions_max: int, bytes_max: int) -> None:
        self.by_last_use: OrderedDict[CacheEntry, None] = OrderedDict()
        self.by_memory: dict[DeviceBuffer, CacheEntry] = {}
        self._regions_max = regions_max
        self._bytes_max = bytes_max
        self._linked_bytes = 0
        self._bases: list[int] = []  # The first addresses of _chunks, in the same order: _bases is searched by bisect.
        self._chunks: list[_Chunk] = []
        self._is_changing = False  # Whether add() or remove() is running, or was interrupted by an exception.

    def find(self, begin: int, end: int) -> CacheEntry | None:
        """Return an entry that contains all of [begin, end), or None."""
        self._repair()
        # The chunk before this index is the last chunk that begins at or below `begin`.
        index = bisect_right(self._bases, begin)
        if index:
            for entry in self._chunks[index - 1].entries:
                if entry.base <= begin and end <= entry.end:
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
        """Return the entries with a chunk that no longer exists, because the newer chunks of `key` use its addresses.

        The chunks of `key` exist now, so any other chunk in their address range was freed or unmapped.
        """
        existing_chunks = set(key)
        return [
            entry
            for entry in self.find_overlapping(key[0][0], end_address(key))
            if any(
                (base, length_bytes, buffer_id) not in existing_chunks and overlaps(key, base, base + length_bytes)
                for base, length_bytes, buffer_id in entry.key
            )
        ]

    def add(self, entry: CacheEntry) -> None:
        """Link an entry. The caller has already unlinked the entries of :meth:`find_invalidated_entries`."""
        self._repair()
        self._is_changing = True
        self._add_chunks(entry)
        # CPython runs signal handlers after calls and at the ends of loops, so none runs between the next three lines.
        self.by_last_use[entry] = None
        entry.is_linked = True
        self._is_changing = False

    def remove(self, entry: CacheEntry) -> None:
        """Unlink an entry. If it is not linked, do nothing."""
        self._repair()
        if not entry.is_linked:
            return
        self._is_changing = True
        # A signal handler may lease any linked entry, which moves the entry in `by_last_use` and fails if the entry is
        # not there. So the entry is unlinked before it is deleted there. It must also be unlinked before its leases are
        # counted; see RegionCache._finish_lease.
        entry.is_linked = False
        for base, _length_bytes, _buffer_id in entry.key:
            index = bisect_left(self._bases, base)
            self._chunks[index].entries.remove(entry)
            if not self._chunks[index].entries:
                del self._chunks[index]
                del self._bases[index]
        for memory in entry.indexed_memories:
            self.by_memory.pop(memory, None)
        entry.indexed_memories.clear()
        self._linked_bytes -= entry.length_bytes
        del self.by_last_use[entry]
        self._is_changing = False

    def _add_chunks(self, entry: CacheEntry) -> None:
        for base, length_bytes, _buffer_id in entry.key:
            index = bisect_left(self._bases, base)
            if index == len(self._bases) or self._bases[index] != base:
                self._bases.insert(index, base)
                self._chunks.insert(index, _Chunk(base, base + length_bytes))
            self._chunks[index].entries.append(entry)
        self._linked_bytes += entry.length_bytes

    def _repair(self) -> None:
        """Rebuild the index from the linked entries if an exception has interrupted its last change."""
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
        """Whether the linked entries exceed the limit of regions or of bytes."""
        return len(self.by_last_use) > self._regions_max or self._linked_bytes > self._bytes_max

    def select_evictions(self) -> list[CacheEntry]:
        """Return the entries to evict so that the limits hold, least recently used first.

        Leased entries are skipped: they could not be deregistered now, and the next lookup would register the same
        memory a second time.
        """
        self._repair()
        evictable_entries: list[CacheEntry] = []
        excess_count, excess_bytes = len(self.by_last_use) - self._regions_max, self._linked_bytes - self._bytes_max
        if excess_count > 0 or excess_bytes > 0:
            for entry in tuple(self.by_last_use):
                if entry.lease_count:
                    # A leased entry is in use now, so it moves to the most recently used end.
                    self.by_last_use.move_to_end(entry)
                    continue
                evictable_entries.append(entry)
                excess_count, excess_bytes = excess_count - 1, excess_bytes - entry.length_bytes
                if excess_count <= 0 and excess_bytes <= 0:
                    break
        return evictable_entries
