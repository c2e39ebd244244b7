"""Registrations that are kept: registering takes long, asking whether one still holds takes one call of the driver.

Level 3. An entry is one allocation, registered whole with every NIC of the cache, and named by the base, the size and
the driver's buffer id of each chunk under it. An address says nothing: memory that was freed and allocated again has
another buffer id, and is another memory. Registering happens outside the lock, once for each key at a time; a free by
gdrkit takes the entry back first; what is leased is deregistered when the last lease ends.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import check_range
from gdrkit.errors import ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.registration._entries import Entry, Flight, Index, Key, overlaps
from gdrkit.registration._whole import register_whole
from gdrkit.registration.lease import Lease
from gdrkit.registration.policy import ALL_ACCESS
from gdrkit.registration.statistics import CacheStatistics
from gdrkit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = ["RegionCache"]


class RegionCache:
    """Registrations of device memory with the same NICs; for use by any number of threads.

    Parameters
    ----------
    nics : sequence of Nic
        With which memory is registered: all of them, or none. They must outlive the cache.
    access : Access
        What the keys allow.
    route : RegistrationRoute or None
        Force one way of registration; None: the policy.
    regions_max : int
        How many entries may stay, above 0.
    bytes_max : int
        How much memory may stay registered, above 0. An allocation larger than that is registered for its lease alone.
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
        if not nics or len(set(nics)) != len(nics):
            message = "a cache wants at least one NIC, each once"
            raise UsageError(message)
        if regions_max <= 0 or bytes_max <= 0:
            message = f"a cache of {regions_max} regions and {bytes_max} bytes holds nothing"
            raise UsageError(message)
        self.nics = tuple(nics)
        self.access = access
        self.route = route
        self.regions_max = regions_max
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._index = Index(regions_max=regions_max, bytes_max=bytes_max)
        self._find, self._touch = self._index.find, self._index.used.move_to_end  # What each hit calls.
        self._flights: dict[Key, Flight] = {}
        self._flying: set[Flight] = set()  # Those and the ones that were unlinked meanwhile.
        self._left: list[Entry] = []  # Unlinked, and refused to be deregistered.
        self._busy: set[Entry] = set()  # Unlinked and still leased.
        self._watched: dict[DeviceBuffer, Callable[[], None]] = {}
        self._hits = self._misses = self._registrations = self._evictions = self._invalidations = 0
        self._registered_bytes = 0
        self._is_full = False  # Over a limit, because what is leased stays.
        self._closing = self._closed = False
        self._handle = Handle("registration.cache")

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def statistics(self) -> CacheStatistics:
        """What it counts, at one moment."""
        with self._lock:
            return CacheStatistics(
                hits=self._hits,
                misses=self._misses,
                registrations=self._registrations,
                evictions=self._evictions,
                invalidations=self._invalidations,
                regions=len(self._index.used),
                registered_bytes=self._registered_bytes,
                leases=self._leased(),
                in_flight=len(self._flying),
                waiting=sum(flight.waiters for flight in self._flying),
                not_deregistered=len(self._left),
            )

    def lease(self, memory: DeviceBuffer, *, offset_bytes: int = 0, length_bytes: int | None = None) -> Lease:
        """A registration that holds for as long as the lease; the memory must not be freed before.

        Parameters
        ----------
        memory : DeviceBuffer
            What to reach. The whole allocation under it is registered, so that any part of it is found later. Memory
            of gdrkit is watched from now on: freeing it takes the entry out first, and is refused while it is leased.
        offset_bytes, length_bytes : int
            Which part the lease is about; None: up to the end.

        Raises
        ------
        RegistrationFailed, ApiError
            As :func:`~gdrkit.registration.register`, the same error for every thread that waited. Nothing is kept of a
            registration that failed, and the next lookup tries again.
        UsageError
            BUSY: the memory was freed or remapped while it was registered.
        ClosedResource
            The memory or the cache.
        """
        if memory.closed:
            what = "the memory to lease"
            raise ClosedResource(what)
        length_bytes = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
        if offset_bytes < 0 or length_bytes <= 0 or offset_bytes + length_bytes > memory.length_bytes:
            check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
            message = "an empty range cannot be leased"
            raise UsageError(message)
        address = memory.address + offset_bytes
        entry: Entry | None = None
        while entry is None:
            entry = self._found(memory, address, address + length_bytes) or self._missed(memory)
        return Lease(self._give_back, entry, address, length_bytes)

    def invalidate(self, address: int, *, length_bytes: int) -> int:
        """Forget every entry that has a byte of the range, and whatever is being registered there; gives the number.

        No later lookup finds them. What is not leased is deregistered before this returns, the rest when its last
        lease ends.

        Raises
        ------
        ApiError
            Of the first region that could not be deregistered; all are out of the cache.
        """
        with self._lock:
            found, flights = self._forget(address, address + length_bytes)
        self._deregister([entry for entry in found if not entry.leases], raising=True)
        return len(found) + flights

    def close(self, *, timeout_ms: float | None = 0) -> None:
        """Deregister everything; a second close does nothing.

        Parameters
        ----------
        timeout_ms : float or None
            How long to wait for leases and registrations that are under way. 0: refuse at once when there are any.
            None: wait for as long as it takes. New leases are refused meanwhile.

        Raises
        ------
        UsageError
            BUSY: something is still leased; the cache works on as before.
        ApiError
            Of the first region that could not be deregistered; closing again tries again.
        """
        with self._lock:
            if self._closed:
                return
            self._closing = True
            is_quiet = self._changed.wait_for(
                lambda: not self._leased() and not self._flying, None if timeout_ms is None else timeout_ms / 1000
            )
            if not is_quiet:
                self._closing = False
                message = f"{self._leased()} leases are open and {len(self._flying)} registrations under way"
                raise UsageError(
                    message, reason=Reason.BUSY, what_to_do="close the leases first, or wait by timeout_ms"
                )
            for entry in tuple(self._index.used):
                self._unlink(entry)
                self._left.append(entry)
            victims, self._left = self._left, []
        self._deregister(victims, raising=True)
        for leave in self._watched.values():
            leave()
        self._watched.clear()
        self._closed = True
        self._handle.release()

    def _found(self, memory: DeviceBuffer, address: int, end: int) -> Entry | None:
        """A valid entry over the range, leased; None when there is none. The path of a hit, so it calls little."""
        with self._lock:
            if self._closing:
                what = "region cache"
                raise ClosedResource(what)
            entry = self._find(address, end)
            if entry is None:
                return None
            entry.leases += 1
            self._hits += 1
            self._touch(entry)
        # Outside of the lock: the driver's answer is about now, whoever waits.
        try:
            if memory.is_current(entry.key) and entry.alive:
                if memory not in self._watched:
                    self._watch(memory)
                return entry
        except BaseException:
            self._give_back(entry)
            raise
        with self._lock:
            self._hits -= 1
            if entry.linked:
                self._unlink(entry)
                self._invalidations += 1
        self._give_back(entry)
        return None

    def _missed(self, memory: DeviceBuffer) -> Entry | None:
        """Register, or wait for the thread that does; None: look again."""
        self._watch(memory)
        key = memory.allocation_key()
        with self._lock:
            if self._closing:
                what = "region cache"
                raise ClosedResource(what)
            if memory.closed or (memory.owned and memory not in self._watched):
                # The action before the free has been here already: another thread is freeing the memory.
                what = "the memory to lease"
                raise ClosedResource(what)
            self._misses += 1
            flight = self._flights.get(key)
            is_first = flight is None
            if flight is None:
                flight = self._flights[key] = Flight(key)
                self._flying.add(flight)
            else:
                flight.waiters += 1
        return self._fly(flight, memory) if is_first else self._wait(flight)

    def _fly(self, flight: Flight, memory: DeviceBuffer) -> Entry:
        try:
            entry = register_whole(flight.key, memory, self.nics, access=self.access, route=self.route)
        except BaseException as error:
            # Waiters share a failure; they do not share that somebody stopped this thread, and try for themselves.
            with self._lock:
                flight.error = error if isinstance(error, Exception) else None
                self._land(flight)
            raise
        with self._lock:
            self._registrations += 1
            self._registered_bytes += entry.length_bytes
            # Those who wait get their leases now, so that nobody evicts it before they wake up.
            entry.leases = 1 + flight.waiters
            victims = [] if flight.unlinked or entry.length_bytes > self.bytes_max else self._link(entry)
            if not entry.linked:
                self._busy.add(entry)
            flight.entry = entry
            self._land(flight)
        self._deregister(victims, raising=False)
        return entry

    def _land(self, flight: Flight) -> None:
        self._flying.discard(flight)
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        flight.done.set()
        self._changed.notify_all()

    def _wait(self, flight: Flight) -> Entry | None:
        try:
            flight.done.wait()
        except BaseException:
            with self._lock:
                flight.waiters -= 1
                entry = flight.entry
            if entry is not None:
                self._give_back(entry)
            raise
        if flight.error is not None:
            raise flight.error
        return flight.entry

    def _link(self, entry: Entry) -> list[Entry]:
        """Make it findable; gives what has to be deregistered for it."""
        victims = []
        for old in self._index.outdated_by(entry.key):
            self._unlink(old)
            self._invalidations += 1
            if not old.leases:
                victims.append(old)
        self._index.add(entry)
        entry.linked = True
        return victims + self._evicted()

    def _leased(self) -> int:
        return sum(entry.leases for entry in self._index.used) + sum(entry.leases for entry in self._busy)

    def _unlink(self, entry: Entry) -> None:
        self._index.remove(entry)
        entry.linked = False
        if entry.leases:
            self._busy.add(entry)

    def _evicted(self) -> list[Entry]:
        victims = self._index.too_much()
        for entry in victims:
            self._unlink(entry)
        self._evictions += len(victims)
        self._is_full = self._index.is_over
        return victims

    def _give_back(self, entry: Entry) -> None:
        with self._lock:
            entry.leases -= 1
            if entry.leases or (entry.linked and not self._is_full and not self._closing):
                return
            if entry.linked:
                victims = self._evicted()
            else:
                self._busy.discard(entry)
                victims = [entry]
            if self._closing:
                self._changed.notify_all()
        if victims:
            self._deregister(victims, raising=True)

    def _forget(self, begin: int, end: int) -> tuple[list[Entry], int]:
        found = self._index.overlapping(begin, end)
        for entry in found:
            self._unlink(entry)
        flights = [flight for key, flight in self._flights.items() if overlaps(key, begin, end)]
        for flight in flights:
            flight.unlinked = True
            del self._flights[flight.key]
        self._invalidations += len(found) + len(flights)
        return found, len(flights)

    def _watch(self, memory: DeviceBuffer) -> None:
        """Have a free by gdrkit take the entries out first. Other owners free unseen; the buffer id tells."""
        if not memory.owned:
            return
        with self._lock:
            if memory not in self._watched:
                self._watched[memory] = memory.before_release(lambda: self._before_free(memory))

    def _before_free(self, memory: DeviceBuffer) -> None:
        begin, end = memory.address, memory.address + memory.length_bytes
        with self._lock:
            found, _flights = self._forget(begin, end)
            again = [entry for entry in self._left if overlaps(entry.key, begin, end)]
            self._left = [entry for entry in self._left if entry not in again]
        self._deregister([*(entry for entry in found if not entry.leases), *again], raising=True)
        with self._lock:
            leased = sum(entry.leases for entry in self._busy if overlaps(entry.key, begin, end))
            flying = sum(overlaps(flight.key, begin, end) for flight in self._flying)
            if not leased and not flying:
                self._watched.pop(memory, None)
                return
        message = f"{leased} leases and {flying} registrations under way still reach the memory"
        raise UsageError(message, reason=Reason.BUSY, what_to_do="close the leases first, then free it")

    def _deregister(self, entries: Iterable[Entry], *, raising: bool) -> None:
        """Close what nobody can find or use any more. A lookup that has nothing to do with them does not raise."""
        first: GdrkitError | None = None
        for entry in entries:
            try:
                entry.memory.close()
            except GdrkitError as error:
                with self._lock:
                    self._left.append(entry)
                if first is None:
                    first = error
                else:
                    first.add_note(f"then also: {error}")
            else:
                with self._lock:
                    self._registered_bytes -= entry.length_bytes
        if first is not None and raising:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(nic.name for nic in self.nics)
        return f"RegionCache({names}{', closed' if self._closed else f', {len(self._index.used)} regions'})"
