"""Measurement of transfer rates in cases: warm-up, rounds, median and spread, which are stored in the case's record.

The fixture `meter` of a case is a :class:`Meter`. :func:`check_expected_numbers` compares the rates with a profile.
"""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import evidence, host
from gdrkit.harness.case import CASE_KEY
from gdrkit.harness.needs import declared
from gdrkit.harness.session import SESSION_KEY
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

# A measurement has 3 warm-up rounds, whose rates are discarded, and 15 measured rounds.
ROUNDS, WARM_UP_ROUNDS = 15, 3
# A round on hardware repeats a transfer, at most REPEATS_MAX times, up to this number of bytes. So the start and the
# end of a round take little time in comparison.
ROUND_BYTES = 256 << 20
# A smaller round is sufficient on software twins (libraries that emulate the hardware), because their rates are not of
# interest.
SOFTWARE_ROUND_BYTES = 4 << 20
# The API that a case measures, by the prefix of a need of the case (`cuda` in `cuda.device`).
_API_BY_NEED_PREFIX = {"cuda": "cuda", "gaudi": "hlthunk", "verbs": "verbs"}
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
        rates_gb_per_s = sorted(moved_bytes / time_s / 1e9 for time_s in times_s)
        median = statistics.median(rates_gb_per_s)
        first_quartile, _, third_quartile = (
            statistics.quantiles(rates_gb_per_s, n=4) if len(rates_gb_per_s) > 1 else (median, median, median)
        )
        return cls(
            median=median,
            minimum=rates_gb_per_s[0],
            maximum=rates_gb_per_s[-1],
            spread_percent=(third_quartile - first_quartile) / median * 100,
            rounds_count=len(rates_gb_per_s),
            cpu_s_per_gib=cpu_s / len(rates_gb_per_s) / (moved_bytes / GIB),
        )


