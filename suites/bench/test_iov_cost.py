"""Time to create and destroy an iov in host memory (memory that a USRBIO client shares with the agent).

Most of the time of the first large iov goes into its pages: the client allocates them, and the agent pins them. The
next iov of the same size reuses this memory, which the library clears (docs/usrbio.md). With the environment variable
GDRKIT_USRBIO_HOST_POOL_BYTES=0, every iov gets new memory. A program that uses iovs has a ring, which keeps the
connection to the agent open. In the measurement "alone", there is no ring, so each iov opens a connection.

The goals on an idle machine are 2 ms for 64 KiB, and 20 ms for 64 MiB. They are not asserted. The option
--benchmark-enable turns the measurement on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.interleaved import measure_interleaved
from support.raw_usrbio import AgentProcess

from gdrkit import usrbio
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic())

SIZES_BYTES = {"64k": 64 * KIB, "1m": MIB, "64m": 64 * MIB}


def test_create_and_destroy_of_a_host_iov(
    request: pytest.FixtureRequest, evidence: Evidence, summary: list[str], tmp_path: Path
) -> None:
    is_measured = request.config.getoption("--benchmark-enable")
    rounds_count, calls_count = (9, 5) if is_measured else (1, 1)

    def make_create_and_destroy(length_bytes: int) -> Callable[[], None]:
        return lambda: usrbio.create_iovec(str(tmp_path), length_bytes=length_bytes).close()

    with AgentProcess(tmp_path) as agent:
        calls_without_ring = {"64k_alone": make_create_and_destroy(64 * KIB)}
        times_by_name = measure_interleaved(calls_without_ring, rounds_count=rounds_count, calls_count=calls_count)
        with usrbio.make_ioring(str(tmp_path), 8):
            calls = {name: make_create_and_destroy(length_bytes) for name, length_bytes in SIZES_BYTES.items()}
            times_by_name |= measure_interleaved(calls, rounds_count=rounds_count, calls_count=calls_count)
        usrbio.trim_host_pool()
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["registrations"] >= len(SIZES_BYTES) + 1
    if is_measured:
        time_texts = []
        for name, times in times_by_name.items():
            evidence.number(f"create_destroy_{name}_us_median", times.median_ns / 1e3)
            evidence.number(f"create_destroy_{name}_us_min", times.minimum_ns / 1e3)
            time_texts.append(f"{name}: {times.median_ns / 1e6:.2f} ms (minimum {times.minimum_ns / 1e6:.2f} ms)")
        summary.append(f"create and destroy an iov in host memory: {', '.join(time_texts)}")
