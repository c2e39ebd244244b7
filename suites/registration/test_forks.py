"""A child process that is forked while another thread of the parent holds a lock of gdrkit.

The child does not wait for the lock, and releases nothing that belongs to the parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.forked import get_lock, hold_in_another_thread, run_in_forked_child
from support.ledger import read_call_counts

from gdrkit import verbs
from gdrkit.errors import Api, ClosedResource
from gdrkit.gaudi import memory as gaudi_memory
from gdrkit.harness.needs import cuda, needs, software
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.host import HostMemory
from gdrkit.host import memory as host_memory
from gdrkit.registration import BufferPool, GdrManager, Placement, RegionCache, register
from gdrkit.units import KIB

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from support.memory_kinds import AnyAllocator

    from gdrkit.verbs import Nic


def test_cache_is_closed_in_a_forked_child(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache, cache.lease(memory) as lease:
        rkey = lease.remote(nic).rkey

        def check_cache_in_child() -> None:
            assert cache.closed
            with pytest.raises(ClosedResource):
                cache.lease(memory)
            assert cache.statistics().leases == 0
            lease.close()
            cache.close()

        with hold_in_another_thread(get_lock(cache)):
            assert run_in_forked_child(check_cache_in_child) == 0
        # The child has deregistered nothing of the parent.
        with cache.lease(memory) as new_lease:
            assert new_lease.remote(nic).rkey == rkey
        assert cache.statistics().registrations == 1


def test_invalidated_lease_stays_registered_when_a_child_ends_it(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        lease = cache.lease(memory)
        cache.invalidate(memory.address, length_bytes=memory.length_bytes)
        assert run_in_forked_child(lease.close) == 0
        assert cache.statistics().leases == 1
        lease.close()
        assert cache.statistics().leases == 0


def test_pool_is_closed_in_a_forked_child(allocator: AnyAllocator, nic: Nic) -> None:
    with BufferPool(allocator, [nic], buffer_bytes=4096, count=2) as pool, pool.allocate() as buffer:

        def check_pool_in_child() -> None:
            with pytest.raises(ClosedResource):
                pool.allocate()
            buffer.close()
            pool.close()

        with hold_in_another_thread(get_lock(pool)):
            assert run_in_forked_child(check_pool_in_child) == 0
        buffer.write(b"still registered")
        assert pool.statistics().free == 1


@needs(software(Api.VERBS), verbs_needs.nic())
def test_objects_of_verbs_stay_when_a_child_closes_them(nic: Nic) -> None:
    with (
        verbs.Nic.open(nic.name, port=nic.port.number) as parent_nic,
        HostMemory(4096) as memory,
        register(memory, [parent_nic]) as registration,
        parent_nic.completion_queue() as completion_queue,
        parent_nic.queue_pair(completion_queue) as queue_pair,
    ):

        def close_objects_in_child() -> None:
            call_counts_before = read_call_counts(Api.VERBS)
            for resource in (queue_pair, completion_queue, registration.region(parent_nic), registration, parent_nic):
                resource.close()
            assert read_call_counts(Api.VERBS) == call_counts_before
            # The child can close the objects that it created.
            verbs.Nic.open(nic.name, port=nic.port.number).close()
            call_counts_after = read_call_counts(Api.VERBS)
            assert call_counts_after["ibv_dealloc_pd"] == call_counts_before.get("ibv_dealloc_pd", 0) + 1

        assert run_in_forked_child(close_objects_in_child) == 0


@needs(software(Api.VERBS), software(Api.CUDA), verbs_needs.nic(), cuda.device())
def test_manager_is_closed_in_a_forked_child() -> None:
    with GdrManager() as manager:

        def close_manager_in_child() -> None:
            call_counts_before = read_call_counts(Api.VERBS), read_call_counts(Api.CUDA)
            manager.close()
            assert manager.closed
            with pytest.raises(ClosedResource):
                _ = manager.nics
            assert (read_call_counts(Api.VERBS), read_call_counts(Api.CUDA)) == call_counts_before

        assert run_in_forked_child(close_manager_in_child) == 0
        assert manager.state.available


def test_host_memory_works_in_a_forked_child() -> None:
    with hold_in_another_thread(get_lock(host_memory)):
        assert run_in_forked_child(lambda: HostMemory(4096).close()) == 0


@pytest.mark.parametrize("lock", [get_lock(gaudi_memory), get_lock(Placement())], ids=["gaudi", "placement"])
def test_locks_are_free_in_a_forked_child(lock: AbstractContextManager[object]) -> None:
    def acquire_lock() -> None:
        with lock:
            pass

    with hold_in_another_thread(lock):
        assert run_in_forked_child(acquire_lock) == 0
