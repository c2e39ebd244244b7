"""Many threads on one cache: one registration per key, different keys at the same time, and no endless wait.

A fault plan delays registrations, so that they overlap on machines of any speed. No case measures time.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.faults import faults
from support.ledger import calls, delayed_at_once
from support.reach import joined, registering

from gdrkit import launch
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import needs, software
from gdrkit.registration import RegionCache
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.reach import Space

    from gdrkit.cuda import DeviceMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.host import HostMemory
    from gdrkit.verbs import Nic

LEDGER = needs(software(Api.VERBS))

THREADS = 32


@contextlib.contextmanager
def memories(space: Space, count: int) -> Iterator[list[DeviceMemory | HostMemory]]:
    with contextlib.ExitStack() as stack:
        held: list[DeviceMemory | HostMemory] = [space.allocate(64 * KIB) for _ in range(count)]
        for memory in held:
            stack.callback(memory.close)
        yield held


def slow(space: Space) -> str:
    """Return the fault rule that delays every registration."""
    return f"{registering(space)} call=* delay_us=100000"


@contextlib.contextmanager
def held_up(rule: str) -> Iterator[None]:
    """Delay the calls of the twin inside the block. Without a twin, do nothing."""
    with contextlib.ExitStack() as stack:
        if launch.twin_control().ledger("verbs") is not None:
            stack.enter_context(faults(Api.VERBS, rule))
        yield


def together(work: Callable[[int], object]) -> list[object]:
    """Run `work` in 32 threads that begin at once. Return the result or the exception of each."""
    barrier = threading.Barrier(THREADS)

    def begin(index: int) -> object:
        barrier.wait(30)
        try:
            return work(index)
        except (ApiError, UsageError, ClosedResource) as error:
            return error

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(begin, range(THREADS)))


def refuses(cache: RegionCache, memory: DeviceMemory | HostMemory) -> bool:
    try:
        cache.lease(memory).close()
    except ClosedResource:
        return True
    return False


def test_threads_share_one_registration_per_key(space: Space, nic: Nic) -> None:
    with memories(space, 4) as held, RegionCache([nic]) as cache:
        cache.lease(held[0]).close()
        together(lambda index: cache.lease(held[index % 4]).close())
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.regions, statistics.hits + statistics.misses) == (
            4,
            4,
            THREADS + 1,
        )
        assert (statistics.leases, statistics.in_flight, statistics.waiting) == (0, 0, 0)


@LEDGER
def test_concurrent_lookups_of_one_key_register_once(space: Space, nic: Nic) -> None:
    assert nic.supports_dmabuf()
    with space.allocate(64 * KIB) as memory, RegionCache([nic]) as cache, faults(Api.VERBS, slow(space)):
        before = calls(Api.VERBS)[registering(space)]

        def lease(_index: int) -> int:
            with cache.lease(memory) as held:
                return held.remote(nic).rkey

        assert len(set(together(lease))) == 1
        assert calls(Api.VERBS)[registering(space)] == before + 1
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.hits + statistics.misses) == (1, THREADS)
        assert (statistics.leases, statistics.in_flight, statistics.waiting) == (0, 0, 0)


@LEDGER
def test_registrations_of_different_keys_overlap(space: Space, nic: Nic) -> None:
    assert nic.supports_dmabuf()
    with memories(space, 8) as held, RegionCache([nic]) as cache:
        with faults(Api.VERBS, slow(space)):
            before = calls(Api.VERBS)[registering(space)]
            together(lambda index: cache.lease(held[index % 8]).close())
            # The calls overlap in the library itself: neither the cache nor the interpreter serializes them.
            assert delayed_at_once(Api.VERBS)[registering(space)] > 1
            assert calls(Api.VERBS)[registering(space)] == before + 8
        assert cache.statistics().registrations == 8


@LEDGER
def test_failed_registration_is_shared_and_not_cached(space: Space, nic: Nic) -> None:
    assert nic.supports_dmabuf()
    with space.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        with faults(Api.VERBS, f"{registering(space)} call=* errno=ENOMEM delay_us=100000"):
            before = calls(Api.VERBS)[registering(space)]
            errors = together(lambda _index: cache.lease(memory))
            attempts = calls(Api.VERBS)[registering(space)] - before
        assert all(isinstance(error, ApiError) and error.errno == errno.ENOMEM for error in errors)
        # Threads that joined the pending registration get the same failure, each as a separate error object (issue
        # 15 B): an error object that several threads raise has the frames of all of them.
        assert attempts < THREADS
        assert len({id(error) for error in errors}) == THREADS
        assert len({str(error) for error in errors}) <= attempts
        assert (cache.statistics().leases, cache.statistics().in_flight) == (0, 0)
        cache.lease(memory).close()


@LEDGER
def test_waiting_lease_misses_after_invalidate(space: Space, nic: Nic) -> None:
    assert nic.supports_dmabuf()
    with space.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        began = threading.Event()

        def begin(_index: int) -> int:
            began.set()
            with cache.lease(memory) as held:
                return held.remote(nic).rkey

        # The delay is long, because all following steps run during it. Half a second was too short on a
        # machine with two GPUs.
        with faults(Api.VERBS, f"{registering(space)} call=1 delay_us=3000000"), ThreadPoolExecutor(2) as threads:
            first = threads.submit(begin, 0)
            while not cache.statistics().in_flight:
                assert not first.done()
            second = threads.submit(begin, 1)
            while not cache.statistics().waiting:
                assert not second.done()
            # A free is refused during the registration, and an invalidation does not wait for it.
            with pytest.raises(UsageError) as raised:
                memory.close()
            assert raised.value.reason is Reason.BUSY
            with cache.lease(memory) as fresh:
                key = fresh.remote(nic).rkey
                assert cache.statistics().in_flight == 1
            old = first.result(30)
            assert second.result(30) == old != key
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.regions, statistics.registered_bytes) == (2, 1, 64 * KIB)
        with cache.lease(memory) as held:
            assert held.remote(nic).rkey == key


def test_close_with_timeout_waits_for_leases_of_other_threads(space: Space, nic: Nic) -> None:
    with space.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        lease = cache.lease(memory)
        with ThreadPoolExecutor(1) as threads:
            closing = threads.submit(cache.close, timeout_ms=30_000)
            # During its wait, close refuses new leases.
            while not refuses(cache, memory):
                assert not closing.done()
            assert not closing.done()
            lease.close()
            closing.result(30)
        assert cache.closed


def test_random_lookups_and_invalidations_leave_no_region(space: Space, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        memories(space, 6) as held,
        joined(nic, peer) as theirs,
        RegionCache([nic], regions_max=3) as cache,
        held_up(f"{registering(space)} call=* delay_us=1000"),
    ):
        # One registration runs first, so that a machine without any route fails once and not in all threads.
        cache.lease(held[0]).close()

        def work(index: int) -> None:
            for step in range(20):
                memory = held[(index * 7 + step * 5) % 6]
                if (index + step) % 5 == 0:
                    cache.invalidate(memory.address, length_bytes=1)
                else:
                    with cache.lease(memory, offset_bytes=index, length_bytes=64) as lease:
                        assert lease.remote(nic).address == memory.address + index

        assert not [outcome for outcome in together(work) if outcome is not None]
        statistics = cache.statistics()
        assert (statistics.leases, statistics.in_flight, statistics.waiting, statistics.not_deregistered) == (
            0,
            0,
            0,
            0,
        )
        assert statistics.regions <= 3
        assert statistics.registered_bytes == statistics.regions * 64 * KIB
        with cache.lease(held[0]) as lease:
            theirs.write(lease.remote(nic), seed=seed).expect(Status.SUCCESS)
