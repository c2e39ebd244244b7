"""Registrations and deregistrations of a region cache that are in progress, and the lock of the cache.

At most one registration of an allocation is pending. If several threads look up the same allocation, one thread
registers it, and the others wait for that thread.

An entry that is leased when it is unlinked (lookups no longer find it) stays registered until its last lease ends. The
thread that ends that lease deregisters the entry. Until then, gdrkit refuses to free the memory and to close
the cache.

A signal handler or a finalizer may use the cache although it has interrupted a method of the cache. If the interrupted
call does not have the lock, the handler can call all methods, but a call that would have to wait for the interrupted
call fails. If the interrupted call has the lock, the handler can lease cached memory and close leases. Calls that would
add or remove entries fail with UsageError(BUSY).
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
# The longest time in seconds after which a waiting thread checks its condition again, if no thread notifies it earlier.
_RECHECK_S = 0.5
# The advice in the errors that a signal handler gets.
_RETRY_ADVICE = "try again after the signal handler or the finalizer"


class CacheLock:
    """The lock of a cache, with a wait for changes by other threads.

    Attributes
    ----------
    lock : RLock
        The lock. A signal handler can acquire it again if its own thread has it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)

    def raise_if_lock_held(self, action: str) -> None:
        """Raise UsageError(BUSY) if this thread has the lock.

        The caller is then in a signal handler or a finalizer. The call that it interrupted is changing the cache.
        """
        if self.is_held_by_this_thread():
            message = f"cannot {action}, because the interrupted call is changing the region cache"
            raise UsageError(message, reason=Reason.BUSY, what_to_do=_RETRY_ADVICE)

    def is_held_by_this_thread(self) -> bool:
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
        """Wait until `is_done` returns a true value. Return False after `timeout_ms`.

        This requires the lock, which is released while the thread waits.
        """
        deadline_s = math.inf if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while not is_done():
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return False
            # A signal handler of this thread can end a lease between the check and the wait. It cannot notify the
            # thread then, so the thread checks again after _RECHECK_S.
            self._condition.wait(min(remaining_s, _RECHECK_S))
        return True


