"""Registrations and deregistrations of a region cache that are in progress, and the lock of the cache.

At most one registration per key is pending: concurrent lookups of one allocation share it. One thread registers, and
the others wait for it.

An entry that is leased when it is unlinked (lookups no longer find it) stays registered until its last lease ends. The
thread that ends that lease deregisters the entry. While a deregistration of some memory is pending, that memory cannot
be freed and the cache cannot be closed.

A signal handler or a finalizer may use the cache while its own thread is in a call of the cache. Outside the lock, it
is like another thread, except that it must not wait for its own thread. Inside the lock, it can only use what does not
change the cache.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.registration._entries import AllocationKey, CacheEntry, end_address, overlaps
from gdrkit.registration.policy import register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = [
    "CacheLock",
    "PendingDeregistrations",
    "PendingRegistration",
    "PendingRegistrations",
    "register_allocation",
]

# An address above all memory, and above the address ranges that represent dma-bufs (see DmabufMemory).
_ADDRESS_END = 1 << 256
# The time after which a waiting thread checks again, in seconds. Other threads notify it earlier.
_RECHECK_S = 0.5
# The advice in the errors that a signal handler gets.
_AFTER_HANDLER = "try again after the signal handler or the finalizer"


class CacheLock:
    """The lock of a cache, with a wait for changes by other threads.

    Attributes
    ----------
    lock : RLock
        The lock. The thread that has it may acquire it again, but then only read what it protects.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)

    def refuse_handler(self, action: str) -> None:
        """Raise UsageError(BUSY) if this thread has the lock.

        The caller is then in a signal handler or a finalizer. The call that it interrupted is changing the cache.
        """
        if self.is_held():
            message = f"cannot {action}, because the interrupted call is changing the region cache"
            raise UsageError(message, reason=Reason.BUSY, what_to_do=_AFTER_HANDLER)

    def is_held(self) -> bool:
        """Return whether this thread has the lock."""
        try:
            self._condition.notify(0)  # This notifies no thread. It fails if this thread does not have the lock.
        except RuntimeError:
            return False
        return True

    def notify_all(self) -> None:
        """Wake the waiting threads. This requires the lock."""
        self._condition.notify_all()

    def wait_for(self, is_done: Callable[[], object], *, timeout_ms: float | None = None) -> bool:
        """Release the lock until `is_done` returns a true value, and return whether it did so in time."""
        end_s = math.inf if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while not is_done():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            # A signal handler may end a lease after the check above, and before this thread can be notified.
            self._condition.wait(min(left_s, _RECHECK_S))
        return True


class PendingDeregistrations:
    """The unlinked entries of a cache: leased, to be deregistered, or not deregistered because libibverbs failed.

    Attributes
    ----------
    entries : set of CacheEntry
        The entries. Access to them requires the lock of the cache.
    """

    def __init__(self, lock: CacheLock) -> None:
        self._lock = lock
        self.entries: set[CacheEntry] = set()

    @property
    def failed_count(self) -> int:
        """The number of entries that libibverbs failed to deregister."""
        return sum(entry.has_failed for entry in self.entries)

    @property
    def thread_ids(self) -> set[int]:
        """The threads that deregister entries."""
        return {entry.deregistering_thread_id for entry in self.entries} - {0}

    def find_overlapping(self, begin: int, end: int) -> list[CacheEntry]:
        """Return the entries that overlap [begin, end). This requires the lock."""
        return [entry for entry in self.entries if overlaps(entry.key, begin, end)]

    def deregister(
        self, begin: int = 0, end: int = _ADDRESS_END, *, raise_errors: bool, retry_failed: bool = False
    ) -> None:
        """Deregister the entries of a range that are not leased, and that no other thread deregisters.

        A lookup passes False as `raise_errors`, because it must not raise the errors of unrelated entries.
        """
        first_error: GdrkitError | None = None
        with self._lock.lock:
            entries = [
                entry
                for entry in self.find_overlapping(begin, end)
                if entry.can_be_deregistered and (retry_failed or not entry.has_failed)
            ]
        for entry in entries:
            try:
                self._deregister_entry(entry)
            except GdrkitError as error:
                if first_error is None:
                    first_error = error
                else:
                    first_error.add_note(f"then also: {error}")
        if first_error is not None and raise_errors:
            raise first_error

    def deregister_and_wait(self, begin: int = 0, end: int = _ADDRESS_END) -> None:
        """Deregister the entries of a range that are not leased, and wait for the threads that deregister others.

        Try again to deregister the entries that failed before.

        Raises
        ------
        ApiError
            An entry could not be deregistered (the error of the first one).
        UsageError
            BUSY: the caller is a signal handler, and the interrupted call is deregistering entries.
        """

        def is_done() -> bool:
            return not any(entry.deregistering_thread_id for entry in self.find_overlapping(begin, end))

        has_rest = True
        while has_rest:
            self.deregister(begin, end, raise_errors=True, retry_failed=True)
            with self._lock.lock:
                if not is_done() and threading.get_ident() in self.thread_ids:
                    message = f"the interrupted call is deregistering memory in [{begin:#x}, {end:#x})"
                    raise UsageError(message, reason=Reason.BUSY, what_to_do=_AFTER_HANDLER)
                self._lock.wait_for(is_done)
                # A deregistration in another thread may have failed, and a lease may have ended.
                has_rest = any(entry.can_be_deregistered for entry in self.find_overlapping(begin, end))

    def _deregister_entry(self, entry: CacheEntry) -> None:
        """Close the memory of an entry, which deregisters it, unless it is leased or another thread does this."""
        thread_id = threading.get_ident()
        is_claimed = False
        try:
            with self._lock.lock:
                if entry not in self.entries or not entry.can_be_deregistered:
                    return
                entry.deregistering_thread_id, is_claimed = thread_id, True
            entry.memory.close()
        except GdrkitError:
            entry.has_failed = True
            raise
        finally:
            # If a signal handler raised an exception, the next call tries again.
            if is_claimed:
                entry.deregistering_thread_id = 0
                with self._lock.lock:
                    if entry.memory.closed:
                        self.entries.discard(entry)
                    self._lock.notify_all()


