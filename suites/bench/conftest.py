"""Fixtures of the benchmarks, which write the numbers to the record of a case and print a summary at the end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.harness.evidence import Evidence

# Environment variable with the folder of the native benchmark programs. Only `nox -s bench` builds these
# programs and sets this variable. Other runs do not collect the two files that need the programs.
PROGRAMS_VARIABLE = "GDRKIT_BENCH_PROGRAMS"
collect_ignore = [] if PROGRAMS_VARIABLE in os.environ else ["test_path_speed.py", "test_ring_speed.py"]
_SUMMARY_LINES = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def _record_numbers(request: pytest.FixtureRequest, evidence: Evidence) -> Iterator[None]:
    if "benchmark" not in request.fixturenames:
        # A case without the fixture `benchmark` measures and records its numbers itself.
        yield
        return
    benchmark: BenchmarkFixture = request.getfixturevalue("benchmark")
    yield
    # Without --benchmark-enable, each benchmark runs once and is not measured.
    if benchmark.stats is None or not benchmark.enabled:
        return
    stats = benchmark.stats.stats
    evidence.number("rounds_count", stats.rounds)
    for statistic_name in ("median", "min", "max"):
        evidence.number(f"time_ms_{statistic_name}", getattr(stats, statistic_name) * 1e3)


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> list[str]:
    """Return a list for lines that are printed at the end of the run."""
    return request.config.stash.setdefault(_SUMMARY_LINES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the lines of the fixture `summary`."""
    lines = config.stash.get(_SUMMARY_LINES, [])
    if lines:
        terminalreporter.write_sep("-", "measurements, beside measurements of other software in the same run")
        for line in lines:
            terminalreporter.write_line(line)
