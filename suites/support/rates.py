"""Measurement of transfer rates in cases: warm-up, rounds, median and spread. The record of the case gets the rates.

Cases use the fixture `meter` with a :class:`Meter`. :func:`check_expected_numbers` compares the rates with a profile.
"""

from __future__ import annotations

import resource
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
from gdrkit.units import GIB
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pytest
    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.harness.evidence import Evidence

__all__ = ["WARM_UP_ROUNDS", "Meter", "Rates", "check_expected_numbers", "cpu_time_s"]

# A measurement has 3 warm-up rounds, which are not counted, and 15 rounds.
ROUNDS, WARM_UP_ROUNDS = 15, 3
# A round on hardware transfers at least this many bytes, so that its start and its end take little of the time.
ROUND_BYTES = 256 << 20
# With software twins (libraries that emulate the hardware), only the measurement itself is tested, so a smaller round
# is sufficient.
SOFTWARE_ROUND_BYTES = 4 << 20
# The API that the numbers of a case measure, by the subject of its needs (the part of a name before the dot).
_API_OF_SUBJECT = {"cuda": "cuda", "gaudi": "hlthunk", "verbs": "verbs"}
# Maximum number of transfers in a round.
REPEATS_MAX = 256


@dataclass(frozen=True)
class Rates:
    """Rates of all rounds, in GB/s (10**9 bytes).

    Attributes
    ----------
    median, minimum, maximum : float
        Median, lowest and highest rate.
    spread_percent : float
        Difference between the first and the third quartile, in percent of the median.
    rounds_count : int
        Number of rounds.
    cpu_s_per_gib : float
        Processor time for each GiB, in seconds: the mean of all rounds.
    """

    median: float
    minimum: float
    maximum: float
    spread_percent: float
    rounds_count: int
    cpu_s_per_gib: float

    @classmethod
    def from_times(cls, moved_bytes: int, times_s: Sequence[float], *, cpu_s: float) -> Rates:
        """Return the rates of rounds.

        Parameters
        ----------
        moved_bytes : int
            Number of bytes that each round transferred.
        times_s : sequence of float
            Duration of each round, in seconds.
        cpu_s : float
            Processor time of all rounds together, in seconds.
        """
        rates = sorted(moved_bytes / time_s / 1e9 for time_s in times_s)
        median = statistics.median(rates)
        low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else (median, median, median)
        return cls(
            median=median,
            minimum=rates[0],
            maximum=rates[-1],
            spread_percent=(high - low) / median * 100,
            rounds_count=len(rates),
            cpu_s_per_gib=cpu_s / len(rates) / (moved_bytes / GIB),
        )


