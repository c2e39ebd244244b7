"""The last lease of an invalidated cache entry deregisters the memory when it ends.

In the cases, other threads invalidate or evict the entry, free its memory or close the cache while a lease or a
deregistration ends.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.ledger import read_call_counts, read_peak_delayed_calls

from gdrkit.errors import Api, ApiError, Reason, UsageError
from gdrkit.harness.needs import needs, software
from gdrkit.registration import RegionCache
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.memory_kinds import AnyAllocator

    from gdrkit.verbs import Nic

pytestmark = needs(software(Api.VERBS))

DEREGISTRATION_FUNCTION = "ibv_dereg_mr"


def test_leases_ending_during_invalidate_deregister_once(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        for round_index in range(200):
            leases = [cache.lease(memory) for _ in range(3)]
            call_count_before = read_call_counts(Api.VERBS).get(DEREGISTRATION_FUNCTION, 0)
            barrier = threading.Barrier(4)

            def run_at_once(action: Callable[[], object], barrier: threading.Barrier = barrier) -> None:
                barrier.wait(30)
                action()

            actions: list[Callable[[], object]] = [lease.close for lease in leases]
            # The thread that invalidates is not the same in all rounds.
            actions.insert(round_index % 4, lambda: cache.invalidate(memory.address, length_bytes=1))
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(run_at_once, actions))
            assert read_call_counts(Api.VERBS).get(DEREGISTRATION_FUNCTION, 0) == call_count_before + 1
            statistics = cache.statistics()
            assert (
                statistics.leases,
                statistics.regions,
                statistics.registered_bytes,
                statistics.not_deregistered,
            ) == (0, 0, 0, 0)


@pytest.mark.parametrize("operation", ["free", "close"])
def test_free_and_close_wait_for_a_running_deregistration(allocator: AnyAllocator, nic: Nic, operation: str) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
        with (
            inject_faults(Api.VERBS, f"{DEREGISTRATION_FUNCTION} call=1 delay_us=300000"),
            ThreadPoolExecutor(1) as pool,
        ):
            invalidation_future = pool.submit(cache.invalidate, memory.address, length_bytes=1)
            while not read_peak_delayed_calls(Api.VERBS).get(DEREGISTRATION_FUNCTION):
                assert not invalidation_future.done()
            # The deregistration has begun and takes 0.3 s.
            (memory if operation == "free" else cache).close()
            assert cache.statistics().registered_bytes == 0
            assert invalidation_future.result(30) == 1


def test_free_retries_a_failed_deregistration(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
        rule = f"{DEREGISTRATION_FUNCTION} call=1 delay_us=300000 errno=EBUSY"
        with inject_faults(Api.VERBS, rule), ThreadPoolExecutor(1) as pool:
            invalidation_future = pool.submit(cache.invalidate, memory.address, length_bytes=1)
            while not read_peak_delayed_calls(Api.VERBS).get(DEREGISTRATION_FUNCTION):
                assert not invalidation_future.done()
            # The deregistration in the other thread has begun, and will fail.
            memory.close()
            with pytest.raises(ApiError):
                invalidation_future.result(30)
        statistics = cache.statistics()
        assert (statistics.registered_bytes, statistics.not_deregistered) == (0, 0)


def test_free_with_an_unlinked_lease_is_refused_at_once(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        with cache.lease(memory):
            cache.invalidate(memory.address, length_bytes=1)
            with pytest.raises(UsageError) as error_info:
                memory.close()
            assert error_info.value.reason is Reason.BUSY
        memory.close()


def test_concurrent_free_and_eviction_leave_one_region(allocator: AnyAllocator, nic: Nic) -> None:
    with RegionCache([nic], regions_max=1) as cache, allocator.allocate(64 * KIB) as other_memory:

        def evict() -> None:
            cache.lease(other_memory).close()

        for _ in range(50):
            with allocator.allocate(64 * KIB) as memory:
                cache.lease(memory).close()
                with ThreadPoolExecutor(2) as pool:
                    for future in (pool.submit(memory.close), pool.submit(evict)):
                        future.result(30)
        statistics = cache.statistics()
        assert (statistics.regions, statistics.registered_bytes, statistics.not_deregistered) == (1, 64 * KIB, 0)
