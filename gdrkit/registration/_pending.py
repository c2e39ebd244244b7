"""Registrations and deregistrations of a region cache that are in progress.

At most one registration per key is pending: concurrent lookups of one allocation share it. One thread registers, and
the others wait for it.

An entry that is leased when it is unlinked stays registered until its last lease ends. The thread that ends that lease
deregisters the entry. While a deregistration of some memory is pending, that memory cannot be freed and the cache
cannot be closed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.registration._entries import AllocationKey, CacheEntry, end_of, overlaps
from gdrkit.registration.policy import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = ["PendingDeregistrations", "PendingRegistration", "PendingRegistrations", "register_allocation"]


class PendingRegistration:
    """One pending registration, with the number of threads that wait for it."""

    __slots__ = ("done", "entry", "error", "key", "unlinked", "waiters")

    def __init__(self, key: AllocationKey) -> None:
        self.key = key
        self.done = threading.Event()
        self.entry: CacheEntry | None = None
        self.error: GdrkitError | None = None
        self.unlinked = False
        self.waiters = 0


class PendingRegistrations:
    """The pending registrations of a cache. Every member requires the lock of `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._by_key: dict[AllocationKey, PendingRegistration] = {}
        self._pending: set[PendingRegistration] = set()  # Those of _by_key, and those that were unlinked.

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """The number of threads that wait for a pending registration."""
        return sum(pending.waiters for pending in self._pending)

    def find(self, key: AllocationKey) -> PendingRegistration | None:
        """Return the pending registration of `key` that a new lookup may join, or None."""
        return self._by_key.get(key)

    def start(self, key: AllocationKey) -> PendingRegistration:
        """Add and return a new pending registration of `key`, which has none."""
        pending = self._by_key[key] = PendingRegistration(key)
        self._pending.add(pending)
        return pending

    def complete(self, pending: PendingRegistration) -> None:
        """Remove `pending`, whose entry or error is set, and wake its waiters."""
        self._pending.discard(pending)
        if self._by_key.get(pending.key) is pending:
            del self._by_key[pending.key]
        pending.done.set()
        self._changed.notify_all()

    def unlink(self, begin: int, end: int) -> int:
        """Stop new lookups from joining the pending registrations that overlap [begin, end). Return their number."""
        overlapping = [pending for key, pending in self._by_key.items() if overlaps(key, begin, end)]
        for pending in overlapping:
            pending.unlinked = True
            del self._by_key[pending.key]
        return len(overlapping)

    def overlapping(self, begin: int, end: int) -> int:
        """Return the number of pending registrations that overlap [begin, end), including the unlinked ones."""
        return sum(overlaps(pending.key, begin, end) for pending in self._pending)


class PendingDeregistrations:
    """The unlinked entries of a cache. Every member except :meth:`deregister` requires the lock of `changed`.

    Attributes
    ----------
    pending : set of CacheEntry
        Unlinked entries that are still leased, or that some thread is deregistering.
    failed : list of CacheEntry
        Entries that libibverbs failed to deregister.
    registered_bytes : int
        Number of bytes that are registered, in linked and unlinked entries.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.pending: set[CacheEntry] = set()
        self.failed: list[CacheEntry] = []
        self.registered_bytes = 0

    def add(self, entry: CacheEntry) -> list[CacheEntry]:
        """Add an entry that is not linked. Return it in a list if the caller has to deregister it."""
        self.pending.add(entry)
        return self.claim(entry)

    def claim(self, entry: CacheEntry) -> list[CacheEntry]:
        """Return the entry in a list if the caller has to deregister it.

        The list is empty if the entry is leased, or if another thread deregisters it.
        """
        if entry.is_claimed or entry.leases:
            return []
        entry.is_claimed = True
        return [entry]

    def claim_all(self, begin: int = 0, end: int = 1 << 64) -> list[CacheEntry]:
        """Wait until no other thread deregisters in the range. Return the entries that the caller has to deregister."""
        self._changed.wait_for(lambda: not any(e.is_claimed for e in self.overlapping(begin, end)))
        failed = [entry for entry in self.failed if overlaps(entry.key, begin, end)]
        self.failed = [entry for entry in self.failed if entry not in failed]
        self.pending.update(failed)
        # The last lease of one of these may have ended just now, while the thread that ended it waits for the lock.
        return failed + [e for entry in self.overlapping(begin, end) for e in self.claim(entry)]

    def overlapping(self, begin: int, end: int) -> list[CacheEntry]:
        """Return the pending entries that overlap [begin, end). Entries that failed are not among them."""
        return [entry for entry in self.pending if overlaps(entry.key, begin, end)]

    def deregister(self, entries: Iterable[CacheEntry], *, raising: bool) -> None:
        """Close the memory of entries that this thread has claimed, which deregisters them.

        If `raising` is false, failures are only kept in `failed`: a lookup does not raise errors of unrelated entries.
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
                self.failed += left
                self._changed.notify_all()
        if first is not None and raising:
            raise first


def register_allocation(
    key: AllocationKey,
    memory: DeviceBuffer,
    nics: Sequence[Nic],
    *,
    access: Access,
    route: RegistrationRoute | None,
    release: Callable[[CacheEntry], None],
) -> CacheEntry:
    """Register all chunks under `memory` and return the new entry.

    The caller has read `key`, the allocation key of `memory`, before this call.

    Raises
    ------
    UsageError
        BUSY: the allocation key has changed. Nothing stays registered.
    """
    allocation = memory.allocation()
    try:
        registration = register(allocation, nics, access=access, route=route)
        # The caller read the key before the registration. Only if the key still holds now, the registered memory is the
        # memory that the key names.
        if (allocation.address, allocation.length_bytes) != (
            key[0][0],
            end_of(key) - key[0][0],
        ) or not allocation.presence(key)():
            message = "the memory was freed or remapped while it was registered"
            raise UsageError(message, reason=Reason.BUSY)  # noqa: TRY301 - the except clause closes the allocation.
    except BaseException as error:
        try:
            allocation.close()
        except GdrkitError as second:
            error.add_note(f"then, while undoing: {second}")
        raise
    return CacheEntry(key, allocation, registration, release)