class Meter:
    """Measures transfers if pytest has the option ``--benchmark-enable``. Otherwise, small transfers run once.

    Attributes
    ----------
    is_on : bool
        Whether pytest has the option.
    """

    def __init__(self, request: pytest.FixtureRequest, evidence: Evidence) -> None:
        self._request = request
        self._evidence = evidence
        self.is_on = bool(request.config.getoption("--benchmark-enable"))
        # The measured APIs are the APIs that the case needs. The process may have loaded further APIs.
        need_prefixes = {need.name.partition(".")[0] for need in declared(request.node)}
        self._apis = sorted(api for prefix, api in _API_BY_NEED_PREFIX.items() if prefix in need_prefixes)
        substrates = request.config.stash[SESSION_KEY].substrates
        self._device_names_by_rate: dict[str, list[str]] = {}
        self._is_hardware_measured = self.is_on and all(substrates.get(api) is Substrate.HARDWARE for api in self._apis)

    @property
    def run_count(self) -> int:
        """Number of calls of each measured function, warm-up rounds included."""
        return WARM_UP_ROUNDS + ROUNDS if self.is_on else 1

    def choose_length(self, full_bytes: int, *, small_bytes: int = 1 << 20) -> int:
        """Return the length to use: `full_bytes` if hardware is measured, else at most `small_bytes`."""
        return full_bytes if self._is_hardware_measured else min(full_bytes, small_bytes)

    def choose_count(self, full_count: int, *, small_count: int) -> int:
        """Return the number of operations to use: `full_count` if hardware is measured, else `small_count`."""
        return full_count if self._is_hardware_measured else small_count

    def count_transfers_per_round(self, length_bytes: int) -> int:
        """Return the number of transfers of this length in a round; 2 if the meter is off."""
        round_bytes = ROUND_BYTES if self._is_hardware_measured else SOFTWARE_ROUND_BYTES
        return max(1, min(REPEATS_MAX, round_bytes // length_bytes)) if self.is_on else 2

    def measure(self, transfer: Callable[[], object], *, moved_bytes: int) -> Rates | None:
        """Measure `transfer`, which transfers `moved_bytes`, and record the rate. Return None if the meter is off."""
        # The fixture is requested only here: pytest-benchmark warns about a case that requests it but does not use it.
        benchmark: BenchmarkFixture = self._request.getfixturevalue("benchmark")
        benchmark.extra_info["moved_bytes"] = moved_bytes
        if not self.is_on:
            benchmark.pedantic(transfer)  # type: ignore[no-untyped-call]
            return None
        cpu_begin_s = cpu_time_s()
        benchmark.pedantic(transfer, rounds=ROUNDS, warmup_rounds=WARM_UP_ROUNDS)  # type: ignore[no-untyped-call]
        # The measured processor time includes the warm-up rounds, so only the share of the other rounds is used.
        cpu_s = (cpu_time_s() - cpu_begin_s) * ROUNDS / self.run_count
        assert benchmark.stats is not None
        return self.record("rate", Rates.from_times(moved_bytes, benchmark.stats.stats.data, cpu_s=cpu_s))

    def measure_unrecorded(self, transfer: Callable[[], object], *, moved_bytes: int) -> Rates | None:
        """Measure `transfer`, and return its rates without recording them. Return None if the meter is off."""
        rounds = [_measure_round(transfer) for _ in range(self.run_count)]
        return _compute_rates(moved_bytes, rounds) if self.is_on else None

    def measure_methods(
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
        for runs_left in reversed(range(self.run_count)):
            for name, transfer in methods.items():
                prepare()
                rounds[name].append(_measure_round(transfer))
                if runs_left == 0:
                    check()
        if not self.is_on:
            return {}
        return {
            name: self.record(name, _compute_rates(moved_bytes, method_rounds))
            for name, method_rounds in rounds.items()
        }

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
        self._device_names_by_rate[name] = list(devices)
        self._evidence["ways"] = self._device_names_by_rate

    def record_apis(self) -> None:
        """Record the measured APIs."""
        self._evidence["measured_apis"] = self._apis


def cpu_time_s() -> float:
    """Return the processor time of this process so far, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _measure_round(transfer: Callable[[], object]) -> tuple[float, float]:
    """Call `transfer`, and return its duration and the processor time that this process used for it, in seconds."""
    cpu_before_s, begin_ns = cpu_time_s(), time.perf_counter_ns()
    transfer()
    return (time.perf_counter_ns() - begin_ns) / 1e9, cpu_time_s() - cpu_before_s


def _compute_rates(moved_bytes: int, rounds: Sequence[tuple[float, float]]) -> Rates:
    """Return the rates of the rounds after the warm-up rounds.

    `rounds` holds the duration and the processor time of each round, in seconds.
    """
    counted_rounds = rounds[WARM_UP_ROUNDS:]
    times_s = [duration_s for duration_s, _ in counted_rounds]
    return Rates.from_times(moved_bytes, times_s, cpu_s=sum(cpu_s for _, cpu_s in counted_rounds))


def check_expected_numbers(item: pytest.Item) -> None:
    """Fail a case if its numbers were measured on hardware and are worse than the profile of the machine expects."""
    case_evidence, session = item.stash[CASE_KEY].evidence, item.config.stash[SESSION_KEY]
    apis, device_names_by_rate = case_evidence.values.get("measured_apis"), case_evidence.values.get("ways", {})
    if (
        not isinstance(apis, list)
        or not isinstance(device_names_by_rate, dict)
        or not ran_on_hardware(map(str, apis), session.substrates)
    ):
        return
    no_kernel_log = evidence.KernelLog(lines=(), unreadable="not queried")
    machine = Machine(files=host.DiskFiles(), facts=session.facts, kernel_log=no_kernel_log, environment={})
    machine_topology = topology(machine)
    rate_limits = {
        rate_name: limit
        for rate_name, device_names in device_names_by_rate.items()
        if (limit := path_limit(machine_topology, session.facts, device_names))
    }
    checks = check_numbers(item.nodeid, case_evidence.numbers, profile=session.profile, limits=rate_limits)
    case_evidence["judged"] = checks
    failures = [check.text for check in checks if check.verdict is Verdict.FAIL]
    assert not failures, "; ".join(failures)
