"""Time to create and destroy a GPU iov with the pool of the client library, compared with the time without the pool.

A GPU iov is GPU memory that a USRBIO client shares with the agent. With the pool, the library reuses the allocation and
its exports, and the agent reuses the registration. With a limit of 0, there is no pool, so the time of each iov
includes allocation, export and registration. The goal on an H200 is that an iov of 1 MiB takes at most a fifth of the
time without the pool. The goal is not asserted. With --benchmark-enable, calls with and without the pool are measured
in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench.interleaved import measure_interleaved
from support.raw_usrbio import AgentProcess

from gdrkit import cuda, usrbio
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic(), verbs.dmabuf_region, cuda_needs.device(), cuda_needs.dmabuf_export)

POOL_BYTES = 256 * MIB
# The time without the pool should be this many times as long as the time with the pool.
GOAL_RATIO = 5.0
SIZES_MIB = (1, 64)


def make_create_and_destroy(mount: Path, length_bytes: int, pool_bytes: int) -> Callable[[], None]:
    """Return a function that sets the limit of the pool to `pool_bytes`, and then creates and destroys one iov."""

    def create_and_destroy() -> None:
        usrbio.limit_gpu_pool(idle_bytes_max=pool_bytes, idle_ms_max=600_000)
        usrbio.make_gpu_iovec(str(mount), length_bytes=length_bytes).close()

    return create_and_destroy


@pytest.mark.timeout(180)
@pytest.mark.parametrize("size_mib", SIZES_MIB)
def test_create_and_destroy_of_a_gpu_iov(
    request: pytest.FixtureRequest, evidence: Evidence, summary: list[str], tmp_path: Path, size_mib: int
) -> None:
    is_measured = request.config.getoption("--benchmark-enable")
    rounds_count, calls_count = (9, 5) if is_measured else (1, 2)
    # The primary context exists during the whole case, as in an application that uses the GPU. Otherwise each iov
    # without the pool would create and destroy the context.
    with cuda.Device(0) as device, device.current(), AgentProcess(tmp_path):
        create_with_pool = make_create_and_destroy(tmp_path, size_mib * MIB, POOL_BYTES)
        create_without_pool = make_create_and_destroy(tmp_path, size_mib * MIB, 0)
        ratios: list[float] = []
        # The calls without the pool set its limit to 0, which frees the idle memory. Therefore each round begins with a
        # call that fills the pool again and is not measured.
        times_us: dict[str, list[float]] = {"pool": [], "no_pool": []}
        for _ in range(rounds_count):
            statistics_before = usrbio.gpu_pool_statistics()
            create_with_pool()
            for name, call in (("pool", create_with_pool), ("no_pool", create_without_pool)):
                call_times = measure_interleaved({name: call}, rounds_count=1, calls_count=calls_count)
                times_us[name].append(call_times[name].median_ns / 1e3)
            assert usrbio.gpu_pool_statistics().hits - statistics_before.hits == calls_count
            ratios.append(times_us["no_pool"][-1] / times_us["pool"][-1])
        usrbio.limit_gpu_pool(idle_bytes_max=POOL_BYTES)
        usrbio.trim_gpu_pool()
    if is_measured:
        medians_us = {name: sorted(values)[len(values) // 2] for name, values in times_us.items()}
        for name, median_us in medians_us.items():
            evidence.number(f"create_destroy_{name}_us", median_us)
        ratio = medians_us["no_pool"] / medians_us["pool"]
        evidence.number("no_pool_to_pool_ratio", ratio)
        evidence.number("no_pool_to_pool_ratio_min", min(ratios))
        evidence.number("no_pool_to_pool_ratio_max", max(ratios))
        summary.append(
            f"create and destroy a GPU iov of {size_mib} MiB: {medians_us['pool']:.0f} us with the pool, "
            f"{medians_us['no_pool']:.0f} us without: {ratio:.1f} x (goal on an H200: {GOAL_RATIO:.0f} x)"
        )
