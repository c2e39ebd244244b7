"""Time of a cache hit, compared with one cuPointerGetAttribute call.

A hit, with the close of its lease, queries the buffer id once. It should take at most 4 times as long as such a query,
and with 10,000 regions at most 1.5 times as long as with 10. All calls are measured in turn some hundred times, so that
the load of the machine affects each of them, and the ratios are of the medians. Run it with --benchmark-enable.
"""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING

import pytest
from bench.interleaved import measure_interleaved
from support.ledger import calls
from support.reach import DMABUF

from gdrkit import cuda
from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import RegionCache, RegistrationRoute
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

pytestmark = [DMABUF, needs(software(Api.VERBS), verbs.peer_memory)]

COUNTS = (10, 100, 1000, 10_000)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Raise the limit of open descriptors as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
@pytest.mark.timeout(300)
def test_cache_hit_beside_a_pointer_query(
    request: pytest.FixtureRequest, evidence: Evidence, device: Device, nic: Nic
) -> None:
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    is_measured = request.config.getoption("--benchmark-enable")
    with contextlib.ExitStack() as stack:
        memories = [stack.enter_context(device.allocate(64 * KIB)) for _ in range(max(COUNTS))]
        address = memories[0].address
        measured_calls: dict[str, Callable[[], object]] = {
            "query": lambda: driver.cuPointerGetAttribute(attribute, address),
        }
        caches = {}
        for count in COUNTS:
            # Registration by address: a dma-buf region of the twin has a descriptor, and there are 10,000 regions.
            cache = RegionCache([nic], route=RegistrationRoute.PEER_MEMORY, regions_max=count)
            caches[count] = stack.enter_context(cache)
            for memory in memories[:count]:
                cache.lease(memory).close()
            measured_calls[f"hit_{count}"] = _hit(cache, memories[count // 2])
        # Borrowed memory, such as a tensor, has no entry of its own. The cache searches it by its address.
        part = cuda.borrow(device, memories[5000].address + 4 * KIB, length_bytes=4 * KIB)
        measured_calls["borrowed_hit_10000"] = _hit(caches[10_000], stack.enter_context(part))
        # After the first hit, the internal state of each cache no longer changes.
        for call in measured_calls.values():
            call()
        before, registered = calls(Api.VERBS), {count: cache.statistics() for count, cache in caches.items()}
        times = measure_interleaved(
            measured_calls, rounds_count=300 if is_measured else 1, calls_count=200 if is_measured else 1
        )
        assert calls(Api.VERBS) == before
        for count, cache in caches.items():
            after = cache.statistics()
            assert (after.misses, after.regions) == (registered[count].misses, count)
            assert after.hits > registered[count].hits
    if is_measured:
        evidence.number("rounds_count", 300)
        for name, each in times.items():
            evidence.number(f"{name}_ns_median", each.median)
            evidence.number(f"{name}_ns_min", each.minimum)
            evidence.number(f"{name}_over_query_ratio", each.median / times["query"].median)
        evidence.number("most_over_fewest_regions_ratio", times["hit_10000"].median / times["hit_10"].median)


def _hit(cache: RegionCache, memory: DeviceBuffer) -> Callable[[], None]:
    return lambda: cache.lease(memory).close()
