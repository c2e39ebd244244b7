"""A pool of memory blocks allocates and reuses blocks and frees idle ones, and a cache registers each block once."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.memory_kinds import connect_peer_queue_pair

from gdrkit import handles, pattern
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import cuda, needs, software
from gdrkit.registration import MemoryPool, RegionCache
from gdrkit.registration.memory_pool import block_bytes
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from support.memory_kinds import AnyAllocator

    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic


@pytest.mark.parametrize(
    ("length_bytes", "expected_block_bytes"),
    [
        (1, 64 * KIB),
        (64 * KIB, 64 * KIB),
        (64 * KIB + 1, 128 * KIB),
        (600 * KIB, MIB),
        (MIB, MIB),
        (MIB + 1, 3 * MIB // 2),
        (3 * MIB // 2 + 1, 2 * MIB),
        (5 * MIB, 6 * MIB),
    ],
)
def test_blocks_grow_in_powers_of_two_then_in_halves(length_bytes: int, expected_block_bytes: int) -> None:
    assert block_bytes(length_bytes) == expected_block_bytes


def test_memory_of_the_pool_is_registered_once(allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int) -> None:
    generator = random.Random(seed)
    with MemoryPool(allocator) as pool, RegionCache([nic]) as cache, connect_peer_queue_pair(nic, peer) as peer_pair:
        for round_index in range(60):
            # The length is between 4 KiB and 2 MiB.
            length_bytes = int(4 * KIB * 2 ** generator.uniform(0, 9))
            with (
                pool.allocate(length_bytes) as pooled_memory,
                cache.lease(pooled_memory.memory, length_bytes=length_bytes) as lease,
            ):
                peer_pair.write(lease.remote(nic), seed=seed + round_index).expect(Status.SUCCESS)
                pattern.check(
                    pooled_memory.memory.read(offset_bytes=0, length_bytes=length_bytes), seed=seed + round_index
                )
        statistics = pool.statistics()
        assert statistics.hits + statistics.misses == 60
        # The pool has at most one block of each block size. Every block was registered once.
        assert statistics.misses == statistics.idle_blocks == cache.statistics().registrations <= 10
        pool.trim()
        assert pool.statistics().idle_bytes == cache.statistics().registered_bytes == 0
        assert pool.statistics().trimmed_blocks == statistics.idle_blocks


@needs(cuda.device())
def test_limits_free_the_longest_idle(device: Device) -> None:
    with MemoryPool(device, idle_bytes_max=2 * MIB, idle_ms_max=60_000) as pool:
        pooled_memories = [pool.allocate(length_bytes) for length_bytes in (MIB, 512 * KIB, MIB)]
        for pooled_memory in pooled_memories:
            pooled_memory.close()
        # Three idle blocks exceed 2 MiB, so the pool has freed the first one, which was idle for the longest time.
        statistics = pool.statistics()
        assert (statistics.idle_blocks, statistics.idle_bytes, statistics.trimmed_blocks) == (2, 3 * MIB // 2, 1)
        assert pool.allocate(512 * KIB).memory is pooled_memories[1].memory
        with pytest.raises(UsageError) as error_info:
            pool.close()
        assert error_info.value.reason is Reason.BUSY
        (memory_in_use,) = pool._in_use  # noqa: SLF001 - the case dropped the only reference.
        memory_in_use.close()
    with MemoryPool(device, idle_ms_max=0) as pool:
        pool.allocate(1).close()
        # This allocation frees the idle block, which was idle for longer than 0 ms.
        pool.allocate(MIB).close()
        assert pool.statistics().idle_blocks <= 1


def test_leased_memory_is_not_freed_by_trimming(allocator: AnyAllocator, nic: Nic) -> None:
    with RegionCache([nic]) as cache, contextlib.ExitStack() as stack:
        pool = stack.enter_context(MemoryPool(allocator))
        pooled_memory = stack.enter_context(pool.allocate(MIB))
        lease = cache.lease(pooled_memory.memory)
        pooled_memory.close()
        with pytest.raises(UsageError) as error_info:
            pool.trim()
        assert error_info.value.reason is Reason.BUSY
        assert pool.statistics().idle_blocks == 1
        lease.close()


@needs(cuda.device())
def test_threads_never_share_memory(device: Device) -> None:
    addresses_in_use: set[int] = set()
    lock = threading.Lock()

    def allocate_repeatedly(thread_index: int) -> None:
        for round_index in range(50):
            # The length is 64, 128 or 256 KiB.
            with pool.allocate((64 << (round_index + thread_index) % 3) * KIB) as pooled_memory:
                with lock:
                    assert pooled_memory.memory.address not in addresses_in_use
                    addresses_in_use.add(pooled_memory.memory.address)
                with lock:
                    addresses_in_use.remove(pooled_memory.memory.address)

    with MemoryPool(device) as pool, ThreadPoolExecutor(8) as executor:
        for future in [executor.submit(allocate_repeatedly, thread_index) for thread_index in range(8)]:
            future.result()
        assert pool.statistics().in_use_blocks == 0
        # Each of the 8 threads used 3 block sizes.
        assert pool.statistics().idle_blocks <= 24


@needs(cuda.device(), software(Api.CUDA))
def test_idle_memory_is_freed_if_the_device_is_full(device: Device) -> None:
    with MemoryPool(device) as pool:
        pool.allocate(MIB).close()
        # The first allocation fails with CUDA_ERROR_OUT_OF_MEMORY (2). The pool frees its idle block and tries again.
        with inject_faults(Api.CUDA, "cuMemAlloc_v2 call=1 status=2"), pool.allocate(8 * MIB):
            assert pool.statistics().trimmed_blocks == 1
        pool.trim()
        with inject_faults(Api.CUDA, "cuMemAlloc_v2 call=1 status=2"), pytest.raises(ApiError) as error_info:
            pool.allocate(8 * MIB)
        assert error_info.value.reason is Reason.OUT_OF_MEMORY


@needs(cuda.device())
def test_closed_or_inherited_pool_is_refused(device: Device) -> None:
    with MemoryPool(device) as pool:
        pool.allocate(MIB).close()
        child_pid = os.fork()
        if child_pid == 0:
            os._exit(0 if pool.closed and pool.statistics().idle_blocks == 0 else 1)
        assert os.waitpid(child_pid, 0)[1] == 0
        for length_bytes in (0, -1):
            with pytest.raises(UsageError):
                pool.allocate(length_bytes)
    assert "registration.memory_pool" not in handles.live()
    with pytest.raises(ClosedResource):
        pool.allocate(1)
    with pytest.raises(UsageError):
        MemoryPool(device, idle_bytes_max=-1)
