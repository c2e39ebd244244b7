"""A cache of memory registrations.

Registering memory takes long. To check whether a cached registration is still valid takes one call of the driver.

An entry is one whole allocation, registered with every NIC of the cache. Its key is the base, the size and the driver's
buffer id of each chunk of the allocation. The address alone is not enough: memory that was freed and allocated again at
the same address has another buffer id, and needs another registration.

The cache registers memory outside its lock, and each key in at most one thread at a time. When gdrkit frees memory, it
first removes the memory's entries from the cache. A leased entry is deregistered when its last lease ends.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from gdrkit import forks
from gdrkit.errors import ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.registration._entries import EntryIndex, end_of
from gdrkit.registration._pending import PendingDeregistrations, PendingRegistrations, register_allocation
from gdrkit.registration.lease import Lease, refuse_range
from gdrkit.registration.policy import ALL_ACCESS, check_memory, checked_nics
from gdrkit.registration.statistics import CacheStatistics
from gdrkit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration._entries import CacheEntry
    from gdrkit.registration._pending import PendingRegistration
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = ["RegionCache"]

_CACHE, _MEMORY = "region cache", "the memory to lease"  # Names for ClosedResource errors.


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
        Use only this method of registration. With None, :func:`~gdrkit.registration.register` chooses.
    regions_max : int
        Limit of the number of entries, above 0. Leased entries are not evicted, so they can exceed a limit.
    bytes_max : int
        Limit of the registered memory in bytes, above 0. An allocation larger than that is registered for its lease
        only.
    """

    def __init__(
        self,
        nics: Sequence[Nic],
        *,
        access: Access = ALL_ACCESS,
        route: RegistrationRoute | None = None,
        regions_max: int = 1024,
        bytes_max: int = 1024 * GIB,
    ) -> None:
        nics = checked_nics(nics)
        if regions_max <= 0 or bytes_max <= 0:
            message = f"a cache of {regions_max} regions and {bytes_max} bytes holds nothing"
            raise UsageError(message)
        self.nics = nics
        self.access = access
        self.route = route
        self.regions_max = regions_max
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._index = EntryIndex(regions_max=regions_max, bytes_max=bytes_max)
        self._known, self._used = self._index.known, self._index.used
        self._registering = PendingRegistrations(self._changed)
        self._deregistering = PendingDeregistrations(self._changed)
        self._watched: dict[DeviceBuffer, Callable[[], None]] = {}
        self._hits = self._misses = self._registrations = self._evictions = self._invalidations = 0
        self._is_over_limit = False  # Over a limit, because leased entries stay.
        self._closing = self._closed = False
        self._handle = Handle("registration.cache")
        forks.register(self)

    @property
    def closed(self) -> bool:
        """Whether the cache was closed."""
        return self._closed

    def statistics(self) -> CacheStatistics:
        """Return a consistent snapshot of the counters."""
        with self._lock:
            return CacheStatistics(
                hits=self._hits,
                misses=self._misses,
                registrations=self._registrations,
                evictions=self._evictions,
                invalidations=self._invalidations,
                regions=len(self._used),
                registered_bytes=self._deregistering.registered_bytes,
                leases=self._leased(),
                in_flight=len(self._registering),
                waiting=self._registering.waiting,
                not_deregistered=len(self._deregistering.failed),
            )

    def lease(self, memory: DeviceBuffer, *, offset_bytes: int = 0, length_bytes: int | None = None) -> Lease:
        """Return a lease of a range of memory: its registration stays valid until the lease is closed.

        The caller must not free the memory before it closes the lease.

        Parameters
        ----------
        memory : DeviceBuffer
            The memory to lease. The whole allocation under it is registered, so that later lookups of any part hit.
            From now on the cache observes memory of gdrkit: freeing it first removes its entries, and fails while it is
            leased.
        offset_bytes, length_bytes : int
            The range in `memory`. A length of None means up to the end.

        Raises
        ------
        RegistrationFailed, ApiError
            See :func:`~gdrkit.registration.register`. Every thread that waited for this registration raises an error
            with the same fields. A failure is not cached, so the next lookup tries again.
        UsageError
            BUSY: the memory was freed or remapped while it was registered.
        ClosedResource
            The memory or the cache is closed.
        """
        # Each transfer pays for a hit, so a hit makes few calls and takes the lock once.
        try:
            size_bytes = memory.length_bytes
        except AttributeError:
            check_memory(memory)
            raise
        if length_bytes is None:
            length_bytes = size_bytes - offset_bytes
        if offset_bytes < 0 or length_bytes <= 0 or offset_bytes + length_bytes > size_bytes:
            refuse_range(memory, offset_bytes=offset_bytes, length_bytes=length_bytes)
        address = memory.address + offset_bytes
        entry = self._known.get(memory)
        if entry is not None:
            with self._lock:
                if entry.linked and not self._closing:
                    entry.lease_marks.append(None)
                    self._hits += 1
                    self._used.move_to_end(entry)
                else:
                    entry = None  # Another thread has unlinked it.
        if entry is None or not self._is_still_valid(entry):
            entry = self._find_or_register(memory, address, address + length_bytes)
        return Lease(entry, address, length_bytes)

    def invalidate(self, address: int, *, length_bytes: int) -> int:
        """Remove every entry that overlaps a range, and return the number of removed entries.

        Pending registrations in the range count as entries. No later lookup finds them. Entries without a lease are
        deregistered before this method returns, the others when their last lease ends.

        Raises
        ------
        ApiError
            An entry could not be deregistered (the error of the first one). All entries were removed from the cache.
        """
        with self._lock:
            count, victims = self._unlink_range(address, address + length_bytes)
        self._deregistering.deregister(victims, raising=True)
        return count

    def close(self, *, timeout_ms: float | None = 0) -> None:
        """Deregister everything. A second close does nothing.

        Parameters
        ----------
        timeout_ms : float or None
            How long to wait for open leases and pending registrations, in milliseconds. With 0, close fails at once if
            there are any. With None, there is no limit. During the wait, new leases are refused.

        Raises
        ------
        UsageError
            BUSY: a lease is still open, or a registration is pending. The cache stays open and usable.
        ApiError
            An entry could not be deregistered (the error of the first one). Another close tries again.
        """
        with self._lock:
            if self._closed:
                return
            self._closing = True
            is_quiet = self._changed.wait_for(
                lambda: not self._leased() and not self._registering, None if timeout_ms is None else timeout_ms / 1000
            )
            if not is_quiet:
                self._closing = False
                message = f"{self._leased()} leases are open and {len(self._registering)} registrations are pending"
                raise UsageError(
                    message, reason=Reason.BUSY, what_to_do="close the leases first, or wait by timeout_ms"
                )
            victims = self._deregistering.claim_all()
            for entry in tuple(self._used):
                victims += self._unlink(entry)
        self._deregistering.deregister(victims, raising=True)
        for leave in self._watched.values():
            leave()
        self._watched.clear()
        self._closed = True
        self._handle.release()

    def after_fork_in_child(self) -> None:
        """Mark the cache as closed in a forked child: registrations, NICs and device memory belong to the parent.

        The child neither leases nor deregisters. The cache of the parent and its leases stay valid.
        """
        # Keeps the references: the child must not release these.
        self._inherited = (self._index, self._registering, self._deregistering, self._watched)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._index = EntryIndex(regions_max=self.regions_max, bytes_max=self.bytes_max)
        self._known, self._used = self._index.known, self._index.used
        self._registering = PendingRegistrations(self._changed)
        self._deregistering = PendingDeregistrations(self._changed)
        self._watched = {}
        self._closing = self._closed = True

    def _is_still_valid(self, entry: CacheEntry) -> bool:
        """Return whether the memory of a leased entry is still the same. If not, unlink the entry and end the lease."""
        is_present = entry.is_present  # `entry.is_present()` would be slower.
        try:
            # This call is made outside of the lock. The driver reports the current state, so no lock makes it more
            # valid.
            if is_present() and entry.alive:
                return True
        except BaseException:
            self._release_lease(entry)
            raise
        with self._lock:
            self._hits -= 1
            if entry.linked:
                self._unlink(entry)  # Returns []: this thread still has a lease.
                self._invalidations += 1
        self._release_lease(entry)
        return False

    def _find_or_register(self, memory: DeviceBuffer, address: int, end: int) -> CacheEntry:
        """Return a valid, leased entry that contains [address, end): one from the index, or a new one."""
        while True:
            if memory.closed:
                raise ClosedResource(_MEMORY)
            if memory.owned:
                self._watch(memory)
            with self._lock:
                if self._closing:
                    raise ClosedResource(_CACHE)
                entry = self._index.find(address, end)
                if entry is not None:
                    entry.lease_marks.append(None)
                    self._hits += 1
                    self._used.move_to_end(entry)
                    if memory in self._watched:
                        self._index.remember(memory, entry)
            if entry is None:
                entry = self._register_or_wait(memory)
                if entry is not None:
                    return entry
                continue
            if self._is_still_valid(entry):
                return entry

    def _register_or_wait(self, memory: DeviceBuffer) -> CacheEntry | None:
        """Register the memory, or wait for the thread that registers it. None: the caller has to search again."""
        key = memory.allocation_key()
        with self._lock:
            if self._closing:
                raise ClosedResource(_CACHE)
            if memory.closed or (memory.owned and memory not in self._watched):
                # The before-release action has already run: another thread is freeing the memory.
                raise ClosedResource(_MEMORY)
            pending = self._registering.find(key)
            is_first = pending is None
            if pending is None:
                # The thread that registered it may have finished since this thread searched the index.
                existing = self._index.find(key[0][0], end_of(key))
                if existing is not None and existing.key == key:
                    return None
                pending = self._registering.start(key)
            else:
                pending.waiters += 1
            self._misses += 1
        return self._register(pending, memory) if is_first else self._wait(pending)

    def _register(self, pending: PendingRegistration, memory: DeviceBuffer) -> CacheEntry:
        try:
            entry = register_allocation(
                pending.key, memory, self.nics, access=self.access, route=self.route, release=self._release_lease
            )
        except BaseException as error:
            # The waiters raise the same failure, but each raises its own error object: an error raised in several
            # threads would collect the tracebacks of all of them. An exception that is not of gdrkit (such as one that
            # a signal handler raised in this thread) is not passed on, and the waiters try again.
            shared = error.clone() if isinstance(error, GdrkitError) else None
            with self._lock:
                pending.error = shared
                self._registering.complete(pending)
            raise
        with self._lock:
            self._registrations += 1
            self._deregistering.registered_bytes += entry.length_bytes
            # The waiting threads get their leases here, so that the entry is not evicted before they wake up.
            entry.lease_marks.extend([None] * (1 + pending.waiters))
            victims = [] if pending.unlinked or entry.length_bytes > self.bytes_max else self._link(entry)
            if not entry.linked:
                self._deregistering.add(entry)
            pending.entry = entry
            self._registering.complete(pending)
        self._deregistering.deregister(victims, raising=False)
        return entry

    def _wait(self, pending: PendingRegistration) -> CacheEntry | None:
        try:
            pending.done.wait()
        except BaseException:
            with self._lock:
                pending.waiters -= 1
                entry = pending.entry
            if entry is not None:
                self._release_lease(entry)
            raise
        if pending.error is not None:
            raise pending.error.clone()
        return pending.entry

    def _link(self, entry: CacheEntry) -> list[CacheEntry]:
        """Link an entry. Return the entries that the caller has to deregister because of it."""
        victims: list[CacheEntry] = []
        for old in self._index.invalidated_by(entry.key):
            victims += self._unlink(old)
            self._invalidations += 1
        self._index.add(entry)
        entry.linked = True
        return victims + self._evict()

    def _leased(self) -> int:
        return sum(entry.leases for entry in (*self._used, *self._deregistering.pending))

    def _unlink(self, entry: CacheEntry) -> list[CacheEntry]:
        """Unlink an entry, so that lookups do not find it. Return it in a list if the caller has to deregister it."""
        self._index.remove(entry)
        entry.linked = False  # Set before the leases are counted; see _release_lease.
        return self._deregistering.add(entry)

    def _evict(self) -> list[CacheEntry]:
        self._is_over_limit = True  # Set before the leases are counted; see _release_lease.
        outdated = self._index.eviction_candidates()
        victims = [victim for entry in outdated for victim in self._unlink(entry)]
        self._evictions += len(outdated)
        self._is_over_limit = self._index.is_over_limit
        return victims

    def _release_lease(self, entry: CacheEntry) -> None:
        """End a lease, in most cases without taking the lock.

        A thread that holds the lock and counts the leases first changes one of the three conditions below. Removing a
        holder and counting the lease_marks are atomic against each other. So either that count excludes this holder, or
        this thread sees the changed condition and calls `_finish_release`.
        """
        entry.lease_marks.pop()
        if not entry.linked or self._is_over_limit or self._closing:
            self._finish_release(entry)

    def _finish_release(self, entry: CacheEntry) -> None:
        """Do the work that had to wait for the end of a lease."""
        if self._closed:
            # The cache is closed and still has a lease: this is a forked child, where the lease is a copy of the
            # parent's.
            return
        with self._lock:
            victims = self._evict() if entry.linked else self._deregistering.claim(entry)
            if self._closing:
                self._changed.notify_all()
        self._deregistering.deregister(victims, raising=True)

    def _unlink_range(self, begin: int, end: int) -> tuple[int, list[CacheEntry]]:
        overlapping = self._index.overlapping(begin, end)
        victims = [victim for entry in overlapping for victim in self._unlink(entry)]
        count = len(overlapping) + self._registering.unlink(begin, end)
        self._invalidations += count
        return count, victims

    def _watch(self, memory: DeviceBuffer) -> None:
        """Remove the entries of `memory` before gdrkit frees it.

        Memory of other owners is freed without notice. There, lookups detect the free by the changed buffer id.
        """
        with self._lock:
            if memory not in self._watched and not self._closing:
                self._watched[memory] = memory.before_release(lambda: self._before_free(memory))

    def _before_free(self, memory: DeviceBuffer) -> None:
        begin, end = memory.address, memory.address + memory.length_bytes
        with self._lock:
            _count, victims = self._unlink_range(begin, end)
        while True:
            self._deregistering.deregister(victims, raising=True)
            with self._lock:
                victims = self._deregistering.claim_all(begin, end)
                if victims:
                    continue
                pending = self._deregistering.overlapping(begin, end)
                registering = self._registering.overlapping(begin, end)
                if not pending and not registering:
                    self._watched.pop(memory, None)
                    return
                leased = sum(entry.leases for entry in pending)
                break
        message = f"{leased} leases and {registering} pending registrations still use the memory"
        raise UsageError(message, reason=Reason.BUSY, what_to_do="close the leases first, then free it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(nic.name for nic in self.nics)
        return f"RegionCache({names}{', closed' if self._closed else f', {len(self._used)} regions'})"
