"""A pool of device memory of several sizes, which allocates memory on demand and frees idle memory.

The pool keeps allocations, not registrations. A :class:`~gdrkit.registration.RegionCache` keeps the registration of an
allocation until the allocation is freed. So if a program leases the memory of a pool from a cache, the memory is
allocated and registered only once, however often the program uses it. :class:`~gdrkit.registration.BufferPool` instead
has a fixed number of registered buffers of one size.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import forks
from gdrkit.errors import ApiError, ClosedResource, Reason, UsageError
from gdrkit.handles import Closeable, Handle, ReleaseStack
from gdrkit.text import format_count
from gdrkit.units import GPU_RDMA_PAGE_BYTES, MIB, align_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.buffers import Allocator, DeviceBuffer

__all__ = ["MemoryPool", "MemoryPoolStatistics", "PooledMemory", "block_bytes"]

# Above this size, there are also blocks of one and a half times a power of two.
_HALF_STEPS_ABOVE_BYTES = MIB


def block_bytes(length_bytes: int) -> int:
    """Return the size of the allocation for memory of this length, in bytes.

    The size is a power of two of at least 64 KiB. Above 1 MiB, it can also be one and a half times a power of two. The
    client library of usrbio uses the same sizes.
    """
    rounded_bytes = align_up(length_bytes, alignment_bytes=GPU_RDMA_PAGE_BYTES)
    power_of_two = 1 << (rounded_bytes - 1).bit_length()
    # Three quarters of this power of two are one and a half times the next smaller power of two.
    if rounded_bytes > _HALF_STEPS_ABOVE_BYTES and rounded_bytes <= power_of_two // 4 * 3:
        return power_of_two // 4 * 3
    return power_of_two


@dataclass(frozen=True, slots=True)
class MemoryPoolStatistics:
    """A snapshot of the counters of a pool.

    Attributes
    ----------
    idle_blocks, idle_bytes : int
        Number of allocations (blocks) that are not in use, and their size in bytes.
    in_use_blocks, in_use_bytes : int
        Number of allocations that are in use, and their size in bytes.
    hits, misses : int
        Number of requests that got an idle allocation, and number of requests that needed a new one.
    trimmed_blocks : int
        Number of idle allocations that were freed.
    """

    idle_blocks: int
    idle_bytes: int
    in_use_blocks: int
    in_use_bytes: int
    hits: int
    misses: int
    trimmed_blocks: int


class PooledMemory(Closeable):
    """Memory of a pool. :meth:`close` returns it to the pool.

    Attributes
    ----------
    memory : DeviceBuffer
        The whole allocation, which is at least as long as the requested memory. The pool owns it.
    length_bytes : int
        The requested length, in bytes. The requested memory is the beginning of the allocation.
    """

    def __init__(self, memory: DeviceBuffer, length_bytes: int, return_to_pool: Callable[[PooledMemory], None]) -> None:
        """Create the memory of one request. Callers use :meth:`MemoryPool.allocate` instead."""
        self.memory = memory
        self.length_bytes = length_bytes
        self._return_to_pool = return_to_pool

    def close(self) -> None:
        """Return the memory to the pool. A second close does nothing."""
        self._return_to_pool(self)


class MemoryPool(Closeable):
    """A pool of device memory of several sizes. It can be used by any number of threads.

    In a forked child the pool is closed and frees nothing: the memory belongs to the parent.

    Parameters
    ----------
    allocator : Allocator
        The allocator of the memory: a device, or a :class:`~gdrkit.host.HostAllocator`.
    idle_bytes_max : int
        Largest number of idle bytes. Above it, the pool frees the memory that has been idle for the longest time.
    idle_ms_max : float
        Time after which idle memory is freed, in milliseconds. The pool has no timer: the next call of
        :meth:`allocate` or a close of pooled memory checks the time.

    Raises
    ------
    UsageError
        A limit is negative.
    """

    def __init__(self, allocator: Allocator, *, idle_bytes_max: int = 256 * MIB, idle_ms_max: float = 10_000.0) -> None:
        if idle_bytes_max < 0 or idle_ms_max < 0:
            message = f"idle_bytes_max and idle_ms_max must be at least 0, not {idle_bytes_max} and {idle_ms_max}"
            raise UsageError(message)
        self._allocator = allocator
        self._idle_bytes_max = idle_bytes_max
        self._idle_s_max = idle_ms_max / 1000
        # The lock is reentrant, because a signal handler may use the pool while its thread has the lock.
        self._lock = threading.RLock()
        # For each idle allocation, the time at which it became idle. The allocation that is idle longest is the first.
        self._idle_since_s_by_memory: dict[DeviceBuffer, float] = {}
        self._in_use: dict[PooledMemory, None] = {}
        self._hit_count = self._miss_count = self._trimmed_block_count = 0
        self._is_copy_in_child = False  # In a forked child this is true, and close() frees nothing.
        self._is_closed = False
        self._handle = Handle("registration.memory_pool")
        forks.register(self)

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._is_closed

    def statistics(self) -> MemoryPoolStatistics:
        """Return a consistent snapshot of the counters."""
        with self._lock:
            return MemoryPoolStatistics(
                idle_blocks=len(self._idle_since_s_by_memory),
                idle_bytes=self._count_idle_bytes(),
                in_use_blocks=len(self._in_use),
                in_use_bytes=sum(pooled_memory.memory.length_bytes for pooled_memory in tuple(self._in_use)),
                hits=self._hit_count,
                misses=self._miss_count,
                trimmed_blocks=self._trimmed_block_count,
            )

    def allocate(self, length_bytes: int) -> PooledMemory:
        """Return memory of at least this length. Reused memory still contains the bytes of its previous user.

        Raises
        ------
        ApiError
            The allocator failed. If it was out of memory, the pool first freed all idle memory and tried again.
        UsageError
            The length is not above 0.
        ClosedResource
            The pool is closed.
        """
        if length_bytes <= 0:
            message = f"length_bytes must be at least 1, not {length_bytes}"
            raise UsageError(message)
        self._free_idle(self._idle_bytes_max, self._idle_s_max)
        with self._lock:
            self._check_open()
            memory = self._take_idle(length_bytes)
            if memory is not None:
                self._hit_count += 1
                return self._mark_in_use(memory, length_bytes)
        memory = self._allocate_block(block_bytes(length_bytes))
        with self._lock:
            if not self._is_closed:
                self._miss_count += 1
                return self._mark_in_use(memory, length_bytes)
        memory.close()
        raise ClosedResource(_POOL_NAME)

    def trim(self, *, idle_bytes_max: int = 0) -> None:
        """Free idle memory, the longest idle first, until at most `idle_bytes_max` bytes are idle."""
        self._free_idle(idle_bytes_max, None)

    def close(self) -> None:
        """Free all memory. A second close does nothing.

        Raises
        ------
        UsageError
            BUSY: memory is still in use. The pool stays open and usable.
        ApiError
            Memory could not be deregistered or freed. The pool is closed for new requests. Call close again to free
            this memory.
        """
        if self._is_copy_in_child:
            return
        with self._lock:
            if self._in_use:
                message = f"the pool still has {format_count(len(self._in_use), 'allocation')} in use"
                raise UsageError(message, reason=Reason.BUSY, what_to_do="close the memory first")
            self._is_closed = True
        self._free_idle(0, None)
        self._handle.release()

    def after_fork_in_child(self) -> None:
        """Mark the pool as closed in a forked child: the memory belongs to the parent."""
        self._is_copy_in_child = self._is_closed = True
        self._lock = threading.RLock()
        # The destructors of these objects would release memory of the parent, so the child keeps references to them.
        self._objects_of_parent = (self._idle_since_s_by_memory, self._in_use)
        self._idle_since_s_by_memory, self._in_use = {}, {}

    def _allocate_block(self, size_bytes: int) -> DeviceBuffer:
        try:
            return self._allocator.allocate(size_bytes)
        except ApiError as error:
            if error.reason is not Reason.OUT_OF_MEMORY or not self._idle_since_s_by_memory:
                raise
        self._free_idle(0, None)
        return self._allocator.allocate(size_bytes)

    def _take_idle(self, length_bytes: int) -> DeviceBuffer | None:
        """Return the smallest idle allocation that is long enough and at most twice as long as needed."""
        needed_bytes = align_up(length_bytes, alignment_bytes=GPU_RDMA_PAGE_BYTES)
        for memory in sorted(self._idle_since_s_by_memory, key=lambda candidate: candidate.length_bytes):
            # A signal handler may have taken the allocation meanwhile.
            if (
                needed_bytes <= memory.length_bytes <= 2 * needed_bytes
                and self._idle_since_s_by_memory.pop(memory, None) is not None
            ):
                return memory
        return None

    def _mark_in_use(self, memory: DeviceBuffer, length_bytes: int) -> PooledMemory:
        pooled_memory = PooledMemory(memory, length_bytes, self._take_back)
        self._in_use[pooled_memory] = None
        return pooled_memory

    def _take_back(self, pooled_memory: PooledMemory) -> None:
        with self._lock:
            if pooled_memory not in self._in_use:  # The memory was closed before.
                return
            del self._in_use[pooled_memory]
            self._idle_since_s_by_memory[pooled_memory.memory] = time.monotonic()
        self._free_idle(self._idle_bytes_max, self._idle_s_max)

    def _free_idle(self, idle_bytes_max: int, idle_s_max: float | None) -> None:
        """Free idle memory above `idle_bytes_max`, and memory that is idle for longer than `idle_s_max`.

        With `idle_s_max` None, the time is not checked.
        """
        free_actions = ReleaseStack()
        with self._lock:
            oldest_allowed_s = None if idle_s_max is None else time.monotonic() - idle_s_max
            for memory, idle_since_s in tuple(self._idle_since_s_by_memory.items()):
                is_expired = oldest_allowed_s is not None and idle_since_s < oldest_allowed_s
                if self._count_idle_bytes() <= idle_bytes_max and not is_expired:
                    break
                if self._idle_since_s_by_memory.pop(memory, None) is not None:  # Else a signal handler took the memory.
                    self._trimmed_block_count += 1
                    free_actions.push(lambda memory=memory: self._free(memory))  # type: ignore[misc]
        free_actions.run()

    def _free(self, memory: DeviceBuffer) -> None:
        """Free an allocation. If that fails, keep it for another attempt."""
        try:
            memory.close()
        except BaseException:
            with self._lock:
                self._trimmed_block_count -= 1
                self._idle_since_s_by_memory[memory] = time.monotonic()
            raise

    def _count_idle_bytes(self) -> int:
        return sum(memory.length_bytes for memory in tuple(self._idle_since_s_by_memory))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedResource(_POOL_NAME)


# The name of the pool in errors of ClosedResource.
_POOL_NAME = "memory pool"
