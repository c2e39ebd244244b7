"""The counters of a region cache after each event, the close of a cache, and host memory registered without a cache."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults

from gdrkit.errors import Api, ApiError, ClosedResource, Reason, RegistrationFailed, UsageError
from gdrkit.harness.needs import cuda, needs, software, verbs
from gdrkit.host import HostMemory
from gdrkit.registration import RegionCache, RegistrationRoute, register
from gdrkit.registration.policy import TRANSFER_ACCESS
from gdrkit.registration.statistics import CacheStatistics
from gdrkit.units import GIB, KIB

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())

LENGTH_BYTES = 64 * KIB
ZERO_STATISTICS = CacheStatistics(
    hits=0,
    misses=0,
    registrations=0,
    evictions=0,
    invalidations=0,
    regions=0,
    registered_bytes=0,
    leases=0,
    in_flight=0,
    waiting=0,
    not_deregistered=0,
)


def make_statistics(**counters: int) -> CacheStatistics:
    """Return statistics with these counters. All other counters are 0."""
    return dataclasses.replace(ZERO_STATISTICS, **counters)


def lease_until_refused(cache: RegionCache, memory: HostMemory) -> None:
    """Lease memory again and again, until the cache raises ClosedResource."""
    while True:
        cache.lease(memory).close()


def test_lookups_and_leases_are_counted(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory, RegionCache([nic]) as cache:
        assert cache.statistics() == ZERO_STATISTICS
        unchanged_counters = {"misses": 1, "registrations": 1, "regions": 1, "registered_bytes": LENGTH_BYTES}
        with cache.lease(memory):
            assert cache.statistics() == make_statistics(**unchanged_counters, leases=1)
            with cache.lease(memory, offset_bytes=1):
                assert cache.statistics() == make_statistics(**unchanged_counters, hits=1, leases=2)
        assert cache.statistics() == make_statistics(**unchanged_counters, hits=1)


def test_invalidated_entries_are_counted(nic: Nic) -> None:
    with contextlib.ExitStack() as stack, RegionCache([nic]) as cache:
        memories = [stack.enter_context(HostMemory(LENGTH_BYTES)) for _ in range(3)]
        for memory in memories:
            cache.lease(memory).close()
        begin_address = min(memory.address for memory in memories)
        end_address = max(memory.address + memory.length_bytes for memory in memories)
        unchanged_counters = {"misses": 3, "registrations": 3}
        with cache.lease(memories[1]):
            assert cache.invalidate(begin_address, length_bytes=end_address - begin_address) == 3
            # The leased entry stays registered until its lease ends.
            assert cache.statistics() == make_statistics(
                **unchanged_counters, hits=1, invalidations=3, registered_bytes=LENGTH_BYTES, leases=1
            )
        assert cache.statistics() == make_statistics(**unchanged_counters, hits=1, invalidations=3)
        assert cache.invalidate(begin_address, length_bytes=end_address - begin_address) == 0
        assert cache.statistics() == make_statistics(**unchanged_counters, hits=1, invalidations=3)


@pytest.mark.parametrize(("offset_bytes", "removed_count"), [(-1, 0), (0, 1), (LENGTH_BYTES - 1, 1), (LENGTH_BYTES, 0)])
def test_invalidation_removes_overlapping_entries(nic: Nic, offset_bytes: int, removed_count: int) -> None:
    with HostMemory(LENGTH_BYTES) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
        assert cache.invalidate(memory.address + offset_bytes, length_bytes=1) == removed_count
        assert cache.statistics().regions == 1 - removed_count


def test_free_is_an_invalidation(nic: Nic) -> None:
    with RegionCache([nic]) as cache:
        memory = HostMemory(LENGTH_BYTES)
        cache.lease(memory).close()
        memory.close()
        assert cache.statistics() == make_statistics(misses=1, registrations=1, invalidations=1)
        with pytest.raises(ClosedResource):
            cache.lease(memory)
        assert cache.statistics() == make_statistics(misses=1, registrations=1, invalidations=1)


def test_evictions_are_counted(nic: Nic) -> None:
    with (
        HostMemory(LENGTH_BYTES) as first_memory,
        HostMemory(LENGTH_BYTES) as second_memory,
        RegionCache([nic], regions_max=1) as cache,
    ):
        with cache.lease(first_memory), cache.lease(second_memory):
            # Leased entries are not evicted. They exceed the limit until a lease ends.
            unchanged_counters = {"misses": 2, "registrations": 2}
            assert cache.statistics() == make_statistics(
                **unchanged_counters, regions=2, registered_bytes=2 * LENGTH_BYTES, leases=2
            )
        assert cache.statistics() == make_statistics(
            **unchanged_counters, evictions=1, regions=1, registered_bytes=LENGTH_BYTES
        )


@pytest.mark.parametrize(
    ("bytes_max", "region_count"),
    [(2 * LENGTH_BYTES, 2), (2 * LENGTH_BYTES - 1, 1), (LENGTH_BYTES, 1), (LENGTH_BYTES - 1, 0)],
)
def test_byte_limit_is_exact_to_the_byte(nic: Nic, bytes_max: int, region_count: int) -> None:
    with (
        HostMemory(LENGTH_BYTES) as first_memory,
        HostMemory(LENGTH_BYTES) as second_memory,
        RegionCache([nic], bytes_max=bytes_max) as cache,
    ):
        for memory in (first_memory, second_memory):
            cache.lease(memory).close()
        statistics = cache.statistics()
        assert (statistics.regions, statistics.registered_bytes) == (region_count, region_count * LENGTH_BYTES)
        # Memory that is larger than the limit is registered for its lease only. This does not count as an eviction.
        assert statistics.evictions == (2 - region_count if region_count else 0)


def test_cache_without_arguments_has_the_documented_limits(nic: Nic) -> None:
    with RegionCache([nic]) as cache:
        assert (cache.nics, cache.access, cache.route) == ((nic,), TRANSFER_ACCESS, None)
        assert (cache.regions_max, cache.bytes_max) == (1024, 1024 * GIB)


def test_close_without_a_timeout_fails_at_once(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory, RegionCache([nic]) as cache:
        with cache.lease(memory):
            with pytest.raises(UsageError) as error_info:
                cache.close()
            assert error_info.value.reason is Reason.BUSY
            assert not cache.closed
        cache.close()
        assert cache.closed
        assert cache.statistics().regions == 0


def test_close_without_a_limit_waits_for_the_leases(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory, RegionCache([nic]) as cache:
        lease = cache.lease(memory)
        closing_thread = threading.Thread(target=cache.close, kwargs={"timeout_ms": None})
        closing_thread.start()
        try:
            # While close() waits, the cache refuses new leases.
            with pytest.raises(ClosedResource):
                lease_until_refused(cache, memory)
            assert closing_thread.is_alive()
        finally:
            lease.close()
            closing_thread.join()
        assert cache.closed


@needs(software(Api.VERBS))
def test_close_that_fails_is_tried_again(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
        with inject_faults(Api.VERBS, "ibv_dereg_mr call=1 errno=EBUSY"), pytest.raises(ApiError):
            cache.close()
        assert not cache.closed
        assert cache.statistics() == make_statistics(
            misses=1, registrations=1, registered_bytes=LENGTH_BYTES, not_deregistered=1
        )
        cache.close()
        assert cache.closed
        assert cache.statistics().not_deregistered == 0


def test_registration_names_its_nics_and_refuses_others(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory, type(nic).open(nic.name) as other_nic:
        with register(memory, [nic]) as registration:
            assert (registration.memory, registration.route) == (memory, RegistrationRoute.HOST)
            assert (registration.refusals, registration.nics, registration.closed) == ((), (nic,), False)
            with pytest.raises(UsageError) as error_info:
                registration.region(other_nic)
            assert error_info.value.reason is Reason.BAD_ARGUMENT
            part_range = registration.remote(nic, offset_bytes=5, length_bytes=7)
            assert (part_range.address, part_range.length_bytes) == (memory.address + 5, 7)
            assert registration.remote(nic).length_bytes == LENGTH_BYTES
        assert registration.closed
        registration.close()
        for method in (registration.region, registration.remote):
            with pytest.raises(ClosedResource):
                method(nic)


def test_closed_memory_is_refused(nic: Nic) -> None:
    memory = HostMemory(LENGTH_BYTES)
    memory.close()
    with pytest.raises(ClosedResource):
        register(memory, [nic])


def test_host_memory_has_one_route(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory:
        with pytest.raises(UsageError) as error_info:
            register(memory, [nic], route=RegistrationRoute.PEER_MEMORY)
        assert error_info.value.reason is Reason.BAD_ARGUMENT
        with pytest.raises(RegistrationFailed) as failure_info:
            register(memory, [nic], route=RegistrationRoute.DMABUF)
        assert (failure_info.value.reason, len(failure_info.value.causes)) == (Reason.NO_ROUTE, 1)
        with register(memory, [nic], route=RegistrationRoute.HOST) as registration:
            assert registration.route is RegistrationRoute.HOST


@needs(cuda.device())
def test_device_memory_as_host_memory_is_refused(nic: Nic, device: Device) -> None:
    with device.allocate(LENGTH_BYTES) as memory:
        with pytest.raises(UsageError) as error_info:
            register(memory, [nic], route=RegistrationRoute.HOST)
        assert error_info.value.reason is Reason.BAD_ARGUMENT
