"""Sweeps: series of measurements over transfer sizes or queue depths, which the report shows as plots.

A case may have a size as parameter, such as ``[host_to_device-16MiB]``. Its numbers are points at that size, and the
other parameters name the line. A number with a queue depth in its name, such as ``depth_16_gb_per_s_median``, is a
point at that depth. Only numbers that were measured on hardware are used.

This module also parses the names of numbers, for all other modules of the package (:func:`parse_number_name`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.limits import link_limit
from gdrkit.report.record import Verdict
from gdrkit.report.substrate import Substrate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record

__all__ = [
    "NumberName",
    "Sweep",
    "SweepLine",
    "SweepPoint",
    "describes_hardware",
    "measured_apis",
    "parse_depth",
    "parse_number_name",
    "parse_parameters",
    "sweeps",
]

# Sizes and depths begin at 1, because their axis is logarithmic. At most 12 digits are accepted, so that no number in a
# malformed record is too large for a plot.
_SIZE_PARAMETER_PATTERN = re.compile(r"^([1-9]\d{0,11})(B|KiB|MiB|GiB)$")
_BYTES_BY_SIZE_UNIT = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_STATISTIC_SUFFIX_PATTERN = re.compile(r"_(p\d+|min|max|mean|median)$")
# The suffix of each unit in a name, and the unit as text. parse_number_name() takes the first suffix with which a name
# ends, so ``gb_per_s`` must be before ``s``.
_UNITS = (
    ("gbit_per_s", "Gbit/s"),
    ("gib_per_s", "GiB/s"),
    ("gb_per_s", "GB/s"),
    ("bytes_per_s", "B/s"),
    ("s_per_gib", "s/GiB"),
    ("per_s", "1/s"),
    ("percent", "%"),
    ("ratio", "times"),
    ("count", ""),
    ("bytes", "B"),
    ("kib", "KiB"),
    ("mib", "MiB"),
    ("gib", "GiB"),
    ("mhz", "MHz"),
    ("ns", "ns"),
    ("us", "us"),
    ("ms", "ms"),
    ("s", "s"),
)
_MORE_IS_BETTER = frozenset({"gbit_per_s", "gib_per_s", "gb_per_s", "bytes_per_s", "per_s"})
_LESS_IS_BETTER = frozenset({"s_per_gib", "ns", "us", "ms", "s"})
# Matches the name of a bound, which is not a measurement: a limit of the hardware, or an expectation of a profile.
_BOUND_NAME_PATTERN = re.compile(r"(^|_)(limit|expected|expectation|threshold)(_|$)")
# A plot is drawn only if one of its lines has this number of points.
_POINTS_MIN = 2
_DEPTH_SUFFIX_PATTERN = re.compile(r"(?:^|_)depth_([1-9]\d{0,11})$")
# A value outside of this range cannot be a measurement. In a plot it would make all other values look equal.
_VALUE_MIN, _VALUE_MAX = 1e-100, 1e100
_LINK_LIMIT_NAME = "limit of the link"


@dataclass(frozen=True, slots=True)
class NumberName:
    """The parts of the name of a number, such as ``rate_gb_per_s_median``.

    Attributes
    ----------
    base : str
        The quantity: ``rate``.
    unit : str
        The unit: ``gb_per_s``; empty if the name has none.
    statistic : str
        The statistic: ``median``; empty if the name has none.
    """

    base: str
    unit: str
    statistic: str

    @property
    def is_bound(self) -> bool:
        """Whether the number is a limit or an expectation, not a measurement."""
        return _BOUND_NAME_PATTERN.search(self.base) is not None

    @property
    def better_sign(self) -> int:
        """1 if more is better, -1 if less is better, 0 if neither is."""
        return (self.unit in _MORE_IS_BETTER) - (self.unit in _LESS_IS_BETTER)

    @property
    def unit_words(self) -> str:
        """The unit as text: ``GB/s`` for ``gb_per_s``."""
        return dict(_UNITS).get(self.unit, self.unit)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A measurement at a size in bytes or a queue depth, with the lowest and highest value of its rounds."""

    size_or_depth: int
    value: float
    lowest: float | None
    highest: float | None
    case: str


