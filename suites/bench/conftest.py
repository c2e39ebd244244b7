"""What a benchmark measured goes into the record of its case, beside its peer's of the same run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.harness.evidence import Evidence

PROGRAMS = "GDRKIT_BENCH_PROGRAMS"
# Native benchmarks are programs that only `nox -s bench` builds; it says where they are.
collect_ignore = [] if PROGRAMS in os.environ else ["test_path_speed.py", "test_ring_speed.py"]
_SAID = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def _keep_numbers(request: pytest.FixtureRequest, evidence: Evidence) -> Iterator[None]:
    if "benchmark" not in request.fixturenames:
        yield  # The case measures and keeps for itself.
        return
    benchmark: BenchmarkFixture = request.getfixturevalue("benchmark")
    yield
    # Nothing was measured in a run of the suites: benchmarks are off there, and each body runs once.
    if benchmark.stats is None or not benchmark.enabled:
        return
    stats = benchmark.stats.stats
    evidence.number("rounds_count", stats.rounds)
    for name in ("median", "min", "max"):
        evidence.number(f"time_ms_{name}", getattr(stats, name) * 1e3)


@pytest.fixture
def said(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the end of the run, where pytest-benchmark has its table."""
    return request.config.stash.setdefault(_SAID, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print them."""
    lines = config.stash.get(_SAID, [])
    if lines:
        terminalreporter.write_sep("-", "ring and path, beside their peers of the same run")
        for line in lines:
            terminalreporter.write_line(line)
