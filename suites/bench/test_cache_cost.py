"""What a cache hit costs beside one cuPointerGetAttribute call; compare the medians of the rows of one run.

A hit asks the driver for the buffer id once. It should cost no more than 4 such calls, and no more than half as much
again with 10,000 regions as with 10. Run it with --benchmark-enable.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest
from support.ledger import calls
from support.reach import DMABUF

from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import RegionCache, RegistrationRoute
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

pytestmark = [DMABUF, needs(software(Api.VERBS), verbs.peer_memory)]


def test_one_pointer_attribute(benchmark: BenchmarkFixture, device: Device) -> None:
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    with device.allocate(64 * KIB) as memory:
        address = memory.address
        benchmark(driver.cuPointerGetAttribute, attribute, address)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many descriptors as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [10, 100, 1000, 10_000])
def test_a_hit(benchmark: BenchmarkFixture, device: Device, nic: Nic, count: int) -> None:
    memories = [device.allocate(64 * KIB) for _ in range(count)]
    # By address: a dma-buf region of a twin keeps a descriptor, and ten thousand memories have ten thousand already.
    with RegionCache([nic], route=RegistrationRoute.PEER_MEMORY, regions_max=count) as cache:
        for memory in memories:
            cache.lease(memory).close()
        wanted = memories[count // 2]
        before, registered = calls(Api.VERBS), cache.statistics()

        def hit() -> None:
            cache.lease(wanted).close()

        benchmark(hit)
        after = cache.statistics()
        assert calls(Api.VERBS) == before
        assert (after.misses, after.regions) == (registered.misses, count)
        assert after.hits > registered.hits
