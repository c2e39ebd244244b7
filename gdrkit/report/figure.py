"""Layout of the plots in the report page: measured values over transfer sizes or queue depths.

A template draws the SVG from this layout. All coordinates are in pixels. The axis of sizes and depths is logarithmic.
The axis of values begins at 0. Otherwise a difference of one percent could look large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.report.sweep import Sweep, SweepLine

__all__ = ["Curve", "Mark", "SweepPlot", "Tick", "format_number", "format_three_digits", "make_plot"]

WIDTH, HEIGHT = 380, 220
# Coordinates of the edges of the area between the axes.
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 370.0, 12.0, 186.0
# The axis of values has about this many steps.
_AXIS_STEPS = 4
_X_LABELS_MAX = 6
# Number of styles of curves. The styles differ in colour and in dash pattern, for readers who cannot see the colours.
_STYLE_COUNT = 6
_THOUSANDS_GROUPED_FROM = 10_000


@dataclass(frozen=True, slots=True)
class Tick:
    """A position on an axis, in pixels, and its label."""

    position_px: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a curve. ``lowest_y`` and ``highest_y`` are the y coordinates of the lowest and the highest round."""

    x: float
    y: float
    lowest_y: float
    highest_y: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve. ``polyline_points`` is the attribute ``points`` of the SVG polyline, ``style`` the number of a style.

    ``is_bound`` is true for a limit that was computed, not measured.
    """

    name: str
    polyline_points: str
    marks: tuple[Mark, ...]
    style: int
    is_bound: bool


@dataclass(frozen=True, slots=True)
class SweepPlot:
    """The layout of one plot, and a table with the same values.

    ``x_axis`` says what the horizontal axis shows: ``size`` or ``depth``. Each of ``rows`` has a size or depth, and for
    each curve the value and the case that measured it.
    """

    name: str
    unit: str
    x_axis: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM
    width: int = WIDTH
    height: int = HEIGHT


def make_plot(sweep: Sweep) -> SweepPlot:
    """Return the layout of the plot of a sweep."""
    # The values of the horizontal axis are sizes or depths.
    format_x_value = format_bytes if sweep.x_axis == "size" else str
    x_values = sorted({point.size_or_depth for line in sweep.lines for point in line.points})
    highest = max(max(point.value, point.highest or 0.0) for line in sweep.lines for point in line.points)
    axis_step = _choose_axis_step(highest)
    axis_end = axis_step * math.ceil(highest / axis_step) if highest > 0 else 1.0

    def compute_x(x_value: int) -> float:
        span = math.log2(x_values[-1] / x_values[0]) or 1.0
        return round(_LEFT + (_RIGHT - _LEFT) * math.log2(x_value / x_values[0]) / span, 1)

    def compute_y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * value / axis_end, 1)

    curves = []
    for curve_index, line in enumerate(sweep.lines):
        marks = tuple(
            Mark(
                compute_x(point.size_or_depth),
                compute_y(point.value),
                compute_y(point.value if point.lowest is None else point.lowest),
                compute_y(point.value if point.highest is None else point.highest),
            )
            for point in line.points
        )
        polyline_points = " ".join(f"{mark.x},{mark.y}" for mark in marks)
        curves.append(Curve(line.name, polyline_points, marks, curve_index % _STYLE_COUNT, line.is_bound))
    label_interval = math.ceil(len(x_values) / _X_LABELS_MAX)
    return SweepPlot(
        name=sweep.name,
        unit=sweep.unit,
        x_axis=sweep.x_axis,
        curves=tuple(curves),
        x_ticks=tuple(Tick(compute_x(x_value), format_x_value(x_value)) for x_value in x_values[::label_interval]),
        y_ticks=tuple(
            Tick(compute_y(axis_step * count), format_number(axis_step * count))
            for count in range(round(axis_end / axis_step) + 1)
        ),
        rows=tuple((format_x_value(x_value), _make_row(x_value, sweep.lines)) for x_value in x_values),
    )


def format_number(value: float) -> str:
    """Return a number with five significant digits, or from 10,000 on an integer with commas between thousands."""
    if abs(value) >= _THOUSANDS_GROUPED_FROM:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def format_three_digits(value: float) -> str:
    """Return a number with three significant digits. From 1,000 on, it has no digits after the point."""
    if abs(value) < 1000:  # noqa: PLR2004 - from 1,000 on, a number has no digits after the point.
        return f"{value:#.3g}".rstrip(".")
    return format_number(float(f"{value:.3g}"))


def _make_row(size_or_depth: int, lines: Sequence[SweepLine]) -> tuple[tuple[str, str], ...]:
    cells = []
    for line in lines:
        point = next((point for point in line.points if point.size_or_depth == size_or_depth), None)
        cells.append(("", "") if point is None else (format_number(point.value), point.case))
    return tuple(cells)


def _choose_axis_step(highest: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, so that the axis has about four steps."""
    if highest <= 0:
        return 1.0
    step_min = highest / _AXIS_STEPS
    power_of_ten = 10.0 ** math.floor(math.log10(step_min))
    return next(
        (factor * power_of_ten for factor in (1, 2, 2.5, 5) if factor * power_of_ten >= step_min), 10 * power_of_ten
    )
