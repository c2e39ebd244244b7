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

    from gdrkit.report.sweep import Line, Sweep

__all__ = ["Curve", "Mark", "Plot", "Tick", "format_number", "make_plot"]

WIDTH, HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 370.0, 12.0, 186.0
_TICKS = 4
_SIZES_SHOWN = 6
# The curves differ by colour and by dash pattern, so that either is sufficient.
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
class Plot:
    """A plot, and its values as a table: a row for each size, a cell for each curve with value and case."""

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


def make_plot(sweep: Sweep) -> Plot:
    """Return the layout of the plot of a sweep."""
    label = format_bytes if sweep.over == "size" else str
    sizes = sorted({point.at for line in sweep.lines for point in line.points})
    highest = max(max(point.value, point.most or 0.0) for line in sweep.lines for point in line.points)
    step = _step(highest)
    top = step * math.ceil(highest / step) if highest > 0 else 1.0

    def across(size_bytes: int) -> float:
        span = math.log2(sizes[-1] / sizes[0]) or 1.0
        return round(_LEFT + (_RIGHT - _LEFT) * math.log2(size_bytes / sizes[0]) / span, 1)

    def up(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * value / top, 1)

    curves = []
    for number, line in enumerate(sweep.lines):
        marks = tuple(
            Mark(
                across(point.at),
                up(point.value),
                up(point.value if point.least is None else point.least),
                up(point.value if point.most is None else point.most),
            )
            for point in line.points
        )
        polyline = " ".join(f"{mark.x},{mark.y}" for mark in marks)
        curves.append(Curve(line.name, polyline, marks, number % _STYLES, line.is_bound))
    every = math.ceil(len(sizes) / _SIZES_SHOWN)
    return Plot(
        name=sweep.name,
        unit=sweep.unit,
        over=sweep.over,
        curves=tuple(curves),
        sizes=tuple(Tick(across(size), label(size)) for size in sizes[::every]),
        values=tuple(Tick(up(step * count), format_number(step * count)) for count in range(round(top / step) + 1)),
        rows=tuple((label(size), _row(size, sweep.lines)) for size in sizes),
    )


def format_number(value: float) -> str:
    """Return a number with five significant digits. Thousands are grouped."""
    if abs(value) >= _GROUPED_FROM:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def _row(size_bytes: int, lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    cells = []
    for line in lines:
        point = next((point for point in line.points if point.at == size_bytes), None)
        cells.append(("", "") if point is None else (format_number(point.value), point.case))
    return tuple(cells)


def _step(highest: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, so that the axis has about four steps."""
    if highest <= 0:
        return 1.0
    rough = highest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough), 10 * power)
