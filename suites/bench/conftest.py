"""What a benchmark measured goes into the record of its case, beside its peer's of the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.harness.evidence import Evidence


@pytest.fixture(autouse=True)
def _keep_numbers(benchmark: BenchmarkFixture, evidence: Evidence) -> Iterator[None]:
    yield
    # Nothing was measured in a run of the suites: benchmarks are off there, and each body runs once.
    if benchmark.stats is None or not benchmark.enabled:
        return
    stats = benchmark.stats.stats
    evidence.number("rounds_count", stats.rounds)
    for name in ("median", "min", "max"):
        evidence.number(f"time_ms_{name}", getattr(stats, name) * 1e3)
