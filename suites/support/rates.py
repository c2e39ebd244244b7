"""How fast something moves bytes: warm-up, rounds, median and spread, into the record of the case."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import evidence, host
from gdrkit.harness.case import CASE
from gdrkit.harness.needs import declared
from gdrkit.harness.session import SESSION
from gdrkit.inventory import Machine, path_limit, topology
from gdrkit.qualify.throughput import check_numbers, ran_on_hardware
from gdrkit.report.substrate import Substrate
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pytest
    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.harness.evidence import Evidence

__all__ = ["Meter", "Rates", "judge_numbers"]

ROUNDS, WARM_UP_ROUNDS = 15, 3
# What one round moves at least, so that a clock and a wait at its end are small beside it.
ROUND_BYTES = 256 << 20
# Of software, which is measured to see that the measuring works, and whose numbers nobody is shown.
SOFTWARE_BYTES = 4 << 20
REPEATS_MAX = 256


@dataclass(frozen=True)
class Rates:
    """Of all rounds, in GB/s (10**9 bytes)."""

    median: float
    least: float
    most: float
    spread_percent: float
    rounds_count: int

    @classmethod
    def of(cls, moved_bytes: int, times_s: Sequence[float]) -> Rates:
        """`moved_bytes` in each of `times_s`; the spread is between the quartiles, beside the median."""
        rates = sorted(moved_bytes / each / 1e9 for each in times_s)
        median = statistics.median(rates)
        low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else (median, median, median)
        return cls(
            median=median,
            least=rates[0],
            most=rates[-1],
            spread_percent=(high - low) / median * 100,
            rounds_count=len(rates),
        )


class Meter:
    """Measures in a run with ``--benchmark-enable``; in any other, everything is done once and small."""

    def __init__(self, request: pytest.FixtureRequest, evidence: Evidence) -> None:
        self._request = request
        self._evidence = evidence
        self.is_on = bool(request.config.getoption("--benchmark-enable"))
        # Numbers are about the APIs that the case needs, whatever else its process has loaded.
        self._apis = sorted({need.name.partition(".")[0] for need in declared(request.node)} & {"cuda", "verbs"})
        substrate = request.config.stash[SESSION].substrate
        self._ways: dict[str, list[str]] = {}
        self._is_large = self.is_on and all(substrate.get(api) is Substrate.HARDWARE for api in self._apis)

    @property
    def turns_count(self) -> int:
        """How often everything is done, the warm-up and the rounds."""
        return WARM_UP_ROUNDS + ROUNDS if self.is_on else 1

    def length(self, wanted_bytes: int, *, small_bytes: int = 1 << 20) -> int:
        """How many bytes to take."""
        return wanted_bytes if self._is_large else min(wanted_bytes, small_bytes)

    def repeats(self, length_bytes: int) -> int:
        """How many transfers of this size are one round."""
        whole_bytes = ROUND_BYTES if self._is_large else SOFTWARE_BYTES
        return max(1, min(REPEATS_MAX, whole_bytes // length_bytes)) if self.is_on else 2

    def rate(self, work: Callable[[], object], *, moved_bytes: int) -> Rates | None:
        """Measure `work`, which moves so many bytes with each call; None where nothing is measured."""
        # Not before: pytest-benchmark complains of a case that has it and does not measure with it.
        benchmark: BenchmarkFixture = self._request.getfixturevalue("benchmark")
        benchmark.extra_info["moved_bytes"] = moved_bytes
        if not self.is_on:
            benchmark.pedantic(work)  # type: ignore[no-untyped-call]
            return None
        benchmark.pedantic(work, rounds=ROUNDS, warmup_rounds=WARM_UP_ROUNDS)  # type: ignore[no-untyped-call]
        assert benchmark.stats is not None
        return self.keep("rate", Rates.of(moved_bytes, benchmark.stats.stats.data))

    def count(self, wanted: int, *, small: int) -> int:
        """How many operations to do."""
        return wanted if self._is_large else small

    def beside(
        self,
        things: Mapping[str, Callable[[], object]],
        *,
        moved_bytes: int,
        prepare: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> dict[str, Rates]:
        """Measure several in turn, so that what slows the machine meets all of them; nothing is kept where nothing is
        measured. `prepare` comes before each, `check` after the last round of each; neither takes part of its time.
        """
        times_s: dict[str, list[float]] = {name: [] for name in things}
        for left in reversed(range(self.turns_count)):
            for name, work in things.items():
                prepare()
                times_s[name].append(_timed(work))
                if left == 0:
                    check()
        if not self.is_on:
            return {}
        return {name: self.keep(name, Rates.of(moved_bytes, each[WARM_UP_ROUNDS:])) for name, each in times_s.items()}

    def repeat(self, work: Callable[[], object], *, moved_bytes: int) -> Rates | None:
        """Measure `work` alone and keep nothing; None where nothing is measured."""
        times_s = [_timed(work) for _ in range(self.turns_count)]
        return Rates.of(moved_bytes, times_s[WARM_UP_ROUNDS:]) if self.is_on else None

    def keep(self, name: str, rates: Rates) -> Rates:
        """Into the record."""
        self.name_apis()
        self._evidence.number("rounds_count", rates.rounds_count)
        self._evidence.number(f"{name}_gb_per_s_median", rates.median)
        self._evidence.number(f"{name}_gb_per_s_min", rates.least)
        self._evidence.number(f"{name}_gb_per_s_max", rates.most)
        self._evidence.number(f"{name}_spread_percent", rates.spread_percent)
        return rates

    def way(self, *places: str, name: str = "rate") -> None:
        """Say which places (``GPU0``, ``mlx5_0``) the bytes of the rate `name` pass, for the limit of their links."""
        self._ways[name] = list(places)
        self._evidence["ways"] = self._ways

    def name_apis(self) -> None:
        """Say in the record what its numbers are about."""
        self._evidence["measured_apis"] = self._apis


def _timed(work: Callable[[], object]) -> float:
    begin_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin_ns) / 1e9


def judge_numbers(item: pytest.Item) -> None:
    """Judge what a case has measured, if that is of hardware; a number that is not as expected ends it as a failure."""
    kept, session = item.stash[CASE].evidence, item.config.stash[SESSION]
    apis, ways = kept.kept.get("measured_apis"), kept.kept.get("ways", {})
    if (
        not isinstance(apis, list)
        or not isinstance(ways, dict)
        or not ran_on_hardware(map(str, apis), session.substrate)
    ):
        return
    unread = evidence.KernelLog(lines=(), unreadable="not asked for")
    machine = Machine(files=host.DiskFiles(), facts=session.facts, kernel_log=unread, environment={})
    places = topology(machine)
    limits = {name: limit for name, way in ways.items() if (limit := path_limit(places, session.facts, way))}
    checks = check_numbers(item.nodeid, kept.numbers, profile=session.profile, limits=limits)
    kept["judged"] = checks
    failed = [each.text for each in checks if each.verdict is Verdict.FAIL]
    assert not failed, "; ".join(failed)
