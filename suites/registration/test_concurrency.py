"""Many threads on one cache: one registration per allocation, several allocations at once, and no endless wait.

A fault plan delays registrations, so that they overlap on machines of any speed. No case measures time.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.ledger import read_call_counts, read_peak_delayed_calls
from support.memory_kinds import connect_peer_queue_pair, find_registration_function

from gdrkit import launch
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostMemory
from gdrkit.registration import RegionCache
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.memory_kinds import AnyAllocator

    from gdrkit.cuda import DeviceMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

# The need of cases that read the call counters of the libibverbs twin (a library that emulates NICs), or delay its
# calls.
NEEDS_VERBS_TWIN = needs(software(Api.VERBS))

THREAD_COUNT = 32


@contextlib.contextmanager
def allocate_memories(allocator: AnyAllocator, count: int) -> Iterator[list[DeviceMemory | HostMemory]]:
    """Yield `count` memories of 64 KiB, which are freed at the end of the block."""
    with contextlib.ExitStack() as stack:
        memories: list[DeviceMemory | HostMemory] = [allocator.allocate(64 * KIB) for _ in range(count)]
        for memory in memories:
            stack.callback(memory.close)
        yield memories


def make_delay_rule(allocator: AnyAllocator) -> str:
    """Return the fault rule that delays every registration by 0.1 s."""
    return f"{find_registration_function(allocator)} call=* delay_us=100000"


@contextlib.contextmanager
def delay_calls(rule: str) -> Iterator[None]:
    """Apply a rule that delays calls of the libibverbs twin inside the block. Without a twin, do nothing."""
    with contextlib.ExitStack() as stack:
        if launch.twin_control().ledger("verbs") is not None:
            stack.enter_context(inject_faults(Api.VERBS, rule))
        yield


def run_in_all_threads(call: Callable[[int], object]) -> list[object]:
    """Run `call` with the index of the thread in all threads at once. Return the result or the exception of each."""
    barrier = threading.Barrier(THREAD_COUNT)

    def call_at_once(index: int) -> object:
        barrier.wait(30)
        try:
            return call(index)
        except (ApiError, UsageError, ClosedResource) as error:
            return error

    with ThreadPoolExecutor(THREAD_COUNT) as pool:
        return list(pool.map(call_at_once, range(THREAD_COUNT)))


def is_lease_refused(cache: RegionCache, memory: DeviceMemory | HostMemory) -> bool:
    """Return whether the cache refuses to lease the memory because the cache is closing or closed."""
    try:
        cache.lease(memory).close()
    except ClosedResource:
        return True
    return False


class ObservedMemory(HostMemory):
    """Host memory that calls `on_first_key` at the first call of allocation_key()."""

    on_first_key: Callable[[], None] | None = None

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Call `on_first_key` once, and return the key of the mapping."""
        callback, self.on_first_key = self.on_first_key, None
        if callback is not None:
            callback()
        return super().allocation_key()


@needs(verbs.nic())
def test_registration_that_another_thread_just_completed_is_used(nic: Nic) -> None:
    with ObservedMemory(64 * KIB) as memory, RegionCache([nic]) as cache:

        def register_in_another_thread() -> None:
            thread = threading.Thread(target=lambda: cache.lease(memory).close())
            thread.start()
            thread.join(30)

        # The cache reads the key after it has searched its index, and before it registers the memory. So the other
        # thread registers between these two steps.
        memory.on_first_key = register_in_another_thread
        cache.lease(memory).close()
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.misses, statistics.hits) == (1, 1, 1)


def test_threads_share_one_registration_per_key(allocator: AnyAllocator, nic: Nic) -> None:
    with allocate_memories(allocator, 4) as memories, RegionCache([nic]) as cache:
        cache.lease(memories[0]).close()
        run_in_all_threads(lambda index: cache.lease(memories[index % 4]).close())
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.regions, statistics.hits + statistics.misses) == (
            4,
            4,
            THREAD_COUNT + 1,
        )
        assert (statistics.leases, statistics.in_flight, statistics.waiting) == (0, 0, 0)


@NEEDS_VERBS_TWIN
def test_concurrent_lookups_of_one_key_register_once(allocator: AnyAllocator, nic: Nic) -> None:
    # This call probes the NIC now, so only registrations are counted below.
    assert nic.supports_dmabuf()
    with (
        allocator.allocate(64 * KIB) as memory,
        RegionCache([nic]) as cache,
        inject_faults(Api.VERBS, make_delay_rule(allocator)),
    ):
        call_count_before = read_call_counts(Api.VERBS)[find_registration_function(allocator)]

        def lease_and_get_rkey(_index: int) -> int:
            with cache.lease(memory) as lease:
                return lease.remote(nic).rkey

        assert len(set(run_in_all_threads(lease_and_get_rkey))) == 1
        assert read_call_counts(Api.VERBS)[find_registration_function(allocator)] == call_count_before + 1
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.hits + statistics.misses) == (1, THREAD_COUNT)
        assert (statistics.leases, statistics.in_flight, statistics.waiting) == (0, 0, 0)


