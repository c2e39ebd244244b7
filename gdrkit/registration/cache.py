"""A cache of memory registrations.

Registering memory takes long. A cached registration only needs a check whether its memory still exists, which takes one
driver call for each chunk of the memory.

An entry is one whole allocation, registered with every NIC of the cache. Its key is the base, the size and the driver's
buffer id of each chunk of the allocation. VMM memory (cuMemMap) can have several chunks, other memory normally has one.
The address alone is not enough: memory that was freed and allocated again at the same address has another buffer id,
and needs another registration. An entry is *linked* as long as lookups can find it.

The cache does not hold its lock while it registers memory. If several threads look up the same allocation, only one of
them registers it. When gdrkit frees memory, it first removes the memory's entries from the cache. A leased entry is
deregistered when its last lease ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from gdrkit import forks
from gdrkit.errors import ApiError, ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.registration._entries import EntryIndex, end_address
from gdrkit.registration._pending import (
    CacheLock,
    PendingDeregistrations,
    PendingRegistration,
    PendingRegistrations,
    register_allocation,
)
from gdrkit.registration.lease import Lease, refuse_range
from gdrkit.registration.policy import TRANSFER_ACCESS, check_memory, check_nics
from gdrkit.registration.statistics import CacheStatistics
from gdrkit.text import format_count
from gdrkit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration._entries import CacheEntry
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = ["RegionCache"]

# The names of the closed objects in errors of ClosedResource.
_CACHE_NAME, _MEMORY_NAME = "region cache", "the memory to lease"


class RegionCache:
    """A cache of registrations of device memory with a fixed set of NICs. It can be used by any number of threads.

    In a forked child the cache is closed and deregisters nothing: the registrations belong to the parent.

    Parameters
    ----------
    nics : sequence of Nic
        The NICs that all memory is registered with. They must outlive the cache.
    access : Access
        Access rights of the keys.
    route : RegistrationRoute or None
        The only method of registration to use. With None, :func:`~gdrkit.registration.register` chooses the method.
    regions_max : int
        Largest number of entries, above 0. Leased entries are not evicted, so the cache can exceed `regions_max` and
        `bytes_max` while they are leased.
    bytes_max : int
        Largest size of the registered memory in bytes, above 0. A larger allocation is not cached: it is deregistered
        when its leases end.

    Raises
    ------
    UsageError
        A limit is not above 0, or `nics` is empty, contains a NIC twice, or contains something other than a Nic.
    """

    def __init__(
        self,
        nics: Sequence[Nic],
        *,
        access: Access = TRANSFER_ACCESS,
        route: RegistrationRoute | None = None,
        regions_max: int = 1024,
        bytes_max: int = 1024 * GIB,
    ) -> None:
        nics = check_nics(nics)
        if regions_max <= 0 or bytes_max <= 0:
            message = f"regions_max and bytes_max must be above 0, not {regions_max} and {bytes_max}"
            raise UsageError(message)
        self.nics = nics
        self.access = access
        self.route = route
        self.regions_max = regions_max
        self.bytes_max = bytes_max
        self._create_lock_and_index()
        # For each memory whose owner notifies the cache before a free: the function that cancels the notification.
        self._watched_memories: dict[DeviceBuffer, Callable[[], None]] = {}
        self._hit_count = self._miss_count = self._registration_count = 0
        self._eviction_count = self._invalidation_count = 0
        # Whether the linked entries exceed a limit. This is possible, because leased entries are not evicted.
        self._is_over_limit = False
        self._is_closing = self._is_closed = False
        self._handle = Handle("registration.cache")
        forks.register(self)

    @property
    def closed(self) -> bool:
        """Whether the cache was closed."""
        return self._is_closed

    def statistics(self) -> CacheStatistics:
        """Return a consistent snapshot of the counters."""
        with self._lock:
            return CacheStatistics(
                hits=self._hit_count,
                misses=self._miss_count,
                registrations=self._registration_count,
                evictions=self._eviction_count,
                invalidations=self._invalidation_count,
                regions=len(self._by_last_use),
                registered_bytes=sum(entry.length_bytes for entry in self._list_entries()),
                leases=self._count_leases(),
                in_flight=len(self._pending_registrations),
                waiting=self._pending_registrations.waiter_count,
                not_deregistered=self._pending_deregistrations.failed_count,
            )

    def lease(self, memory: DeviceBuffer, *, offset_bytes: int = 0, length_bytes: int | None = None) -> Lease:
        """Return a lease of a range of memory. The memory stays registered until the lease is closed.

        The caller must not free the memory before it closes the lease.

        Parameters
        ----------
        memory : DeviceBuffer
            The memory to lease. The whole allocation that contains it is registered, so that later lookups of any part
            hit. If gdrkit owns the memory, a later free first removes the entries of the memory from the cache. The
            free fails while a lease is open.
        offset_bytes, length_bytes : int
            The range in `memory`. A length of None means up to the end.

        Raises
        ------
        RegistrationFailed, ApiError
            See :func:`~gdrkit.registration.register`. Every thread that waited for this registration raises an error
            with the same fields. A failure is not cached, so the next lookup tries again.
        UsageError
            The object is not memory, or the range is not inside it. BUSY: the memory was freed or remapped while the
            cache was registering it; or the caller is a signal handler or a finalizer, and the interrupted call is
            changing the cache or is registering memory.
        ClosedResource
            The memory or the cache is closed.
        """
        # Every transfer calls this method, so a hit makes few calls and takes the lock once.
        try:
            size_bytes = memory.length_bytes
        except AttributeError:
            check_memory(memory)  # This raises a UsageError if `memory` is not memory at all.
            raise
        if length_bytes is None:
            length_bytes = size_bytes - offset_bytes
        if offset_bytes < 0 or length_bytes <= 0 or offset_bytes + length_bytes > size_bytes:
            refuse_range(memory, offset_bytes=offset_bytes, length_bytes=length_bytes)
        address = memory.address + offset_bytes
        entry = self._entry_by_memory.get(memory)
        if entry is not None:
            with self._lock:
                if entry.is_linked and not self._is_closing:
                    entry.lease_marks.append(None)  # One item for each lease; see CacheEntry.
                    self._hit_count += 1
                    self._by_last_use.move_to_end(entry)
                else:
                    entry = None  # Another thread has unlinked it, or closes the cache.
        if entry is None or not self._validate_or_unlink(entry):
            entry = self._find_or_register(memory, address, address + length_bytes)
        return Lease(entry, address, length_bytes)

    def invalidate(self, address: int, *, length_bytes: int) -> int:
        """Remove every entry that overlaps a range, and return the number of removed entries.

        A pending registration of the range counts as an entry: later lookups do not join it. Entries without a lease
        are deregistered before this method returns, leased entries when their last lease ends.

        Raises
        ------
        ApiError
            An entry could not be deregistered (the error of the first one). All entries were removed from the cache.
        UsageError
            BUSY: the caller is a signal handler or a finalizer, and the interrupted call is changing the cache or is
            deregistering memory of the range.
        """
        end = address + length_bytes
        self._cache_lock.raise_if_lock_held(f"invalidate [{address:#x}, {end:#x})")
        with self._lock:
            count = self._unlink_range(address, end)
        self._pending_deregistrations.deregister_and_wait(address, end)
        return count

    def close(self, *, timeout_ms: float | None = 0) -> None:
        """Deregister all memory and close the cache. A second close does nothing.

        Parameters
        ----------
        timeout_ms : float or None
            Longest wait for the end of all leases and pending registrations, in milliseconds. With 0, close fails at
            once if there are any. With None, the wait has no limit. During the wait, new leases are refused.

        Raises
        ------
        UsageError
            BUSY: a lease is still open, or a registration is pending; or the caller is a signal handler or a finalizer
            that would wait for the interrupted call. The cache stays open and usable.
        ApiError
            An entry could not be deregistered (the error of the first one). New leases are already refused. Call close
            again to deregister the remaining entries.
        """
        self._cache_lock.raise_if_lock_held("close the region cache")
        with self._lock:
            if self._is_closed:
                return
            self._pending_registrations.raise_if_wait_would_deadlock("close the region cache")
            self._is_closing = True
            try:
                self._wait_until_unused(timeout_ms)
                for entry in tuple(self._by_last_use):
                    self._unlink(entry)
            except BaseException:
                self._is_closing = False
                raise
        try:
            self._pending_deregistrations.deregister_and_wait()
        except GdrkitError:
            raise
        except BaseException:  # After an interrupt, the cache stays open and usable.
            self._is_closing = False
            raise
        for memory in tuple(self._watched_memories):
            # A signal handler or another thread may free the memory meanwhile.
            stop_watching = self._watched_memories.pop(memory, None)
            if stop_watching is not None:
                stop_watching()
        self._is_closed = True
        self._handle.release()

    def after_fork_in_child(self) -> None:
        """Mark the cache as closed in a forked child: registrations, NICs and device memory belong to the parent.

        The child neither leases nor deregisters. The cache of the parent and its leases stay valid.
        """
        # The destructors of these objects would release resources of the parent, so the child keeps references to them.
        self._objects_of_parent = (
            self._index,
            self._pending_registrations,
            self._pending_deregistrations,
            self._watched_memories,
        )
        self._create_lock_and_index()
        self._watched_memories = {}
        self._is_closing = self._is_closed = True

    def _create_lock_and_index(self) -> None:
        """Create the lock and everything that it protects."""
        self._cache_lock = CacheLock()
        self._lock = self._cache_lock.lock
        self._index = EntryIndex(regions_max=self.regions_max, bytes_max=self.bytes_max)
        self._entry_by_memory, self._by_last_use = self._index.by_memory, self._index.by_last_use
        self._pending_deregistrations = PendingDeregistrations(self._cache_lock)
        self._pending_registrations = PendingRegistrations(self._cache_lock, self._pending_deregistrations)

    def _validate_or_unlink(self, entry: CacheEntry) -> bool:
        """Return whether the memory of a leased entry is still the same. If not, unlink the entry and end the lease."""
        check_chunks_exist = entry.check_chunks_exist  # Python calls a local function faster than an attribute.
        try:
            # This call needs no lock: even with the lock, the memory could be freed right after the call.
            if check_chunks_exist() and entry.is_memory_alive:
                return True
            self._cache_lock.raise_if_lock_held("replace a registration")
        except BaseException:
            entry.release_lease()
            raise
        with self._lock:
            self._hit_count -= 1  # The lookup has counted the invalid entry as a hit.
            if entry.is_linked:
                self._unlink(entry)
                self._invalidation_count += 1
        entry.release_lease()
        return False

    def _find_or_register(self, memory: DeviceBuffer, address: int, end: int) -> CacheEntry:
        """Lease and return a valid entry that contains [address, end). If there is none, register the memory."""
        self._cache_lock.raise_if_lock_held(f"lease [{address:#x}, {end:#x})")
        while True:
            if memory.closed:
                raise ClosedResource(_MEMORY_NAME)
            if memory.owned:
                self._watch(memory)
            with self._lock:
                if self._is_closing:
                    raise ClosedResource(_CACHE_NAME)
                entry = self._index.find(address, end)
                if entry is not None:
                    entry.lease_marks.append(None)
                    self._hit_count += 1
                    self._by_last_use.move_to_end(entry)
                    if memory in self._watched_memories:
                        self._index.remember(memory, entry)
            if entry is None:
                entry = self._register_or_wait(memory)
                if entry is not None:
                    return entry
                continue
            if self._validate_or_unlink(entry):
                return entry

    def _register_or_wait(self, memory: DeviceBuffer) -> CacheEntry | None:
        """Register the memory, or wait for the thread that registers it, and return the leased entry.

        Return None if another thread has registered the memory meanwhile, or was interrupted while it registered. The
        caller then searches the index again.
        """
        try:
            own_registration = PendingRegistration(memory.allocation_key())
        except ApiError as error:
            if memory.closed:  # Another thread or a signal handler has freed the memory meanwhile.
                raise ClosedResource(_MEMORY_NAME) from error
            raise
        try:
            with self._lock:
                self._check_leasable(memory)
                joined_registration = self._pending_registrations.find(own_registration.key)
                if joined_registration is not None:
                    self._pending_registrations.raise_if_wait_would_deadlock(f"lease the memory at {memory.address:#x}")
                    joined_registration.waiter_count += 1
                else:
                    # Another thread may have registered this key since this thread searched the index.
                    existing_entry = self._index.find(own_registration.key[0][0], end_address(own_registration.key))
                    if existing_entry is not None and existing_entry.key == own_registration.key:
                        return None
                    self._pending_registrations.start(own_registration)
                self._miss_count += 1
            if joined_registration is None:
                return self._register(own_registration, memory)
        except BaseException as error:
            try:
                self._pending_registrations.abandon(own_registration, error)
            finally:
                if not own_registration.is_done:  # An interrupt has ended the first call of abandon() early.
                    self._pending_registrations.abandon(own_registration, error)
            raise
        return self._pending_registrations.wait_for(joined_registration)

    def _check_leasable(self, memory: DeviceBuffer) -> None:
        if self._is_closing:
            raise ClosedResource(_CACHE_NAME)
        if memory.closed or (memory.owned and memory not in self._watched_memories):
            # Another thread is freeing the memory: the action that _watch added has already run.
            raise ClosedResource(_MEMORY_NAME)

    def _register(self, pending: PendingRegistration, memory: DeviceBuffer) -> CacheEntry:
        entry = register_allocation(
            pending, memory, self.nics, access=self.access, route=self.route, finish_lease=self._finish_lease
        )
        with self._lock:
            self._registration_count += 1
            # If an exception interrupts this call, the entry is not linked, and its last lease deregisters it.
            self._pending_deregistrations.entries.add(entry)
            # The waiting threads get their leases here, so that the entry is not evicted before they wake up.
            entry.lease_marks.extend([None] * (1 + pending.waiter_count))
            self._pending_registrations.complete(pending)
            if not pending.is_unlinked and entry.length_bytes <= self.bytes_max:
                self._link(entry)
        self._pending_deregistrations.deregister(raise_errors=False)
        return entry

    def _wait_until_unused(self, timeout_ms: float | None) -> None:
        """Wait until there are neither leases nor pending registrations, or raise UsageError(BUSY)."""

        def is_unused() -> bool:
            return not self._count_leases() and not self._pending_registrations

        if not self._cache_lock.wait_for(is_unused, timeout_ms=timeout_ms):
            leases_text = format_count(self._count_leases(), "lease")
            registrations_text = format_count(len(self._pending_registrations), "registration")
            message = f"the cache still has {leases_text} open and {registrations_text} pending"
            raise UsageError(
                message, reason=Reason.BUSY, what_to_do="close the leases first, or pass timeout_ms to wait for them"
            )

    def _link(self, entry: CacheEntry) -> None:
        """Link an entry, and unlink the entries that it replaces or evicts. The caller deregisters them."""
        for invalid_entry in self._index.find_invalidated_entries(entry.key):
            self._unlink(invalid_entry)
            self._invalidation_count += 1
        self._index.add(entry)
        self._pending_deregistrations.entries.discard(entry)
        self._evict()

    def _list_entries(self) -> set[CacheEntry]:
        """Return the entries that are registered, linked or not."""
        return {*self._by_last_use, *self._pending_deregistrations.entries}

    def _count_leases(self) -> int:
        return sum(entry.lease_count for entry in self._list_entries())

    def _unlink(self, entry: CacheEntry) -> None:
        """Unlink an entry, so that lookups do not find it. The caller then deregisters it, unless it is leased."""
        self._pending_deregistrations.entries.add(entry)
        self._index.remove(entry)

    def _evict(self) -> None:
        """Unlink entries without a lease until the limits hold, or until only leased entries are left."""
        self._is_over_limit = True  # This must precede the count of the leases; see _finish_lease.
        evicted_entries = self._index.select_evictions()
        for entry in evicted_entries:
            self._unlink(entry)
        self._eviction_count += len(evicted_entries)
        self._is_over_limit = self._index.is_over_limit

    def _finish_lease(self, entry: CacheEntry) -> None:
        """Finish a lease whose item in `lease_marks` was removed, in most cases without taking the lock.

        A thread that deregisters or evicts entries, or closes the cache, first makes one of the three conditions below
        true, and then counts the leases. Removing and counting the items are atomic. If the thread counts after
        the removal, it does not count this lease. If it counts before the removal, the condition is already true here,
        and this call cleans up.
        """
        if not entry.is_linked or self._is_over_limit or self._is_closing:
            self._clean_up_after_lease(entry)

    def _clean_up_after_lease(self, entry: CacheEntry) -> None:
        """Deregister or evict the entries that only waited for the end of a lease of `entry`. Wake a waiting close."""
        if self._is_closed:
            # Only in a forked child does a closed cache have leases. They are copies of leases of the parent.
            return
        if self._cache_lock.is_held_by_this_thread():
            # The caller is a signal handler, and the interrupted call is changing the cache. The entry stays registered
            # until the next call that deregisters entries.
            return
        with self._lock:
            if entry.is_linked:
                self._evict()
            if self._is_closing:
                self._cache_lock.notify_all()
        self._pending_deregistrations.deregister(raise_errors=True)

    def _unlink_range(self, begin: int, end: int) -> int:
        """Unlink all entries and pending registrations that overlap [begin, end), and return their number."""
        overlapping_entries = self._index.find_overlapping(begin, end)
        for entry in overlapping_entries:
            self._unlink(entry)
        count = len(overlapping_entries) + self._pending_registrations.unlink(begin, end)
        self._invalidation_count += count
        return count

    def _watch(self, memory: DeviceBuffer) -> None:
        """Add an action to `memory` that removes its entries before gdrkit frees the memory.

        Other owners do not inform gdrkit before they free memory. For such memory, lookups detect the changed buffer
        id.
        """
        with self._lock:
            if memory not in self._watched_memories and not self._is_closing:
                self._watched_memories[memory] = memory.before_release(lambda: self._deregister_before_free(memory))

    def _deregister_before_free(self, memory: DeviceBuffer) -> None:
        """Deregister the entries of `memory`, or raise UsageError(BUSY) if a lease or registration still uses it."""
        begin, end = memory.address, memory.address + memory.length_bytes
        self._cache_lock.raise_if_lock_held(f"free the memory at {begin:#x}")
        with self._lock:
            self._unlink_range(begin, end)
        lease_count = registering_count = 0
        while not lease_count and not registering_count:
            self._pending_deregistrations.deregister_and_wait(begin, end)
            with self._lock:
                # A signal handler or another thread may have registered the memory again.
                self._unlink_range(begin, end)
                entries = self._pending_deregistrations.find_overlapping(begin, end)
                lease_count = sum(entry.lease_count for entry in entries)
                registering_count = self._pending_registrations.count_overlapping(begin, end)
                if not entries and not registering_count:
                    self._watched_memories.pop(memory, None)
                    return
        users_text = (
            f"{format_count(lease_count, 'lease')} and {format_count(registering_count, 'pending registration')}"
        )
        message = f"the memory is still in use by {users_text}"
        raise UsageError(message, reason=Reason.BUSY, what_to_do="close the leases first, then free the memory")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(nic.name for nic in self.nics)
        state = "closed" if self._is_closed else format_count(len(self._by_last_use), "region")
        return f"RegionCache({names}, {state})"
