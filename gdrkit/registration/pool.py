"""A pool of buffers that are registered before they are needed.

All buffers of a pool share one allocation and one registration, so allocating a buffer calls no API. Waiting threads
are served in the order in which they arrived.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit import forks
from gdrkit.buffers import check_range
from gdrkit.errors import ClosedResource, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.registration.policy import TRANSFER_ACCESS, check_nics, register
from gdrkit.text import format_count
from gdrkit.units import GPU_RDMA_PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.buffers import Allocator, DeviceBuffer
    from gdrkit.registration.policy import Registration
    from gdrkit.verbs import Access, Nic, RemoteRange
    from gdrkit.verbs.region import ScatterGatherElement

__all__ = ["BufferPool", "PoolStatistics", "RdmaBuffer"]


class RdmaBuffer:
    """Registered memory, or a part of it.

    :meth:`slice` returns a view of a part of the buffer. Closing the buffer also closes its slices.

    Attributes
    ----------
    length_bytes : int
        Size in bytes.
    """

    def __init__(
        self,
        memory: DeviceBuffer,
        registration: Registration,
        *,
        offset_bytes: int = 0,
        length_bytes: int | None = None,
        return_to_pool: Callable[[RdmaBuffer], None] | None = None,
    ) -> None:
        length_bytes = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
        self.length_bytes = length_bytes
        self._memory = memory
        self._registration = registration
        self._offset_bytes = offset_bytes
        self._return_to_pool = return_to_pool
        self._parent: RdmaBuffer | None = None
        self._is_closed = False

    @property
    def closed(self) -> bool:
        """Whether the buffer or its registration was closed. A slice is also closed if its buffer was closed."""
        return self._is_closed or self._registration.closed or (self._parent is not None and self._parent.closed)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        self._check_open()
        return self._memory.address + self._offset_bytes

    def slice(self, *, offset_bytes: int, length_bytes: int | None = None) -> RdmaBuffer:
        """Return a view of a part of the buffer, of at least 1 byte. A length of None means up to the end."""
        self._check_open()
        memory_offset_bytes, length_bytes = self._resolve_part(offset_bytes, length_bytes)
        if length_bytes == 0:
            message = "a slice must have at least 1 byte"
            raise UsageError(message)
        view = RdmaBuffer(self._memory, self._registration, offset_bytes=memory_offset_bytes, length_bytes=length_bytes)
        view._parent = self
        return view

    def remote(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """Return the address and the key by which a peer can access a part of the buffer through `nic`.

        A length of None means up to the end of the buffer.
        """
        self._check_open()
        memory_offset_bytes, length_bytes = self._resolve_part(offset_bytes, length_bytes)
        return self._registration.remote(nic, offset_bytes=memory_offset_bytes, length_bytes=length_bytes)

    def element(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> ScatterGatherElement:
        """Return a scatter/gather element for a part of the buffer, for local requests.

        A length of None means up to the end of the buffer.
        """
        self._check_open()
        memory_offset_bytes, length_bytes = self._resolve_part(offset_bytes, length_bytes)
        return self._registration.region(nic).element(offset_bytes=memory_offset_bytes, length_bytes=length_bytes)

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Copy a part of the buffer to the host and return it. A length of None means up to the end."""
        self._check_open()
        memory_offset_bytes, length_bytes = self._resolve_part(offset_bytes, length_bytes)
        return self._memory.read(offset_bytes=memory_offset_bytes, length_bytes=length_bytes)

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Copy bytes of the host into the buffer."""
        self._check_open()
        memory_offset_bytes, _length_bytes = self._resolve_part(offset_bytes, memoryview(data).nbytes)
        self._memory.write(data, offset_bytes=memory_offset_bytes)

    def close(self) -> None:
        """Return the buffer to its pool. A second close does nothing. Closing a slice only makes the slice unusable."""
        if not self._is_closed:
            self._is_closed = True
            if self._return_to_pool is not None:
                self._return_to_pool(self)

    def _check_open(self) -> None:
        if self.closed:
            resource = "RDMA buffer"
            raise ClosedResource(resource)

    def _resolve_part(self, offset_bytes: int, length_bytes: int | None) -> tuple[int, int]:
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return self._offset_bytes + offset_bytes, length_bytes

    def __len__(self) -> int:
        return self.length_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RdmaBuffer({'closed' if self.closed else f'{self.address:#x}'}, length_bytes={self.length_bytes})"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot of the counters of a pool.

    Attributes
    ----------
    buffers, free : int
        Number of all buffers, and number of buffers that are not in use.
    waiting : int
        Number of threads that wait for a buffer.
    allocations, timeouts : int
        Number of successful allocations, and number of allocations that timed out.
    waits : int
        Number of successful allocations that had to wait.
    """

    buffers: int
    free: int
    waiting: int
    allocations: int
    timeouts: int
    waits: int


