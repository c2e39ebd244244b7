"""Registrations of a region cache that are under way: one for each key, and who waits for it.

Level 3.
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
    """One registration under way, and who waits for it."""

    __slots__ = ("done", "entry", "error", "key", "unlinked", "waiters")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.done = threading.Event()
        self.entry: Entry | None = None
        self.error: GdrkitError | None = None
        self.unlinked = False
        self.waiters = 0


class Flights:
    """All of them; for who has the lock of `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._by_key: dict[Key, Flight] = {}
        self._flying: set[Flight] = set()  # Those and the ones that were unlinked meanwhile.

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return sum(flight.waiters for flight in self._flying)

    def find(self, key: Key) -> Flight | None:
        """The one of this key that a lookup may wait for."""
        return self._by_key.get(key)

    def start(self, key: Key) -> Flight:
        """A new one; there is none of the key."""
        flight = self._by_key[key] = Flight(key)
        self._flying.add(flight)
        return flight

    def land(self, flight: Flight) -> None:
        """It ended, and its entry or error is set."""
        self._flying.discard(flight)
        if self._by_key.get(flight.key) is flight:
            del self._by_key[flight.key]
        flight.done.set()
        self._changed.notify_all()

    def unlink(self, begin: int, end: int) -> int:
        """Have no later lookup wait for what has a byte of the range; gives the number."""
        found = [flight for key, flight in self._by_key.items() if overlaps(key, begin, end)]
        for flight in found:
            flight.unlinked = True
            del self._by_key[flight.key]
        return len(found)

    def overlapping(self, begin: int, end: int) -> int:
        """How many have a byte of the range, also unlinked ones."""
        return sum(overlaps(flight.key, begin, end) for flight in self._flying)