@dataclass(frozen=True, slots=True)
class SweepLine:
    """A line of a plot. Its points differ only in size or depth. A line of bounds is drawn dashed."""

    name: str
    points: tuple[SweepPoint, ...]
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """The data of one plot. ``x_axis`` says what its horizontal axis shows: ``size`` or ``depth``."""

    name: str
    unit: str
    x_axis: str
    lines: tuple[SweepLine, ...]


def parse_number_name(name: str) -> NumberName:
    """Return the parts of the name of a number."""
    match = _STATISTIC_SUFFIX_PATTERN.search(name)
    base_name, statistic = (name[: match.start()], match[1]) if match else (name, "")
    for unit, _ in _UNITS:
        if base_name == unit or base_name.endswith(f"_{unit}"):
            return NumberName(base_name.removesuffix(unit).rstrip("_"), unit, statistic)
    return NumberName(base_name, "", statistic)


def measured_apis(record: Record) -> tuple[str, ...]:
    """Return the APIs that the numbers of a record measure.

    These are the APIs that the case states as evidence, else the APIs that the case needs, else all loaded APIs.
    """
    stated_apis = record.evidence.get("measured_apis")
    if isinstance(stated_apis, list) and stated_apis:
        return tuple(map(str, stated_apis))
    return record.uses or tuple(record.substrate)


def describes_hardware(record: Record) -> bool:
    """Return whether the case passed or is unproven, and every API that its numbers measure ran on hardware."""
    apis = measured_apis(record)
    substrates = [record.substrate.get(api, Substrate.UNKNOWN.value) for api in apis]
    is_hardware = bool(substrates) and all(substrate == Substrate.HARDWARE.value for substrate in substrates)
    return is_hardware and record.verdict in (Verdict.PASS, Verdict.UNPROVEN)


def sweeps(records: Iterable[Record], facts: Facts) -> tuple[Sweep, ...]:
    """Return the plots of a run: for each test function with sizes or depths, one plot per unit and axis.

    The plot of a rate also has a line for the limit of the links, if `facts` contain this limit.
    """
    points_by_plot: dict[tuple[str, str, str], dict[tuple[str, bool], list[SweepPoint]]] = {}
    for record in records:
        for x_axis, unit, line_name, is_bound, point in (
            _make_points(record, facts) if describes_hardware(record) else ()
        ):
            function_name = record.case.partition("[")[0]
            points_by_plot.setdefault((function_name, unit, x_axis), {}).setdefault((line_name, is_bound), []).append(
                point
            )
    return tuple(
        Sweep(function_name, dict(_UNITS)[unit], x_axis, _make_lines(points_by_line))
        for (function_name, unit, x_axis), points_by_line in points_by_plot.items()
        if any(len(points) >= _POINTS_MIN for points in points_by_line.values())
    )


