"""Entries of a region cache that lookups no longer find, until they are deregistered.

An entry that is leased when it is unlinked stays registered until its last lease ends. The thread that ends that lease
deregisters the entry. While this set holds an entry of some memory, that memory cannot be freed and the cache cannot be
closed.
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
    """The unlinked entries of a cache. Every member except :meth:`deregister` requires the lock of `changed`.

    Attributes
    ----------
    pending : set of Entry
        Unlinked entries that are still leased, or that some thread is deregistering.
    refused : list of Entry
        Entries that libibverbs failed to deregister.
    registered_bytes : int
        Number of bytes that are registered, in linked and unlinked entries.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.pending: set[Entry] = set()
        self.refused: list[Entry] = []
        self.registered_bytes = 0

    def add(self, entry: Entry) -> list[Entry]:
        """Add an entry that is not linked. Return it in a list if the caller has to deregister it."""
        self.pending.add(entry)
        return self.take(entry)

    def take(self, entry: Entry) -> list[Entry]:
        """Return the entry in a list if the caller has to deregister it.

        The list is empty if the entry is leased, or if another thread deregisters it.
        """
        if entry.is_taken or entry.leases:
            return []
        entry.is_taken = True
        return [entry]

    def take_over(self, begin: int = 0, end: int = 1 << 64) -> list[Entry]:
        """Wait until no other thread deregisters in the range. Return the entries that the caller has to deregister."""
        self._changed.wait_for(lambda: not any(e.is_taken for e in self.overlapping(begin, end)))
        refused = [entry for entry in self.refused if overlaps(entry.key, begin, end)]
        self.refused = [entry for entry in self.refused if entry not in refused]
        self.pending.update(refused)
        # The last lease of one of these may have ended just now, while the thread that ended it waits for the lock.
        return refused + [e for entry in self.overlapping(begin, end) for e in self.take(entry)]

    def overlapping(self, begin: int, end: int) -> list[Entry]:
        """Return the pending entries that overlap [begin, end). Refused entries are not among them."""
        return [entry for entry in self.pending if overlaps(entry.key, begin, end)]

    def deregister(self, entries: Iterable[Entry], *, raising: bool) -> None:
        """Close the memory of entries that this thread has taken, which deregisters them.

        If `raising` is false, failures are only kept in `refused`: a lookup does not raise errors of unrelated entries.
        """
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
            # This includes entries that were not tried, because a signal handler raised in this thread.
            with self._changed:
                self.pending.difference_update(left)
                self.refused += left
                self._changed.notify_all()
        if first is not None and raising:
            raise first
