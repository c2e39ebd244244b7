"""Registrations and deregistrations of a region cache that are in progress.

At most one registration per key is pending: concurrent lookups of one allocation share it. One thread registers, and
the others wait for it.

An entry that is leased when it is unlinked (lookups no longer find it) stays registered until its last lease ends. The
thread that ends that lease deregisters the entry. While a deregistration of some memory is pending, that memory cannot
be freed and the cache cannot be closed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.registration._entries import AllocationKey, CacheEntry, end_address, overlaps
from gdrkit.registration.policy import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = ["PendingDeregistrations", "PendingRegistration", "PendingRegistrations", "register_allocation"]

# An address above all memory, also above the address ranges that represent dma-bufs (see DmabufMemory).
_ADDRESS_END = 1 << 256


class PendingRegistration:
    """One pending registration, with the number of threads that wait for it.

    When `done` is set, either `entry` or `error` has the result, or neither if the registering thread was interrupted.
    """

    __slots__ = ("done", "entry", "error", "is_unlinked", "key", "waiter_count")

    def __init__(self, key: AllocationKey) -> None:
        self.key = key
        self.done = threading.Event()
        self.entry: CacheEntry | None = None
        self.error: GdrkitError | None = None
        self.is_unlinked = False  # Whether new lookups can no longer join it, because its range was invalidated.
        self.waiter_count = 0


class PendingRegistrations:
    """The pending registrations of a cache. Every member requires the lock of `condition`."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._by_key: dict[AllocationKey, PendingRegistration] = {}
        self._pending: set[PendingRegistration] = set()  # The registrations in _by_key, and the unlinked ones.

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def waiter_count(self) -> int:
        """The number of threads that wait for a pending registration."""
        return sum(pending.waiter_count for pending in self._pending)

    def find(self, key: AllocationKey) -> PendingRegistration | None:
        """Return the pending registration of `key` that a new lookup may join, or None."""
        return self._by_key.get(key)

    def start(self, key: AllocationKey) -> PendingRegistration:
        """Add a pending registration of `key` and return it. The key must have none yet."""
        pending = self._by_key[key] = PendingRegistration(key)
        self._pending.add(pending)
        return pending

    def complete(self, pending: PendingRegistration) -> None:
        """Remove `pending`, whose entry or error is set, and wake its waiters."""
        self._pending.discard(pending)
        if self._by_key.get(pending.key) is pending:
            del self._by_key[pending.key]
        pending.done.set()
        self._condition.notify_all()

    def unlink(self, begin: int, end: int) -> int:
        """Stop new lookups from joining the pending registrations that overlap [begin, end). Return their number."""
        overlapping_registrations = [pending for key, pending in self._by_key.items() if overlaps(key, begin, end)]
        for pending in overlapping_registrations:
            pending.is_unlinked = True
            del self._by_key[pending.key]
        return len(overlapping_registrations)

    def count_overlapping(self, begin: int, end: int) -> int:
        """Return the number of pending registrations that overlap [begin, end), including the unlinked ones."""
        return sum(overlaps(pending.key, begin, end) for pending in self._pending)


class PendingDeregistrations:
    """The unlinked entries of a cache.

    Every member except :meth:`deregister` requires the lock of `condition`.

    Attributes
    ----------
    pending : set of CacheEntry
        Unlinked entries that are still leased, or that some thread is deregistering.
    failed_entries : list of CacheEntry
        Entries that libibverbs failed to deregister.
    registered_bytes : int
        Number of bytes that are registered, in linked and unlinked entries.
    """

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self.pending: set[CacheEntry] = set()
        self.failed_entries: list[CacheEntry] = []
        self.registered_bytes = 0

    def add(self, entry: CacheEntry) -> list[CacheEntry]:
        """Add an entry that is not linked. Return it in a list if the caller has to deregister it."""
        self.pending.add(entry)
        return self.claim(entry)

    def claim(self, entry: CacheEntry) -> list[CacheEntry]:
        """Claim an entry. Return it in a list if the caller has to deregister it.

        The list is empty if the entry is leased, or if another thread deregisters it.
        """
        if entry.is_claimed or entry.lease_count:
            return []
        entry.is_claimed = True
        return [entry]

    def claim_all(self, begin: int = 0, end: int = _ADDRESS_END) -> list[CacheEntry]:
        """Wait until no other thread deregisters entries of the range, and claim the remaining ones.

        Return the claimed entries, which the caller has to deregister.
        """
        self._condition.wait_for(lambda: not any(entry.is_claimed for entry in self.find_overlapping(begin, end)))
        retried_entries = [entry for entry in self.failed_entries if overlaps(entry.key, begin, end)]
        self.failed_entries = [entry for entry in self.failed_entries if entry not in retried_entries]
        self.pending.update(retried_entries)
        # The last lease of a pending entry may have ended in another thread, which still waits for the lock. Then this
        # thread claims the entry.
        return retried_entries + [
            claimed for entry in self.find_overlapping(begin, end) for claimed in self.claim(entry)
        ]

    def find_overlapping(self, begin: int, end: int) -> list[CacheEntry]:
        """Return the pending entries that overlap [begin, end). Entries that failed are not among them."""
        return [entry for entry in self.pending if overlaps(entry.key, begin, end)]

    def deregister(self, entries: Iterable[CacheEntry], *, raise_errors: bool) -> None:
        """Close the memory of entries that this thread has claimed, which deregisters them.

        Entries that fail are added to `failed_entries`. A lookup passes False as `raise_errors`, because it must not
        raise the errors of unrelated entries.
        """
        first_error: GdrkitError | None = None
        unreleased_entries = dict.fromkeys(entries)
        try:
            for entry in tuple(unreleased_entries):
                try:
                    entry.memory.close()
                except GdrkitError as error:
                    if first_error is None:
                        first_error = error
                    else:
                        first_error.add_note(f"then also: {error}")
                else:
                    del unreleased_entries[entry]
                    with self._condition:
                        self.pending.discard(entry)
                        self.registered_bytes -= entry.length_bytes
                        self._condition.notify_all()
        finally:
            # If a signal handler raised an exception in this thread, some entries were not tried yet.
            with self._condition:
                self.pending.difference_update(unreleased_entries)
                self.failed_entries += unreleased_entries
                self._condition.notify_all()
        if first_error is not None and raise_errors:
            raise first_error


def register_allocation(
    key: AllocationKey,
    memory: DeviceBuffer,
    nics: Sequence[Nic],
    *,
    access: Access,
    route: RegistrationRoute | None,
    end_lease: Callable[[CacheEntry], None],
) -> CacheEntry:
    """Register all chunks under `memory` and return the new entry, which calls `end_lease` when one of its leases ends.

    The caller has read `key`, the allocation key of `memory`, before this call.

    Raises
    ------
    UsageError
        BUSY: the allocation key has changed. Nothing stays registered.
    """
    allocation = memory.allocation()
    try:
        registration = register(allocation, nics, access=access, route=route)
        # The caller read the key before the registration. The registered memory is the memory that the key names only
        # if the chunks of the key still exist now.
        if (allocation.address, allocation.length_bytes) != (
            key[0][0],
            end_address(key) - key[0][0],
        ) or not allocation.make_existence_check(key)():
            message = "the memory was freed or remapped while it was registered"
            raise UsageError(message, reason=Reason.BUSY)  # noqa: TRY301 - the except clause closes the allocation.
    except BaseException as error:
        try:
            allocation.close()
        except GdrkitError as close_error:
            error.add_note(f"then, while undoing: {close_error}")
        raise
    return CacheEntry(key, allocation, registration, end_lease)
