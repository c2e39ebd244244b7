"""`python -m hardware.peers --speed`: the speed of the verbs twin, of TCP and of a memory copy, in one run.

Every figure is measured once in each turn, so that other load on the machine affects all figures. A ratio is the
quotient of the medians of two figures.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware.peers.programs import StockProgram
from hardware.peers.records import make_record, query_debian_version
from hardware.peers.run import DeviceUnderTest, run_program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gdrkit.report import Record

__all__ = ["ProgramFailedError", "make_speed_numbers", "make_speed_record", "measure_speed"]

TURNS_COUNT = 5
_LARGE_BYTES = 1 << 20  # Length of a transfer that measures a bandwidth.
_MIB_PER_GB = 1e9 / (1 << 20)
_COPY_DURATION_S = 0.5
# perftest prints t_min, t_max and t_typical after the number of bytes and of iterations.
_PERFTEST_TYPICAL_US = r"^\s*8\s+\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)"
# With --report_gbits, perftest prints the peak and the average bandwidth, in Gb/s.
_PERFTEST_AVERAGE_GBITPS = rf"^\s*{_LARGE_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)"
# ucx_perftest prints the median, average and overall time, then the average and overall bandwidth in MiB/s.
_UCX_MEDIAN_US = r"^Final:\s+\d+\s+([\d.]+)"
_UCX_OVERALL_MIBPS = r"^Final:\s+\d+\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+([\d.]+)"


class ProgramFailedError(Exception):
    """A program of the comparison did not print its figure."""


@dataclass(frozen=True, slots=True)
class _SpeedGoal:
    """A figure of the twin, the figure of the reference, and the limit of their ratio.

    Attributes
    ----------
    name : str
        Name of the ratio in the record.
    figure_name, reference_name : str
        Names of the two figures, the figure of the twin and the reference.
    limit : float
        Limit of the ratio, the figure divided by the reference.
    is_upper_limit : bool
        Whether the ratio must be at most the limit; else it must be at least the limit.
    """

    name: str
    figure_name: str
    reference_name: str
    limit: float
    is_upper_limit: bool = False

    def is_reached(self, ratio: float) -> bool:
        """Return whether a ratio is within the limit."""
        return ratio <= self.limit if self.is_upper_limit else ratio >= self.limit

    def __str__(self) -> str:
        return f"{self.figure_name} / {self.reference_name} {'<=' if self.is_upper_limit else '>='} {self.limit:g}"


_GOALS = (
    _SpeedGoal("write_lat_over_tcp_ratio", "ib_write_lat_us", "ucx_tcp_tag_lat_us", 0.6, is_upper_limit=True),
    _SpeedGoal("write_bw_over_memcpy_ratio", "ib_write_bw_gbps", "memcpy_gbps", 1.0),
    _SpeedGoal("read_bw_over_memcpy_ratio", "ib_read_bw_gbps", "memcpy_gbps", 0.8),
    _SpeedGoal("put_bw_over_tcp_ratio", "ucx_verbs_put_bw_gbps", "ucx_tcp_put_bw_gbps", 2.0),
)


def measure_speed(device_under_test: DeviceUnderTest, print_line: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the values of every figure, one for each turn. Names end in the unit: ``us``, or ``gbps`` for 10^9 B/s.

    Raises
    ------
    ProgramFailedError
        A program did not print its figure.
    """
    device_without_twins = dataclasses.replace(device_under_test, launcher=())
    put_options = ("-t", "ucp_put_bw", "-s", str(_LARGE_BYTES), "-n", "2000")
    # In UCX_TLS, rc_v means: rc_verbs for the transfers, and ud_verbs to set up connections.
    verbs_settings = ("UCX_TLS=rc_v,self", "UCX_NET_DEVICES={device}:1")
    tcp_settings = ("UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo")
    measure_by_figure: dict[str, Callable[[], float]] = {
        "ucx_tcp_tag_lat_us": lambda: _run_and_parse(
            _make_ucx_program(tcp_settings, "-t", "tag_lat", "-s", "8", "-n", "20000"),
            device_without_twins,
            _UCX_MEDIAN_US,
        ),
        "ib_write_lat_us": lambda: _run_and_parse(
            _make_perftest_program("ib_write_lat", "-s", "8", "-n", "20000"), device_under_test, _PERFTEST_TYPICAL_US
        ),
        "memcpy_gbps": _measure_memcpy_gbps,
        "ib_write_bw_gbps": lambda: _measure_bandwidth_gbps("ib_write_bw", device_under_test),
        "ib_read_bw_gbps": lambda: _measure_bandwidth_gbps("ib_read_bw", device_under_test),
        "ucx_tcp_put_bw_gbps": lambda: (
            _run_and_parse(_make_ucx_program(tcp_settings, *put_options), device_without_twins, _UCX_OVERALL_MIBPS)
            / _MIB_PER_GB
        ),
        "ucx_verbs_put_bw_gbps": lambda: (
            _run_and_parse(_make_ucx_program(verbs_settings, *put_options), device_under_test, _UCX_OVERALL_MIBPS)
            / _MIB_PER_GB
        ),
    }
    values_by_figure: dict[str, list[float]] = {name: [] for name in measure_by_figure}
    for turn in range(TURNS_COUNT):
        for name, measure in measure_by_figure.items():
            values_by_figure[name].append(measure())
        print_line(
            f"turn {turn + 1}: " + ", ".join(f"{name} {values_by_figure[name][-1]:.2f}" for name in measure_by_figure)
        )
    return values_by_figure


