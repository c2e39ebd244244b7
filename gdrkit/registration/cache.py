"""Registrations that are kept: registering takes long, asking whether one still holds takes one call of the driver.

Level 3. An entry is one allocation, registered whole with every NIC of the cache, and named by the base, the size and
the driver's buffer id of each chunk under it. An address says nothing: memory that was freed and allocated again has
another buffer id, and is another memory. Registering happens outside the lock, once for each key at a time; a free by
gdrkit takes the entry back first; what is leased is deregistered when the last lease ends.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from gdrkit import forks
from gdrkit.errors import ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.registration._departures import Departures
from gdrkit.registration._entries import Index, end_of
from gdrkit.registration._flights import Flights
from gdrkit.registration._whole import register_whole
from gdrkit.registration.lease import Lease, refuse_range
from gdrkit.registration.policy import ALL_ACCESS, check_memory, checked_nics
from gdrkit.registration.statistics import CacheStatistics
from gdrkit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration._entries import Entry
    from gdrkit.registration._flights import Flight
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = ["RegionCache"]

_CACHE, _MEMORY = "region cache", "the memory to lease"  # What may be closed.


class RegionCache:
    """Registrations of device memory with the same NICs; for use by any number of threads.

    A forked child gets a closed copy, which takes nothing back: the registrations are the parent's.

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
        self._index = Index(regions_max=regions_max, bytes_max=bytes_max)
        self._known, self._used = self._index.known, self._index.used
        self._flights = Flights(self._changed)
        self._departures = Departures(self._changed)
        self._watched: dict[DeviceBuffer, Callable[[], None]] = {}
        self._hits = self._misses = self._registrations = self._evictions = self._invalidations = 0
        self._is_full = False  # Over a limit, because what is leased stays.
        self._closing = self._closed = False
        self._handle = Handle("registration.cache")
        forks.register(self)

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
                regions=len(self._used),
                registered_bytes=self._departures.registered_bytes,
                leases=self._leased(),
                in_flight=len(self._flights),
                waiting=self._flights.waiting,
                not_deregistered=len(self._departures.refused),
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
            As :func:`~gdrkit.registration.register`; every thread that waited gets an error with the same fields.
            Nothing is kept of a registration that failed, and the next lookup tries again.
        UsageError
            BUSY: the memory was freed or remapped while it was registered.
        ClosedResource
            The memory or the cache.
        """
        # A hit is what a transfer pays each time, so it makes few calls and takes the lock once.
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
                    entry.holders.append(None)
                    self._hits += 1
                    self._used.move_to_end(entry)
                else:
                    entry = None  # Unlinked just now.
        if entry is None or not self._holds(entry):
            entry = self._searched(memory, address, address + length_bytes)
        return Lease(entry, address, length_bytes)

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
            count, victims = self._forget(address, address + length_bytes)
        self._departures.deregister(victims, raising=True)
        return count

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
                lambda: not self._leased() and not self._flights, None if timeout_ms is None else timeout_ms / 1000
            )
            if not is_quiet:
                self._closing = False
                message = f"{self._leased()} leases are open and {len(self._flights)} registrations under way"
                raise UsageError(
                    message, reason=Reason.BUSY, what_to_do="close the leases first, or wait by timeout_ms"
                )
            victims = self._departures.take_over()
            for entry in tuple(self._used):
                victims += self._unlink(entry)
        self._departures.deregister(victims, raising=True)
        for leave in self._watched.values():
            leave()
        self._watched.clear()
        self._closed = True
        self._handle.release()

    def after_fork_in_child(self) -> None:
        """Be closed in a forked child: registrations, NICs and device memory are those of the parent.

        The child neither leases nor deregisters. The parent and its leases go on as before.
        """
        self._inherited = (self._index, self._flights, self._departures, self._watched)  # Never released here.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._index = Index(regions_max=self.regions_max, bytes_max=self.bytes_max)
        self._known, self._used = self._index.known, self._index.used
        self._flights = Flights(self._changed)
        self._departures = Departures(self._changed)
        self._watched = {}
        self._closing = self._closed = True

    def _holds(self, entry: Entry) -> bool:
        """Whether what a leased entry names is still there. If not, it is unlinked and given back."""
        is_present = entry.is_present  # A field that is called where it stands costs more.
        try:
            # Outside of the lock: the driver's answer is about now, whoever waits.
            if is_present() and entry.alive:
                return True
        except BaseException:
            self._give_back(entry)
            raise
        with self._lock:
            self._hits -= 1
            if entry.linked:
                self._unlink(entry)  # Leased by this thread, so the last one to give it back deregisters it.
                self._invalidations += 1
        self._give_back(entry)
        return False

    def _searched(self, memory: DeviceBuffer, address: int, end: int) -> Entry:
        """A valid entry over the range, leased: one that is found by its address, or else a new one."""
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
                    entry.holders.append(None)
                    self._hits += 1
                    self._used.move_to_end(entry)
                    if memory in self._watched:
                        self._index.learn(memory, entry)
            if entry is None:
                entry = self._missed(memory)
                if entry is not None:
                    return entry
                continue
            if self._holds(entry):
                return entry

    def _missed(self, memory: DeviceBuffer) -> Entry | None:
        """Register, or wait for the thread that does; None: look again."""
        key = memory.allocation_key()
        with self._lock:
            if self._closing:
                raise ClosedResource(_CACHE)
            if memory.closed or (memory.owned and memory not in self._watched):
                # The action before the free has been here already: another thread is freeing the memory.
                raise ClosedResource(_MEMORY)
            flight = self._flights.find(key)
            is_first = flight is None
            if flight is None:
                # Whoever registered it may have landed since this thread looked.
                landed = self._index.find(key[0][0], end_of(key))
                if landed is not None and landed.key == key:
                    return None
                flight = self._flights.start(key)
            else:
                flight.waiters += 1
            self._misses += 1
        return self._fly(flight, memory) if is_first else self._wait(flight)

    def _fly(self, flight: Flight, memory: DeviceBuffer) -> Entry:
        try:
            entry = register_whole(
                flight.key, memory, self.nics, access=self.access, route=self.route, give_back=self._give_back
            )
        except BaseException as error:
            # Waiters get the same failure, each as an error of its own: an error that several threads raise has the
            # frames of all. What is not of gdrkit (a signal that stopped this thread) is not theirs: they try again.
            shared = error.fresh() if isinstance(error, GdrkitError) else None
            with self._lock:
                flight.error = shared
                self._flights.land(flight)
            raise
        with self._lock:
            self._registrations += 1
            self._departures.registered_bytes += entry.length_bytes
            # Those who wait get their leases now, so that nobody evicts it before they wake up.
            entry.holders.extend([None] * (1 + flight.waiters))
            victims = [] if flight.unlinked or entry.length_bytes > self.bytes_max else self._link(entry)
            if not entry.linked:
                self._departures.add(entry)
            flight.entry = entry
            self._flights.land(flight)
        self._departures.deregister(victims, raising=False)
        return entry

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
            raise flight.error.fresh()
        return flight.entry

    def _link(self, entry: Entry) -> list[Entry]:
        """Make it findable; gives what has to be deregistered for it."""
        victims: list[Entry] = []
        for old in self._index.outdated_by(entry.key):
            victims += self._unlink(old)
            self._invalidations += 1
        self._index.add(entry)
        entry.linked = True
        return victims + self._evicted()

    def _leased(self) -> int:
        return sum(entry.leases for entry in (*self._used, *self._departures.pending))

    def _unlink(self, entry: Entry) -> list[Entry]:
        """Let no lookup find it any more; gives it when the caller has to deregister it."""
        self._index.remove(entry)
        entry.linked = False  # Before its leases are looked at; see _give_back.
        return self._departures.add(entry)

    def _evicted(self) -> list[Entry]:
        self._is_full = True  # Before the leases are looked at; see _give_back.
        outdated = self._index.too_much()
        victims = [victim for entry in outdated for victim in self._unlink(entry)]
        self._evictions += len(outdated)
        self._is_full = self._index.is_over
        return victims

    def _give_back(self, entry: Entry) -> None:
        """End a lease, mostly without the lock.

        Whoever holds the lock and looks at the leases changes one of these three first. Taking a holder out and
        counting the holders exclude each other, so either the count is without this one, or the change is seen here.
        """
        entry.holders.pop()
        if not entry.linked or self._is_full or self._closing:
            self._ended(entry)

    def _ended(self, entry: Entry) -> None:
        """Do what had to wait for the end of a lease."""
        if self._closed:
            return  # A closed cache has leases only in a forked child, where they are copies of the parent's.
        with self._lock:
            victims = self._evicted() if entry.linked else self._departures.take(entry)
            if self._closing:
                self._changed.notify_all()
        self._departures.deregister(victims, raising=True)

    def _forget(self, begin: int, end: int) -> tuple[int, list[Entry]]:
        found = self._index.overlapping(begin, end)
        victims = [victim for entry in found for victim in self._unlink(entry)]
        count = len(found) + self._flights.unlink(begin, end)
        self._invalidations += count
        return count, victims

    def _watch(self, memory: DeviceBuffer) -> None:
        """Have a free by gdrkit take the entries out first. Other owners free unseen; the buffer id tells."""
        with self._lock:
            if memory not in self._watched and not self._closing:
                self._watched[memory] = memory.before_release(lambda: self._before_free(memory))

    def _before_free(self, memory: DeviceBuffer) -> None:
        begin, end = memory.address, memory.address + memory.length_bytes
        with self._lock:
            _count, victims = self._forget(begin, end)
        while True:
            self._departures.deregister(victims, raising=True)
            with self._lock:
                victims = self._departures.take_over(begin, end)
                if victims:
                    continue
                pending = self._departures.overlapping(begin, end)
                flying = self._flights.overlapping(begin, end)
                if not pending and not flying:
                    self._watched.pop(memory, None)
                    return
                leased = sum(entry.leases for entry in pending)
                break
        message = f"{leased} leases and {flying} registrations under way still reach the memory"
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