class Meter:
    """Measures transfers if pytest has the option ``--benchmark-enable``. Otherwise, small transfers run once.

    Attributes
    ----------
    is_on : bool
        Whether the option is set, so that transfers are measured.
    """

    def __init__(self, request: pytest.FixtureRequest, evidence: Evidence) -> None:
        self._request = request
        self._evidence = evidence
        self.is_on = bool(request.config.getoption("--benchmark-enable"))
        # The numbers are about the APIs that the case needs. Its process may have loaded more APIs.
        subjects = {need.name.partition(".")[0] for need in declared(request.node)}
        self._apis = sorted(api for subject, api in _API_OF_SUBJECT.items() if subject in subjects)
        substrate = request.config.stash[SESSION].substrate
        self._paths: dict[str, list[str]] = {}
        self._measures_hardware = self.is_on and all(substrate.get(api) is Substrate.HARDWARE for api in self._apis)

    @property
    def runs_count(self) -> int:
        """Number of calls of each measured function: warm-up rounds and rounds."""
        return WARM_UP_ROUNDS + ROUNDS if self.is_on else 1

    def length(self, full_bytes: int, *, small_bytes: int = 1 << 20) -> int:
        """Return the length to use: `full_bytes` if hardware is measured, else at most `small_bytes`."""
        return full_bytes if self._measures_hardware else min(full_bytes, small_bytes)

    def count(self, full: int, *, small: int) -> int:
        """Return the number of operations to use: `full` if hardware is measured, else `small`."""
        return full if self._measures_hardware else small

    def repeats(self, length_bytes: int) -> int:
        """Return how many transfers of this length make up a round."""
        round_bytes = ROUND_BYTES if self._measures_hardware else SOFTWARE_ROUND_BYTES
        return max(1, min(REPEATS_MAX, round_bytes // length_bytes)) if self.is_on else 2

    def measure(self, work: Callable[[], object], *, moved_bytes: int) -> Rates | None:
        """Measure `work`, which transfers `moved_bytes`, and record the rate. Return None if the meter is off."""
        # The fixture is requested only here: pytest-benchmark warns about a case that requests it but does not use it.
        benchmark: BenchmarkFixture = self._request.getfixturevalue("benchmark")
        benchmark.extra_info["moved_bytes"] = moved_bytes
        if not self.is_on:
            benchmark.pedantic(work)  # type: ignore[no-untyped-call]
            return None
        began_s = cpu_time_s()
        benchmark.pedantic(work, rounds=ROUNDS, warmup_rounds=WARM_UP_ROUNDS)  # type: ignore[no-untyped-call]
        # The processor time includes the warm-up rounds. Each of them counts as an average round.
        cpu_s = (cpu_time_s() - began_s) * ROUNDS / self.runs_count
        assert benchmark.stats is not None
        return self.record("rate", Rates.from_times(moved_bytes, benchmark.stats.stats.data, cpu_s=cpu_s))

    def measure_unrecorded(self, work: Callable[[], object], *, moved_bytes: int) -> Rates | None:
        """Measure `work`, and return its rates without recording them. Return None if the meter is off."""
        rounds = [_measured_round(work) for _ in range(self.runs_count)]
        return _rates_of(moved_bytes, rounds) if self.is_on else None

    def compare(
        self,
        methods: Mapping[str, Callable[[], object]],
        *,
        moved_bytes: int,
        prepare: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> dict[str, Rates]:
        """Measure several methods and record their rates.

        Each round runs each method once, so that the load of the machine affects all methods equally.

        Parameters
        ----------
        methods : Mapping of str to callable
            The methods by name.
        moved_bytes : int
            Number of bytes that a call of a method transfers.
        prepare : callable
            Function that is called before each call of a method, outside of the measured time.
        check : callable
            Function that is called after the last call of each method.

        Returns
        -------
        dict of str to Rates
            The rates by name of the method; empty if the meter is off.
        """
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for runs_left in reversed(range(self.runs_count)):
            for name, work in methods.items():
                prepare()
                rounds[name].append(_measured_round(work))
                if runs_left == 0:
                    check()
        if not self.is_on:
            return {}
        return {name: self.record(name, _rates_of(moved_bytes, of_method)) for name, of_method in rounds.items()}

    def record(self, name: str, rates: Rates) -> Rates:
        """Add the rates to the record of the case under `name`, and return them."""
        self.record_apis()
        self._evidence.number("rounds_count", rates.rounds_count)
        self._evidence.number(f"{name}_gb_per_s_median", rates.median)
        self._evidence.number(f"{name}_gb_per_s_min", rates.minimum)
        self._evidence.number(f"{name}_gb_per_s_max", rates.maximum)
        self._evidence.number(f"{name}_spread_percent", rates.spread_percent)
        self._evidence.number(f"{name}_cpu_s_per_gib", rates.cpu_s_per_gib)
        return rates

    def record_path(self, *devices: str, name: str = "rate") -> None:
        """Record the devices, such as ``GPU0`` and ``mlx5_0``, whose links limit the rate `name`."""
        self._paths[name] = list(devices)
        self._evidence["ways"] = self._paths

    def record_apis(self) -> None:
        """Record the APIs that the numbers are about."""
        self._evidence["measured_apis"] = self._apis


def cpu_time_s() -> float:
    """Return the processor time of this process so far, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _measured_round(work: Callable[[], object]) -> tuple[float, float]:
    """Call `work`, and return its duration and the processor time that this process used for it, in seconds."""
    cpu_before_s, begin_ns = cpu_time_s(), time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin_ns) / 1e9, cpu_time_s() - cpu_before_s


def _rates_of(moved_bytes: int, rounds: Sequence[tuple[float, float]]) -> Rates:
    """Return the rates of all rounds after the warm-up rounds, each with its duration and its processor time."""
    counted_rounds = rounds[WARM_UP_ROUNDS:]
    times_s = [duration_s for duration_s, _ in counted_rounds]
    return Rates.from_times(moved_bytes, times_s, cpu_s=sum(cpu_s for _, cpu_s in counted_rounds))


def check_expected_numbers(item: pytest.Item) -> None:
    """Fail a case if its numbers were measured on hardware and are worse than the profile of the machine expects."""
    case_evidence, session = item.stash[CASE].evidence, item.config.stash[SESSION]
    apis, paths = case_evidence.values.get("measured_apis"), case_evidence.values.get("ways", {})
    if (
        not isinstance(apis, list)
        or not isinstance(paths, dict)
        or not ran_on_hardware(map(str, apis), session.substrate)
    ):
        return
    no_kernel_log = evidence.KernelLog(lines=(), unreadable="not queried")
    machine = Machine(files=host.DiskFiles(), facts=session.facts, kernel_log=no_kernel_log, environment={})
    machine_topology = topology(machine)
    limits = {
        name: limit for name, path in paths.items() if (limit := path_limit(machine_topology, session.facts, path))
    }
    checks = check_numbers(item.nodeid, case_evidence.numbers, profile=session.profile, limits=limits)
    case_evidence["judged"] = checks
    failures = [check.text for check in checks if check.verdict is Verdict.FAIL]
    assert not failures, "; ".join(failures)