def _make_points(record: Record, facts: Facts) -> Iterator[tuple[str, str, str, bool, SweepPoint]]:
    """Yield every point of a record as (axis, unit, name of the line, whether the line is a bound, point)."""
    size_bytes, other_parameters = parse_parameters(record.case)
    link_rate_limit = link_limit(record, facts)
    for number_name, value in record.numbers.items():
        name_parts = parse_number_name(number_name)
        if name_parts.statistic not in ("", "median") or not name_parts.better_sign or not _is_drawable(value):
            continue
        base, depth = parse_depth(name_parts.base)
        size_or_depth = depth or size_bytes
        if size_or_depth is None:
            continue
        x_axis = "depth" if depth else "size"
        # The name of a line omits ``rate``, because the unit shows that the number is a rate.
        line_name = (
            " ".join(filter(None, (*other_parameters, "" if base == "rate" else base))).replace("_", " ")
            or name_parts.unit_words
        )
        range_ends = [
            record.numbers.get(f"{number_name.removesuffix('_median')}_{statistic}") for statistic in ("min", "max")
        ]
        lowest, highest = (
            range_end if range_end is not None and _is_drawable(range_end) else None for range_end in range_ends
        )
        yield (
            x_axis,
            name_parts.unit,
            line_name,
            name_parts.is_bound,
            SweepPoint(size_or_depth, value, lowest, highest, record.case),
        )
        for bound_name, bound in _list_case_bounds(record, number_name, value):
            yield x_axis, name_parts.unit, bound_name, True, SweepPoint(size_or_depth, bound, None, None, record.case)
        if name_parts.unit == "gb_per_s" and link_rate_limit is not None:
            yield (
                x_axis,
                name_parts.unit,
                _LINK_LIMIT_NAME,
                True,
                SweepPoint(size_or_depth, link_rate_limit.gb_per_s, None, None, record.case),
            )


def _is_drawable(value: float) -> bool:
    """Return whether a value can be drawn in a plot whose axis begins at 0."""
    return value == 0 or _VALUE_MIN <= value <= _VALUE_MAX


def _list_case_bounds(record: Record, number_name: str, value: float) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each bound with which the case compared the number `number_name`."""
    # The evidence "judged" is the list of the comparisons of a number with a bound.
    comparisons = record.evidence.get("judged")
    for comparison in comparisons if isinstance(comparisons, list) else ():
        bound = (
            comparison.get("bound")
            if isinstance(comparison, dict) and comparison.get("number") == number_name
            else None
        )
        if isinstance(bound, int | float) and not isinstance(bound, bool) and _is_drawable(bound):
            # The case did not fail, so its value met the bound: a bound below the value is a minimum.
            yield ("at least" if bound <= value else "at most"), float(bound)


def _make_lines(points_by_line: dict[tuple[str, bool], list[SweepPoint]]) -> tuple[SweepLine, ...]:
    """Return the lines of a plot: the measured lines, and then the bounds. One point is drawn per size or depth."""
    all_lines = [
        SweepLine(
            line_name,
            tuple(
                sorted({point.size_or_depth: point for point in points}.values(), key=lambda point: point.size_or_depth)
            ),
            is_bound,
        )
        for (line_name, is_bound), points in points_by_line.items()
    ]
    measured_lines = [line for line in all_lines if not line.is_bound]
    bound_line_by_values: dict[tuple[tuple[int, float], ...], SweepLine] = {}
    for line in all_lines:
        if line.is_bound:
            bound_values = tuple((point.size_or_depth, point.value) for point in line.points)
            # A bound that several lines share is drawn once. Its name keeps only the last word, because the other words
            # name one of the lines.
            is_shared = bound_values in bound_line_by_values
            bound_line_by_values[bound_values] = SweepLine(
                line.name.rpartition(" ")[2] if is_shared else line.name, line.points, is_bound=True
            )
    return (*measured_lines, *bound_line_by_values.values())


def parse_depth(base: str) -> tuple[str, int | None]:
    """Split a quantity such as ``read_depth_16`` into the quantity without the depth, and the depth, or None."""
    match = _DEPTH_SUFFIX_PATTERN.search(base)
    return (base[: match.start()], int(match[1])) if match else (base, None)


def parse_parameters(case: str) -> tuple[int | None, tuple[str, ...]]:
    """Return the size in bytes (None without one) and the other parameters in the id of a case."""
    _, _, parameters = case.partition("[")
    size_bytes: int | None = None
    other_parameters: list[str] = []
    for parameter in parameters.removesuffix("]").split("-") if parameters else ():
        size_match = _SIZE_PARAMETER_PATTERN.match(parameter)
        if size_match and size_bytes is None:
            size_bytes = int(size_match[1]) * _BYTES_BY_SIZE_UNIT[size_match[2]]
        else:
            other_parameters.append(parameter)
    return size_bytes, tuple(other_parameters)
