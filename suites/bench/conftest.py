"""Fixtures of the benchmarks: their numbers go into the record of the case, and a summary into the terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.harness.evidence import Evidence

PROGRAMS = "GDRKIT_BENCH_PROGRAMS"
# Only `nox -s bench` builds the native benchmark programs and sets this variable to their folder.
collect_ignore = [] if PROGRAMS in os.environ else ["test_path_speed.py", "test_ring_speed.py"]
_SUMMARY = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def _record_numbers(request: pytest.FixtureRequest, evidence: Evidence) -> Iterator[None]:
    if "benchmark" not in request.fixturenames:
        # The case measures and records its numbers itself.
        yield
        return
    benchmark: BenchmarkFixture = request.getfixturevalue("benchmark")
    yield
    # In a run of the suites, benchmarks are disabled: each body runs once, and nothing is measured.
    if benchmark.stats is None or not benchmark.enabled:
        return
    stats = benchmark.stats.stats
    evidence.number("rounds_count", stats.rounds)
    for name in ("median", "min", "max"):
        evidence.number(f"time_ms_{name}", getattr(stats, name) * 1e3)


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed at the end of the run."""
    return request.config.stash.setdefault(_SUMMARY, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the lines of the fixture `summary`."""
    lines = config.stash.get(_SUMMARY, [])
    if lines:
        terminalreporter.write_sep("-", "measurements, next to their peers in the same run")
        for line in lines:
            terminalreporter.write_line(line)
