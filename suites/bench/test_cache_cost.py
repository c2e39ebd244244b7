"""Time of a cache hit, compared with one cuPointerGetAttribute call.

A cache hit is a lease for which the region cache finds a registration. The measured time includes the close of
the lease. A hit queries the buffer id once by cuPointerGetAttribute, and should take at most 4 times as long as this
query. With 10,000 regions, a hit should take at most 1.5 times as long as with 10 regions. The case records the ratios
of the medians, and asserts only that each call is a hit.

With --benchmark-enable, all calls are measured in turn 300 times, so that the load of the machine affects all of them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from bench.interleaved import measure_interleaved
from support.ledger import read_call_counts
from support.memory_kinds import NEEDS_DMABUF
from support.processes import limit_open_files

from gdrkit import cuda
from gdrkit.errors import Api
from gdrkit.harness.needs import host, needs, software, verbs
from gdrkit.registration import RegionCache, RegistrationRoute
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

pytestmark = [NEEDS_DMABUF, needs(software(Api.VERBS), verbs.peer_memory)]

REGION_COUNTS = (10, 100, 1000, 10_000)


@needs(host.open_files(16_384))
@pytest.mark.timeout(300)
def test_cache_hit_beside_a_pointer_query(
    request: pytest.FixtureRequest, evidence: Evidence, device: Device, nic: Nic
) -> None:
    from cuda.bindings import driver

    buffer_id_attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    is_measured = request.config.getoption("--benchmark-enable")
    with limit_open_files(16_384), contextlib.ExitStack() as stack:
        memories = [stack.enter_context(device.allocate(64 * KIB)) for _ in range(max(REGION_COUNTS))]
        address = memories[0].address
        measured_calls: dict[str, Callable[[], object]] = {
            "query": lambda: driver.cuPointerGetAttribute(buffer_id_attribute, address),
        }
        caches = {}
        for count in REGION_COUNTS:
            # Register the regions by address (peer memory), because each dma-buf region of the verbs twin (a library
            # that emulates NICs) would keep a file descriptor open.
            cache = RegionCache([nic], route=RegistrationRoute.PEER_MEMORY, regions_max=count)
            caches[count] = stack.enter_context(cache)
            for memory in memories[:count]:
                cache.lease(memory).close()
            measured_calls[f"hit_{count}"] = _make_hit_function(cache, memories[count // 2])
        # The borrowed memory, like a tensor, is a part of an allocation. The cache finds the region by its address.
        borrowed_memory = cuda.borrow(device, memories[5000].address + 4 * KIB, length_bytes=4 * KIB)
        measured_calls["borrowed_hit_10000"] = _make_hit_function(caches[10_000], stack.enter_context(borrowed_memory))
        # Make each call once before the measurement. The first hit changes the internal state of a cache, later hits
        # do not.
        for call in measured_calls.values():
            call()
        verbs_calls_before, statistics_before = (
            read_call_counts(Api.VERBS),
            {count: cache.statistics() for count, cache in caches.items()},
        )
        times = measure_interleaved(
            measured_calls, rounds_count=300 if is_measured else 1, calls_count=200 if is_measured else 1
        )
        assert read_call_counts(Api.VERBS) == verbs_calls_before
        for count, cache in caches.items():
            statistics = cache.statistics()
            assert (statistics.misses, statistics.regions) == (statistics_before[count].misses, count)
            assert statistics.hits > statistics_before[count].hits
    if is_measured:
        evidence.number("rounds_count", 300)
        for name, call_times in times.items():
            evidence.number(f"{name}_ns_median", call_times.median_ns)
            evidence.number(f"{name}_ns_min", call_times.minimum_ns)
            evidence.number(f"{name}_over_query_ratio", call_times.median_ns / times["query"].median_ns)
        evidence.number("most_over_fewest_regions_ratio", times["hit_10000"].median_ns / times["hit_10"].median_ns)


def _make_hit_function(cache: RegionCache, memory: DeviceBuffer) -> Callable[[], None]:
    """Return a function that makes one cache hit."""
    return lambda: cache.lease(memory).close()
