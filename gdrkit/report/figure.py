"""Layout of the plot of a sweep in the report.

The module is pure. Sizes and depths have a logarithmic axis. The axis of values begins at 0, because an axis that
begins elsewhere makes a difference of one percent look like fifty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.report.sweep import Sweep, SweepLine

__all__ = ["Curve", "Mark", "SweepPlot", "Tick", "format_number", "make_plot"]

WIDTH, HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 370.0, 12.0, 186.0
_TICKS = 4
_SIZE_LABELS_MAX = 6
# Curves differ in colour and in dash pattern, so that a reader needs only one of them.
_STYLES = 6
_GROUPED_FROM = 10_000


@dataclass(frozen=True, slots=True)
class Tick:
    """A position on an axis and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A point, and the spread of its rounds from ``low`` to ``high``."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve: its name, the points of its polyline, its style."""

    name: str
    points: str
    marks: tuple[Mark, ...]
    style: int
    is_bound: bool


@dataclass(frozen=True, slots=True)
class SweepPlot:
    """The plot of a sweep, and a table: a row for each size, with the value and the case of each curve."""

    name: str
    unit: str
    over: str
    curves: tuple[Curve, ...]
    sizes: tuple[Tick, ...]
    values: tuple[Tick, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM
    width: int = WIDTH
    height: int = HEIGHT


def make_plot(sweep: Sweep) -> SweepPlot:
    """Return the layout of the plot of a sweep."""
    label = format_bytes if sweep.over == "size" else str
    sizes = sorted({point.at for line in sweep.lines for point in line.points})
    highest = max(max(point.value, point.highest or 0.0) for line in sweep.lines for point in line.points)
    step = _step(highest)
    top = step * math.ceil(highest / step) if highest > 0 else 1.0

    def x_of(size: int) -> float:
        span = math.log2(sizes[-1] / sizes[0]) or 1.0
        return round(_LEFT + (_RIGHT - _LEFT) * math.log2(size / sizes[0]) / span, 1)

    def y_of(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * value / top, 1)

    curves = []
    for number, line in enumerate(sweep.lines):
        marks = tuple(
            Mark(
                x_of(point.at),
                y_of(point.value),
                y_of(point.value if point.lowest is None else point.lowest),
                y_of(point.value if point.highest is None else point.highest),
            )
            for point in line.points
        )
        polyline = " ".join(f"{mark.x},{mark.y}" for mark in marks)
        curves.append(Curve(line.name, polyline, marks, number % _STYLES, line.is_bound))
    step_of_labels = math.ceil(len(sizes) / _SIZE_LABELS_MAX)
    return SweepPlot(
        name=sweep.name,
        unit=sweep.unit,
        over=sweep.over,
        curves=tuple(curves),
        sizes=tuple(Tick(x_of(size), label(size)) for size in sizes[::step_of_labels]),
        values=tuple(Tick(y_of(step * count), format_number(step * count)) for count in range(round(top / step) + 1)),
        rows=tuple((label(size), _row(size, sweep.lines)) for size in sizes),
    )


def format_number(value: float) -> str:
    """Return a number with five significant digits. Thousands are grouped."""
    if abs(value) >= _GROUPED_FROM:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def _row(size_bytes: int, lines: Sequence[SweepLine]) -> tuple[tuple[str, str], ...]:
    cells = []
    for line in lines:
        point = next((point for point in line.points if point.at == size_bytes), None)
        cells.append(("", "") if point is None else (format_number(point.value), point.case))
    return tuple(cells)


def _step(highest: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, so that the axis has about four steps."""
    if highest <= 0:
        return 1.0
    least = highest / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= least), 10 * power)
