"""A child process that is forked while another thread of the parent holds a lock of gdrkit.

The child does not wait for the lock, and releases nothing that belongs to the parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from support.ledger import calls

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
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from support.memory_kinds import AnyAllocator

    from gdrkit.verbs import Nic


def lock_of(owner: Any) -> AbstractContextManager[object]:  # noqa: ANN401 - a module, or an object of any class.
    """Return the lock of an object or a module of gdrkit, which another thread holds during the fork."""
    lock: AbstractContextManager[object] = owner._lock  # noqa: SLF001 - no public call holds the lock long enough.
    return lock


@contextlib.contextmanager
def held_by_another_thread(lock: AbstractContextManager[object]) -> Iterator[None]:
    """Let another thread hold the lock inside the block."""
    is_held, may_release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_held.wait(30)
        yield
    finally:
        may_release.set()
        thread.join(30)


def wait_status_of_child(work: Callable[[], None]) -> int:
    """Fork, run `work` in the child, and return its wait status. SIGALRM ends a child that takes too long."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            work()
        except BaseException:  # noqa: BLE001 - the child never returns into the run of the parent.
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_cache_is_closed_in_a_forked_child(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache, cache.lease(memory) as lease:
        key = lease.remote(nic).rkey

        def child() -> None:
            assert cache.closed
            with pytest.raises(ClosedResource):
                cache.lease(memory)
            assert cache.statistics().leases == 0
            lease.close()
            cache.close()

        with held_by_another_thread(lock_of(cache)):
            assert wait_status_of_child(child) == 0
        # Nothing of the parent was deregistered.
        with cache.lease(memory) as new_lease:
            assert new_lease.remote(nic).rkey == key
        assert cache.statistics().registrations == 1


def test_invalidated_lease_stays_registered_when_a_child_ends_it(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        lease = cache.lease(memory)
        cache.invalidate(memory.address, length_bytes=memory.length_bytes)
        assert wait_status_of_child(lease.close) == 0
        assert cache.statistics().leases == 1
        lease.close()
        assert cache.statistics().leases == 0


def test_pool_is_closed_in_a_forked_child(allocator: AnyAllocator, nic: Nic) -> None:
    with BufferPool(allocator, [nic], buffer_bytes=4096, count=2) as pool, pool.allocate() as buffer:

        def child() -> None:
            with pytest.raises(ClosedResource):
                pool.allocate()
            buffer.close()
            pool.close()

        with held_by_another_thread(lock_of(pool)):
            assert wait_status_of_child(child) == 0
        buffer.write(b"still registered")
        assert pool.statistics().free == 1


@needs(software(Api.VERBS), verbs_needs.nic())
def test_objects_of_verbs_stay_when_a_child_closes_them(nic: Nic) -> None:
    with (
        verbs.Nic.open(nic.name, port=nic.port.number) as parent_nic,
        HostMemory(4096) as memory,
        register(memory, [parent_nic]) as registration,
        parent_nic.completion_queue() as queue,
        parent_nic.queue_pair(queue) as pair,
    ):

        def child() -> None:
            calls_before = calls(Api.VERBS)
            for resource in (pair, queue, registration.region(parent_nic), registration, parent_nic):
                resource.close()
            assert calls(Api.VERBS) == calls_before
            # The child can close the objects that it created.
            verbs.Nic.open(nic.name, port=nic.port.number).close()
            calls_after = calls(Api.VERBS)
            assert calls_after["ibv_dealloc_pd"] == calls_before.get("ibv_dealloc_pd", 0) + 1

        assert wait_status_of_child(child) == 0


@needs(software(Api.VERBS), software(Api.CUDA), verbs_needs.nic(), cuda.device())
def test_manager_is_closed_in_a_forked_child() -> None:
    with GdrManager() as manager:

        def child() -> None:
            calls_before = calls(Api.VERBS), calls(Api.CUDA)
            manager.close()
            assert manager.closed
            with pytest.raises(ClosedResource):
                _ = manager.nics
            assert (calls(Api.VERBS), calls(Api.CUDA)) == calls_before

        assert wait_status_of_child(child) == 0
        assert manager.state.available


def test_host_memory_works_in_a_forked_child() -> None:
    with held_by_another_thread(lock_of(host_memory)):
        assert wait_status_of_child(lambda: HostMemory(4096).close()) == 0


@pytest.mark.parametrize("lock", [lock_of(gaudi_memory), lock_of(Placement())], ids=["gaudi", "placement"])
def test_locks_are_free_in_a_forked_child(lock: AbstractContextManager[object]) -> None:
    def child() -> None:
        with lock:
            pass

    with held_by_another_thread(lock):
        assert wait_status_of_child(child) == 0