class PendingDeregistrations:
    """The unlinked entries of a cache: leased, to be deregistered, or not deregistered because libibverbs failed.

    Attributes
    ----------
    entries : set of CacheEntry
        The entries. Access to them requires the lock of the cache.
    """

    def __init__(self, cache_lock: CacheLock) -> None:
        self._cache_lock = cache_lock
        self.entries: set[CacheEntry] = set()

    @property
    def failed_count(self) -> int:
        """The number of entries that libibverbs failed to deregister."""
        return sum(entry.deregistration_failed for entry in self.entries)

    @property
    def deregistering_thread_ids(self) -> set[int]:
        """Identifiers of the threads that are deregistering entries."""
        return {entry.deregistering_thread_id for entry in self.entries} - {0}

    def find_overlapping(self, begin: int, end: int) -> list[CacheEntry]:
        """Return the entries that overlap [begin, end). This requires the lock."""
        return [entry for entry in self.entries if overlaps(entry.key, begin, end)]

    def deregister(
        self, begin: int = 0, end: int = _ADDRESS_END, *, raise_errors: bool, retry_failed: bool = False
    ) -> None:
        """Deregister the entries that overlap [begin, end) and that are neither leased nor being deregistered.

        With `retry_failed`, this includes entries that libibverbs failed to deregister before. Lookups pass False as
        `raise_errors`, because they must not raise the errors of unrelated entries.
        """
        first_error: GdrkitError | None = None
        with self._cache_lock.lock:
            entries = [
                entry
                for entry in self.find_overlapping(begin, end)
                if entry.can_be_deregistered and (retry_failed or not entry.deregistration_failed)
            ]
        for entry in entries:
            try:
                self._deregister_entry(entry)
            except GdrkitError as error:
                if first_error is None:
                    first_error = error
                else:
                    first_error.add_note(f"another deregistration failed too: {error}")
        if first_error is not None and raise_errors:
            raise first_error

    def deregister_and_wait(self, begin: int = 0, end: int = _ADDRESS_END) -> None:
        """Deregister the unleased entries that overlap [begin, end), and wait for threads that deregister some of them.

        Entries that libibverbs failed to deregister before are tried again.

        Raises
        ------
        ApiError
            An entry could not be deregistered (the error of the first one).
        UsageError
            BUSY: the caller is a signal handler, and the interrupted call is deregistering entries.
        """

        def are_deregistrations_done() -> bool:
            return not any(entry.deregistering_thread_id for entry in self.find_overlapping(begin, end))

        must_repeat = True
        while must_repeat:
            self.deregister(begin, end, raise_errors=True, retry_failed=True)
            with self._cache_lock.lock:
                if not are_deregistrations_done() and threading.get_ident() in self.deregistering_thread_ids:
                    message = f"the interrupted call is deregistering memory in [{begin:#x}, {end:#x})"
                    raise UsageError(message, reason=Reason.BUSY, what_to_do=_RETRY_ADVICE)
                self._cache_lock.wait_for(are_deregistrations_done)
                # A deregistration in another thread may have failed, or a lease may have ended without a
                # deregistration.
                must_repeat = any(entry.can_be_deregistered for entry in self.find_overlapping(begin, end))

    def _deregister_entry(self, entry: CacheEntry) -> None:
        """Deregister an entry by closing its memory, unless it is leased or another thread deregisters it."""
        thread_id = threading.get_ident()
        is_claimed = False
        try:
            with self._cache_lock.lock:
                if entry not in self.entries or not entry.can_be_deregistered:
                    return
                entry.deregistering_thread_id, is_claimed = thread_id, True
            entry.memory.close()
        except GdrkitError:
            entry.deregistration_failed = True
            raise
        finally:
            # If a signal handler raised an exception, the memory may still be open. Then the next call tries again.
            if is_claimed:
                entry.deregistering_thread_id = 0
                with self._cache_lock.lock:
                    if entry.memory.closed:
                        self.entries.discard(entry)
                    self._cache_lock.notify_all()


class PendingRegistration:
    """One pending registration, with the number of threads that wait for it.

    When it is done, either `entry` or `error` has the result, or neither if the registering thread was interrupted.
    """

    __slots__ = ("entry", "error", "is_done", "is_unlinked", "key", "registering_thread_id", "waiter_count")

    def __init__(self, key: AllocationKey) -> None:
        self.key = key
        self.registering_thread_id = threading.get_ident()
        self.entry: CacheEntry | None = None
        self.error: GdrkitError | None = None
        self.is_done = False
        self.is_unlinked = False  # Whether new lookups can no longer join it, because its range was invalidated.
        self.waiter_count = 0


