"""Pending registrations of a region cache, at most one per key.

Concurrent lookups of one allocation share a single registration: one thread registers, and the others wait for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gdrkit.registration._entries import overlaps

if TYPE_CHECKING:
    from gdrkit.errors import GdrkitError
    from gdrkit.registration._entries import Entry, Key

__all__ = ["Flight", "Flights"]


class Flight:
    """One pending registration, with the number of threads that wait for it."""

    __slots__ = ("done", "entry", "error", "key", "unlinked", "waiters")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.done = threading.Event()
        self.entry: Entry | None = None
        self.error: GdrkitError | None = None
        self.unlinked = False
        self.waiters = 0


class Flights:
    """The pending registrations of a cache. Every member requires the lock of `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._by_key: dict[Key, Flight] = {}
        self._flying: set[Flight] = set()  # Those of _by_key, and those that were unlinked.

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def waiting(self) -> int:
        """The number of threads that wait for a pending registration."""
        return sum(flight.waiters for flight in self._flying)

    def find(self, key: Key) -> Flight | None:
        """Return the pending registration of `key` that a new lookup may join, or None."""
        return self._by_key.get(key)

    def start(self, key: Key) -> Flight:
        """Add and return a new pending registration of `key`, which has none."""
        flight = self._by_key[key] = Flight(key)
        self._flying.add(flight)
        return flight

    def land(self, flight: Flight) -> None:
        """Remove `flight`, whose entry or error is set, and wake its waiters."""
        self._flying.discard(flight)
        if self._by_key.get(flight.key) is flight:
            del self._by_key[flight.key]
        flight.done.set()
        self._changed.notify_all()

    def unlink(self, begin: int, end: int) -> int:
        """Stop new lookups from joining the pending registrations that overlap [begin, end). Return their number."""
        found = [flight for key, flight in self._by_key.items() if overlaps(key, begin, end)]
        for flight in found:
            flight.unlinked = True
            del self._by_key[flight.key]
        return len(found)

    def overlapping(self, begin: int, end: int) -> int:
        """Return the number of pending registrations that overlap [begin, end), including the unlinked ones."""
        return sum(overlaps(flight.key, begin, end) for flight in self._flying)