class PendingRegistration:
    """One pending registration, with the number of threads that wait for it.

    When it is done, either `entry` or `error` has the result, or neither if the registering thread was interrupted.
    """

    __slots__ = ("entry", "error", "is_done", "is_unlinked", "key", "thread_id", "waiter_count")

    def __init__(self, key: AllocationKey) -> None:
        self.key = key
        self.thread_id = threading.get_ident()  # The thread that registers.
        self.entry: CacheEntry | None = None
        self.error: GdrkitError | None = None
        self.is_done = False
        self.is_unlinked = False  # Whether new lookups can no longer join it, because its range was invalidated.
        self.waiter_count = 0


class PendingRegistrations:
    """The pending registrations of a cache.

    Every member except :meth:`abandon` and :meth:`wait_for` requires the lock of the cache.
    """

    def __init__(self, lock: CacheLock, deregistrations: PendingDeregistrations) -> None:
        self._lock = lock
        self._deregistrations = deregistrations
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

    def start(self, pending: PendingRegistration) -> None:
        """Add a registration. Its key must have none yet."""
        self._pending.add(pending)
        self._by_key[pending.key] = pending

    def complete(self, pending: PendingRegistration) -> None:
        """Remove a registration, whose entry or error is set, and wake the waiting threads."""
        self._pending.discard(pending)
        if self._by_key.get(pending.key) is pending:
            self._by_key.pop(pending.key)
        self._lock.notify_all()
        pending.is_done = True

    def abandon(self, pending: PendingRegistration, error: BaseException) -> None:
        """End a registration that failed, or that an exception of a signal handler has interrupted."""
        # Every waiting thread raises a copy of the error, because one error object would collect the tracebacks of all
        # threads. Only errors of gdrkit are passed on. After another exception, the waiting threads try again.
        shared_error = error.clone() if isinstance(error, GdrkitError) else None
        with self._lock.lock:
            entry, has_leases = pending.entry, pending.is_done
            if not has_leases:
                if entry is not None:
                    self._deregistrations.entries.add(entry)
                    entry.lease_marks.clear()
                pending.entry, pending.error = None, shared_error
                self.complete(pending)
        if entry is not None:
            if has_leases:
                entry.release_lease()
            self._deregistrations.deregister(raise_errors=False)

    def wait_for(self, pending: PendingRegistration) -> CacheEntry | None:
        """Wait for a registration that the caller has joined. Return its entry, or None if it was interrupted."""
        try:
            with self._lock.lock:
                self._lock.wait_for(lambda: pending.is_done)
        except BaseException:
            with self._lock.lock:
                pending.waiter_count -= 1
                entry = pending.entry if pending.is_done else None
            if entry is not None:
                entry.release_lease()
            raise
        if pending.error is not None:
            raise pending.error.clone()
        return pending.entry

    def refuse_wait(self, action: str) -> None:
        """Raise UsageError(BUSY) if this thread is registering or deregistering memory.

        The caller is then in a signal handler or a finalizer. It must not wait for the call that it interrupted.
        """
        thread_ids = self._deregistrations.thread_ids | {pending.thread_id for pending in self._pending}
        if threading.get_ident() in thread_ids:
            message = f"cannot {action}, because the interrupted call is registering or deregistering memory"
            raise UsageError(message, reason=Reason.BUSY, what_to_do=_AFTER_HANDLER)

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


def register_allocation(
    pending: PendingRegistration,
    memory: DeviceBuffer,
    nics: Sequence[Nic],
    *,
    access: Access,
    route: RegistrationRoute | None,
    finish_lease: Callable[[CacheEntry], None],
) -> CacheEntry:
    """Register all chunks under `memory`. Return the new entry, which is also the entry of `pending`.

    The caller has read the key of `pending`, the allocation key of `memory`, before this call.

    Parameters
    ----------
    finish_lease : callable
        The function that a lease of the entry calls after it has removed its mark.

    Raises
    ------
    UsageError
        BUSY: the allocation key has changed. Nothing stays registered.
    """
    key = pending.key
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
        entry = CacheEntry(key, allocation, registration, finish_lease)
    except BaseException as error:
        try:
            allocation.close()
        except GdrkitError as close_error:
            error.add_note(f"then, while undoing: {close_error}")
        raise
    # No signal handler has run since the end of the `try` block. From now on, the caller deregisters the entry.
    pending.entry = entry
    return entry