def make_speed_numbers(values_by_figure: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median, least and largest value of every figure, and the ratios of the goals."""
    numbers = {}
    for name, figure_values in values_by_figure.items():
        stem, unit = name.rsplit("_", 1)
        for statistic, value in (
            ("median", statistics.median(figure_values)),
            ("min", min(figure_values)),
            ("max", max(figure_values)),
        ):
            numbers[f"{stem}_{statistic}_{unit}"] = value
    for goal in _GOALS:
        numbers[goal.name] = statistics.median(values_by_figure[goal.figure_name]) / statistics.median(
            values_by_figure[goal.reference_name]
        )
    return numbers


def make_speed_record(
    values_by_figure: Mapping[str, list[float]], *, load: tuple[float, float], duration_s: float
) -> Record:
    """Return the record of a run. The run passed if every goal is reached.

    `load` is the load average of the last minute before and after the run.
    """
    numbers = make_speed_numbers(values_by_figure)
    missed_goals = [
        f"{goal} does not hold: {numbers[goal.name]:.2f}" for goal in _GOALS if not goal.is_reached(numbers[goal.name])
    ]
    return make_record(
        "speed",
        failure="; ".join(missed_goals),
        evidence={
            "turns": dict(values_by_figure),
            "load_1min": list(load),
            "cores": os.cpu_count(),
            "package_versions": {package: query_debian_version(package) for package in ("perftest", "ucx-utils")},
        },
        numbers=numbers,
        substrate="twin",
        duration_s=duration_s,
    )


def _make_perftest_program(program_name: str, *options: str) -> StockProgram:
    command = (program_name, "-F", "-d", "{device}", "-x", "{gid}", "-p", "{port}", *options)
    return StockProgram(program_name, "perftest", (*command, "{address}"), command)


def _measure_bandwidth_gbps(program_name: str, device_under_test: DeviceUnderTest) -> float:
    bandwidth_program = _make_perftest_program(program_name, "-s", str(_LARGE_BYTES), "-n", "5000", "--report_gbits")
    # perftest prints 10^9 bits per second. The figure is in 10^9 bytes per second.
    return _run_and_parse(bandwidth_program, device_under_test, _PERFTEST_AVERAGE_GBITPS) / 8


def _make_ucx_program(settings: tuple[str, ...], *options: str) -> StockProgram:
    command = ("env", *settings, "ucx_perftest", "-p", "{port}")
    return StockProgram(f"{settings[0]} ucx_perftest", "ucx-utils", (*command, *options, "{address}"), command)


def _run_and_parse(program: StockProgram, device_under_test: DeviceUnderTest, pattern: str) -> float:
    """Run a program, and return the number that the group of `pattern` matches in the output of the client."""
    outcome = run_program(program, device_under_test)
    match = re.search(pattern, outcome.client_output, re.MULTILINE)
    if outcome.failure or match is None:
        reason = outcome.failure or f"the output does not contain {pattern!r}"
        message = f"{outcome.command}: {reason}:\n{outcome.client_output}"
        raise ProgramFailedError(message)
    return float(match[1])


def _measure_memcpy_gbps() -> float:
    """Return the rate at which one thread copies a block of 1 MiB again and again."""
    source, destination = (ctypes.create_string_buffer(_LARGE_BYTES) for _ in range(2))
    copies_count = 0
    begin_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - begin_s) < _COPY_DURATION_S:
        ctypes.memmove(destination, source, _LARGE_BYTES)
        copies_count += 1
    return copies_count * _LARGE_BYTES / elapsed_s / 1e9