@NEEDS_VERBS_TWIN
def test_registrations_of_different_keys_overlap(allocator: AnyAllocator, nic: Nic) -> None:
    # This call probes the NIC now, so only registrations are counted below.
    assert nic.supports_dmabuf()
    with allocate_memories(allocator, 8) as memories, RegionCache([nic]) as cache:
        with inject_faults(Api.VERBS, make_delay_rule(allocator)):
            call_count_before = read_call_counts(Api.VERBS)[find_registration_function(allocator)]
            run_in_all_threads(lambda index: cache.lease(memories[index % 8]).close())
            # The calls overlap in the library itself: neither the cache nor the interpreter serializes them.
            assert read_peak_delayed_calls(Api.VERBS)[find_registration_function(allocator)] > 1
            assert read_call_counts(Api.VERBS)[find_registration_function(allocator)] == call_count_before + 8
        assert cache.statistics().registrations == 8


@NEEDS_VERBS_TWIN
def test_failed_registration_is_shared_and_not_cached(allocator: AnyAllocator, nic: Nic) -> None:
    # This call probes the NIC now, so only registrations are counted below.
    assert nic.supports_dmabuf()
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        with inject_faults(Api.VERBS, f"{find_registration_function(allocator)} call=* errno=ENOMEM delay_us=100000"):
            call_count_before = read_call_counts(Api.VERBS)[find_registration_function(allocator)]
            errors = run_in_all_threads(lambda _index: cache.lease(memory))
            registration_count = read_call_counts(Api.VERBS)[find_registration_function(allocator)] - call_count_before
        assert all(isinstance(error, ApiError) and error.errno == errno.ENOMEM for error in errors)
        # Threads that joined the pending registration get the same failure, each as a separate error object. If several
        # threads raised one object, its traceback would have the frames of all threads.
        assert registration_count < THREAD_COUNT
        assert len({id(error) for error in errors}) == THREAD_COUNT
        assert len({str(error) for error in errors}) <= registration_count
        assert (cache.statistics().leases, cache.statistics().in_flight) == (0, 0)
        cache.lease(memory).close()


@NEEDS_VERBS_TWIN
def test_waiting_lease_misses_after_invalidate(allocator: AnyAllocator, nic: Nic, tmp_path: Path) -> None:
    # This call probes the NIC now, so only registrations are counted below.
    assert nic.supports_dmabuf()
    # The fault rule below holds the first registration while this file exists.
    hold_file = tmp_path / "held"
    hold_file.touch()
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:

        def lease_and_get_rkey(_index: int) -> int:
            with cache.lease(memory) as lease:
                return lease.remote(nic).rkey

        with (
            inject_faults(Api.VERBS, f"{find_registration_function(allocator)} call=1 hold={hold_file}"),
            ThreadPoolExecutor(2) as pool,
        ):
            first_future = pool.submit(lease_and_get_rkey, 0)
            while not cache.statistics().in_flight:
                assert not first_future.done()
            second_future = pool.submit(lease_and_get_rkey, 1)
            while not cache.statistics().waiting:
                assert not second_future.done()
            # While the registration is pending, a free fails and does not wait. But it invalidates the range, so the
            # next lease is a miss.
            with pytest.raises(UsageError) as error_info:
                memory.close()
            assert error_info.value.reason is Reason.BUSY
            with cache.lease(memory) as new_lease:
                new_rkey = new_lease.remote(nic).rkey
                assert cache.statistics().in_flight == 1
            hold_file.unlink()
            old_rkey = first_future.result(30)
            assert second_future.result(30) == old_rkey != new_rkey
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.regions, statistics.registered_bytes) == (2, 1, 64 * KIB)
        with cache.lease(memory) as lease:
            assert lease.remote(nic).rkey == new_rkey


def test_close_with_timeout_waits_for_leases_of_other_threads(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        lease = cache.lease(memory)
        with ThreadPoolExecutor(1) as pool:
            closing_future = pool.submit(cache.close, timeout_ms=30_000)
            # While close() waits, the cache refuses new leases.
            while not is_lease_refused(cache, memory):
                assert not closing_future.done()
            assert not closing_future.done()
            lease.close()
            closing_future.result(30)
        assert cache.closed


def test_random_lookups_and_invalidations_leave_no_region(
    allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int
) -> None:
    with (
        allocate_memories(allocator, 6) as memories,
        connect_peer_queue_pair(nic, peer) as peer_pair,
        RegionCache([nic], regions_max=3) as cache,
        delay_calls(f"{find_registration_function(allocator)} call=* delay_us=1000"),
    ):
        # One registration runs first, so that a machine without any route fails once and not in all threads.
        cache.lease(memories[0]).close()

        def lease_and_invalidate(index: int) -> None:
            for round_index in range(20):
                # Every fifth round of a thread invalidates a memory. The other rounds lease it.
                memory = memories[(index * 7 + round_index * 5) % 6]
                if (index + round_index) % 5 == 0:
                    cache.invalidate(memory.address, length_bytes=1)
                else:
                    with cache.lease(memory, offset_bytes=index, length_bytes=64) as lease:
                        assert lease.remote(nic).address == memory.address + index

        assert not [outcome for outcome in run_in_all_threads(lease_and_invalidate) if outcome is not None]
        statistics = cache.statistics()
        assert (statistics.leases, statistics.in_flight, statistics.waiting, statistics.not_deregistered) == (
            0,
            0,
            0,
            0,
        )
        assert statistics.regions <= 3
        assert statistics.registered_bytes == statistics.regions * 64 * KIB
        with cache.lease(memories[0]) as lease:
            peer_pair.write(lease.remote(nic), seed=seed).expect(Status.SUCCESS)