class PendingRegistrations:
    """The pending registrations of a cache.

    Every member except :meth:`abandon` and :meth:`wait_for` requires the lock of the cache.
    """

    def __init__(self, cache_lock: CacheLock, deregistrations: PendingDeregistrations) -> None:
        self._cache_lock = cache_lock
        self._deregistrations = deregistrations
        self._joinable_by_key: dict[AllocationKey, PendingRegistration] = {}
        self._pending: set[PendingRegistration] = set()  # The registrations in _joinable_by_key, and the unlinked ones.

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def waiter_count(self) -> int:
        """The number of threads that wait for a pending registration."""
        return sum(pending.waiter_count for pending in self._pending)

    def find(self, key: AllocationKey) -> PendingRegistration | None:
        """Return the pending registration of `key` that a new lookup may join, or None."""
        return self._joinable_by_key.get(key)

    def start(self, pending: PendingRegistration) -> None:
        """Add a registration. No registration that lookups of its key can join may be pending."""
        self._pending.add(pending)
        self._joinable_by_key[pending.key] = pending

    def complete(self, pending: PendingRegistration) -> None:
        """Remove a registration that has its entry or its error, or was interrupted, and wake the waiting threads."""
        self._pending.discard(pending)
        if self._joinable_by_key.get(pending.key) is pending:
            self._joinable_by_key.pop(pending.key)
        self._cache_lock.notify_all()
        pending.is_done = True

    def abandon(self, pending: PendingRegistration, error: BaseException) -> None:
        """End a registration that failed, or that the exception of a signal handler has interrupted.

        If the registration was already complete, this ends the lease of the calling thread. Then it deregisters all
        unlinked entries that have no lease any more.
        """
        # Every waiting thread raises a copy of the error, because one error object would collect the tracebacks of all
        # threads. Only errors of gdrkit are passed on. After any other exception, the waiting threads search the index
        # again.
        shared_error = error.clone() if isinstance(error, GdrkitError) else None
        with self._cache_lock.lock:
            entry, was_complete = pending.entry, pending.is_done
            if not was_complete:
                if entry is not None:
                    self._deregistrations.entries.add(entry)
                    entry.lease_marks.clear()
                pending.entry, pending.error = None, shared_error
                self.complete(pending)
        if entry is not None:
            if was_complete:
                entry.release_lease()
            self._deregistrations.deregister(raise_errors=False)

    def wait_for(self, pending: PendingRegistration) -> CacheEntry | None:
        """Wait for a registration that the caller has joined. Return its entry, or None if it was interrupted."""
        try:
            with self._cache_lock.lock:
                self._cache_lock.wait_for(lambda: pending.is_done)
        except BaseException:
            # A signal handler raised it. If the registration is complete, this thread has a lease, which must end.
            with self._cache_lock.lock:
                pending.waiter_count -= 1
                entry = pending.entry if pending.is_done else None
            if entry is not None:
                entry.release_lease()
            raise
        if pending.error is not None:
            raise pending.error.clone()
        return pending.entry

    def raise_if_wait_would_deadlock(self, action: str) -> None:
        """Raise UsageError(BUSY) if this thread is registering or deregistering memory.

        The caller is then in a signal handler or a finalizer. It must not wait for the call that it interrupted.
        """
        registering_thread_ids = {pending.registering_thread_id for pending in self._pending}
        if threading.get_ident() in registering_thread_ids | self._deregistrations.deregistering_thread_ids:
            message = f"cannot {action}, because the interrupted call is registering or deregistering memory"
            raise UsageError(message, reason=Reason.BUSY, what_to_do=_RETRY_ADVICE)

    def unlink(self, begin: int, end: int) -> int:
        """Stop new lookups from joining the pending registrations that overlap [begin, end). Return their number."""
        overlapping_registrations = [
            pending for key, pending in self._joinable_by_key.items() if overlaps(key, begin, end)
        ]
        for pending in overlapping_registrations:
            pending.is_unlinked = True
            del self._joinable_by_key[pending.key]
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
    """Register the allocation that contains `memory`, and return the new entry, which is also stored in `pending`.

    The key of `pending` is the allocation key that the caller has read from `memory` before this call.

    Parameters
    ----------
    finish_lease : callable
        The function that a lease of the entry calls after it has removed its item from `CacheEntry.lease_marks`.

    Raises
    ------
    UsageError
        BUSY: the allocation key has changed. Nothing stays registered.
    """
    key = pending.key
    allocation = memory.allocation()
    try:
        registration = register(allocation, nics, access=access, route=route)
        # The memory may have been freed or remapped since the caller read the key. If the chunks of the key still exist
        # now, they are the registered memory.
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
            error.add_note(f"then the clean-up failed too: {close_error}")
        raise
    # CPython runs no signal handler between the end of the `try` block and this assignment, so no exception can lose
    # the entry. From now on, the caller deregisters it.
    pending.entry = entry
    return entry
