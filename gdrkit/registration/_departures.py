"""Entries of a region cache that no lookup finds any more, until they are deregistered.

Level 3. What is leased when it is unlinked stays registered until its last lease ends; whoever ends that one
deregisters it. Nobody frees memory, or closes the cache, while an entry of it is still in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError
from gdrkit.registration._entries import overlaps

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from gdrkit.registration._entries import Entry

__all__ = ["Departures"]


class Departures:
    """Entries on their way out. Everything but :meth:`deregister` is for who has the lock of `changed`.

    Attributes
    ----------
    pending : set of Entry
        Unlinked: still leased, or being deregistered by some thread.
    refused : list of Entry
        Those that could not be deregistered.
    registered_bytes : int
        How much is registered, linked or not.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.pending: set[Entry] = set()
        self.refused: list[Entry] = []
        self.registered_bytes = 0

    def add(self, entry: Entry) -> list[Entry]:
        """Take in what is not linked any more, or never was; gives it back when the caller has to deregister it."""
        self.pending.add(entry)
        return self.take(entry)

    def take(self, entry: Entry) -> list[Entry]:
        """The entry when the caller has to deregister it; nothing when it is leased, or when another thread does."""
        if entry.is_taken or entry.leases:
            return []
        entry.is_taken = True
        return [entry]

    def take_over(self, begin: int = 0, end: int = 1 << 64) -> list[Entry]:
        """Wait until no other thread is deregistering in the range. What it left, the caller has to deregister."""
        self._changed.wait_for(lambda: not any(e.is_taken for e in self.overlapping(begin, end)))
        refused = [entry for entry in self.refused if overlaps(entry.key, begin, end)]
        self.refused = [entry for entry in self.refused if entry not in refused]
        self.pending.update(refused)
        # A lease of these may have ended just now, and who ended it waits for the lock.
        return refused + [e for entry in self.overlapping(begin, end) for e in self.take(entry)]

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        """What has a byte of the range and was not refused."""
        return [entry for entry in self.pending if overlaps(entry.key, begin, end)]

    def deregister(self, entries: Iterable[Entry], *, raising: bool) -> None:
        """Close what was taken. A lookup that has nothing to do with it does not raise."""
        first: GdrkitError | None = None
        left = dict.fromkeys(entries)
        try:
            for entry in tuple(left):
                try:
                    entry.memory.close()
                except GdrkitError as error:
                    if first is None:
                        first = error
                    else:
                        first.add_note(f"then also: {error}")
                else:
                    del left[entry]
                    with self._changed:
                        self.pending.discard(entry)
                        self.registered_bytes -= entry.length_bytes
                        self._changed.notify_all()
        finally:
            # Also what was not tried, when somebody stopped this thread.
            with self._changed:
                self.pending.difference_update(left)
                self.refused += left
                self._changed.notify_all()
        if first is not None and raising:
            raise first