class BufferPool:
    """A pool of buffers of one size, registered with NICs.

    In a forked child the pool is closed and frees nothing: the buffers belong to the parent.

    Parameters
    ----------
    allocator : Allocator
        The allocator of the memory: a :class:`~gdrkit.cuda.Device`, or a :class:`~gdrkit.host.HostAllocator`.
    nics : sequence of Nic
        The NICs to register with. If the registration with one NIC fails, the constructor raises.
    buffer_bytes : int
        Size of each buffer in bytes, above 0.
    count : int
        Number of buffers, above 0.
    access : Access
        Access rights of the keys.

    Raises
    ------
    RegistrationFailed, ApiError
        The allocation failed (ApiError), or the registration failed; see :func:`~gdrkit.registration.register`.
        Nothing stays allocated or registered.
    UsageError
        `buffer_bytes` or `count` is not above 0, or `nics` is empty, has a NIC twice or has an item that is not a Nic.
    """

    def __init__(
        self,
        allocator: Allocator,
        nics: Sequence[Nic],
        *,
        buffer_bytes: int,
        count: int,
        access: Access = TRANSFER_ACCESS,
    ) -> None:
        if buffer_bytes <= 0 or count <= 0:
            message = f"buffer_bytes and count must be above 0, not {buffer_bytes} and {count}"
            raise UsageError(message)
        nics = check_nics(nics)
        self.buffer_bytes = buffer_bytes
        self.count = count
        # Each buffer begins at a page boundary, so that two buffers never share a page that a NIC pins.
        stride_bytes = align_up(buffer_bytes, alignment_bytes=GPU_RDMA_PAGE_BYTES)
        self._memory = allocator.allocate(stride_bytes * count)
        try:
            self._registration = register(self._memory, nics, access=access)
        except BaseException:
            self._memory.close()
            raise
        # The lock is reentrant, because a signal handler may use the pool while its thread has the lock.
        self._lock = threading.RLock()
        # The offsets of the free buffers in the memory.
        self._free_offsets = deque(index * stride_bytes for index in range(count))
        self._waiters: deque[_Waiter] = deque()  # The threads that wait for a buffer, the longest wait first.
        self._in_use: set[RdmaBuffer] = set()
        self._allocation_count = self._timeout_count = self._wait_count = 0
        self._is_closed = False
        # The memory calls _raise_if_in_use before it is freed. So it cannot be freed while a buffer is in use.
        self._memory.before_release(self._raise_if_in_use)
        self._handle = Handle("registration.pool")
        self._is_copy_in_child = False  # In a forked child this is true, and close() frees nothing.
        forks.register(self)

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._is_closed

    def statistics(self) -> PoolStatistics:
        """Return a consistent snapshot of the counters."""
        with self._lock:
            return PoolStatistics(
                buffers=self.count,
                free=len(self._free_offsets),
                waiting=len(self._waiters),
                allocations=self._allocation_count,
                timeouts=self._timeout_count,
                waits=self._wait_count,
            )

    def allocate(self, *, timeout_ms: float | None = None) -> RdmaBuffer:
        """Return a buffer. A reused buffer still contains the bytes of its previous user.

        Parameters
        ----------
        timeout_ms : float or None
            Longest wait until another thread closes a buffer, in milliseconds. With 0, do not wait. With None, the
            wait has no limit. The thread that waits longest is served first.

        Raises
        ------
        UsageError
            TIMEOUT: no buffer was closed in time.
        ClosedResource
            The pool is closed.
        """
        with self._lock:
            self._check_open()
            if self._free_offsets and not self._waiters:
                return self._make_buffer(self._free_offsets.popleft())
            waiter = _Waiter()
            self._waiters.append(waiter)
        try:
            waiter.wait_for_buffer(None if timeout_ms is None else timeout_ms / 1000)
        except BaseException:
            self._leave_queue(waiter)
            raise
        with self._lock:
            if waiter.offset_bytes is not None:
                self._wait_count += 1
                return self._make_buffer(waiter.offset_bytes)
            self._waiters.remove(waiter)
            self._timeout_count += 1
        message = f"none of the {self.count} buffers of the pool became free within {timeout_ms} ms"
        raise UsageError(message, reason=Reason.TIMEOUT, what_to_do="close buffers sooner, or create a larger pool")

    def close(self) -> None:
        """Deregister and free the memory. A second close does nothing.

        Raises
        ------
        UsageError
            BUSY: a buffer is still in use. The pool stays open and usable.
        """
        if self._is_copy_in_child:
            return
        with self._lock:
            self._is_closed = True  # This comes first, so that no signal handler allocates a buffer after the check.
            try:
                self._raise_if_in_use()
            except UsageError:
                self._is_closed = False
                raise
        if not self._memory.closed:
            self._memory.close()
            self._handle.release()

    def after_fork_in_child(self) -> None:
        """Mark the pool as closed in a forked child: the memory and its registration belong to the parent."""
        self._is_copy_in_child = self._is_closed = True
        self._lock = threading.RLock()
        self._waiters = deque()
        self._in_use = set()

    def _raise_if_in_use(self) -> None:
        used_count = self.count - len(self._free_offsets)
        if used_count:
            message = f"the pool still has {format_count(used_count, 'buffer')} in use"
            raise UsageError(message, reason=Reason.BUSY, what_to_do="close the buffers first")

    def _make_buffer(self, offset_bytes: int) -> RdmaBuffer:
        self._allocation_count += 1
        buffer = RdmaBuffer(
            self._memory,
            self._registration,
            offset_bytes=offset_bytes,
            length_bytes=self.buffer_bytes,
            return_to_pool=self._take_back,
        )
        self._in_use.add(buffer)
        return buffer

    def _take_back(self, buffer: RdmaBuffer) -> None:
        with self._lock:
            if buffer in self._in_use:  # Otherwise another thread has closed the same buffer.
                self._in_use.remove(buffer)
                self._assign_or_free(buffer._offset_bytes)  # noqa: SLF001 - the pool made it.

    def _assign_or_free(self, offset_bytes: int) -> None:
        """Assign a buffer to the thread that waits longest, or make it free if no thread waits."""
        if self._waiters:
            waiter = self._waiters.popleft()
            waiter.offset_bytes = offset_bytes
            waiter.assignment_lock.release()
        else:
            self._free_offsets.append(offset_bytes)

    def _leave_queue(self, waiter: _Waiter) -> None:
        """Remove a waiter whose wait was interrupted. If it has a buffer, assign the buffer again."""
        with self._lock:
            if waiter.offset_bytes is None:
                self._waiters.remove(waiter)
            else:
                self._assign_or_free(waiter.offset_bytes)

    def _check_open(self) -> None:
        if self._is_closed:
            resource = "buffer pool"
            raise ClosedResource(resource)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Waiter:
    """One waiting thread in the queue. A closed buffer is assigned to the first waiter."""

    __slots__ = ("assignment_lock", "offset_bytes")

    def __init__(self) -> None:
        # This lock is released when a buffer is assigned, possibly by a signal handler of the waiting thread. So its
        # methods must be C code. A threading.Event would not do: its methods are Python code that takes another lock,
        # and a signal handler that interrupts this code would wait for that lock forever.
        self.assignment_lock = threading.Lock()
        self.assignment_lock.acquire()
        self.offset_bytes: int | None = None  # The offset of the assigned buffer; None before.

    def wait_for_buffer(self, timeout_s: float | None) -> None:
        """Wait until a buffer is assigned or the time is over."""
        self.assignment_lock.acquire(
            timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        )
