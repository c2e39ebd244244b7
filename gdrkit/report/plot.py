"""Plots of values over transfer sizes as one self-contained SVG or HTML file, for ``gdrkit bench --plot``.

The axis of sizes is logarithmic. The caller passes a note, such as that the numbers were not measured on hardware. The
note is a part of the picture, so that it is not lost when the picture is copied.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Line", "Plot", "check_plot_name", "draw", "write_plot"]

_WIDTH, _HEIGHT = 960, 480
# Widths of the margins around the axes. The right margin has the names of the lines.
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 76, 56
_COLOURS = ("#2f6fd0", "#1f8a5b", "#c2571a", "#7a4fb5", "#8a6d00")
_AXIS_STEPS_MAX = 6

# The style follows the light or dark colour scheme of the browser.
_STYLE = """
svg { color: #1c1e21; background: #fcfcfa; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { color: #e4e6e9; background: #15171a; } }
text { fill: currentColor; } .title { font-size: 17px; font-weight: 600; } .note { font-size: 12px; opacity: .75; }
.axis { stroke: currentColor; opacity: .25; } path { fill: none; stroke-width: 2.5; }
""".strip()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot. Each point is a size in bytes and a value."""

    name: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """The contents of a plot: texts, and lines whose values all have the same unit."""

    title: str
    note: str
    unit: str
    lines: Sequence[Line]


def draw(plot: Plot) -> str:
    """Return the plot as SVG.

    Raises
    ------
    UsageError
        No line has a point.
    """
    sizes = sorted({size for line in plot.lines for size, _ in line.points})
    if not sizes:
        message = "the plot cannot be drawn, because no line has a point"
        raise UsageError(message)
    axis_end = max(value for line in plot.lines for _, value in line.points) or 1.0
    axis_step = _choose_axis_step(axis_end)
    axis_end = math.ceil(axis_end / axis_step) * axis_step
    first_log2, last_log2 = math.log2(sizes[0]), math.log2(sizes[-1])

    def compute_x(size: int) -> float:
        fraction = (math.log2(size) - first_log2) / (last_log2 - first_log2) if last_log2 > first_log2 else 0.5
        return _LEFT + fraction * (_WIDTH - _LEFT - _RIGHT)

    def compute_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / axis_end * (_HEIGHT - _TOP - _BOTTOM)

    svg_elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{html.escape(plot.title)}</title><style>{_STYLE}</style>",
        _draw_text(_LEFT, 28, plot.title, "title"),
        _draw_text(_LEFT, 50, plot.note, "note"),
        _draw_text(12, _TOP - 10, plot.unit, "note"),
    ]
    for tick_index in range(round(axis_end / axis_step) + 1):
        tick_y = compute_y(tick_index * axis_step)
        svg_elements.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{tick_y:.1f}" y2="{tick_y:.1f}"/>'
        )
        svg_elements.append(_draw_text(_LEFT - 8, tick_y + 4, f"{tick_index * axis_step:g}", anchor="end"))
    svg_elements += [
        _draw_text(compute_x(size), _HEIGHT - _BOTTOM + 22, format_bytes(size), anchor="middle") for size in sizes
    ]
    for line_index, line in enumerate(plot.lines):
        colour = _COLOURS[line_index % len(_COLOURS)]
        svg_elements += _draw_line(line, colour, _TOP + 22 * line_index, compute_x, compute_y)
    return "\n".join([*svg_elements, "</svg>", ""])


def write_plot(path: Path, plot: Plot) -> None:
    """Write the plot: an HTML page if the file name ends in .html, else the SVG alone.

    Raises
    ------
    UsageError
        The name ends in neither .html nor .svg.
    """
    check_plot_name(path)
    file_text = svg_text = draw(plot)
    if path.suffix == ".html":
        title = html.escape(plot.title)
        file_text = (
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
            f'<meta name="viewport" content="width=device-width"><body>\n{svg_text}</body></html>\n'
        )
    path.write_text(file_text, encoding="utf-8")


def check_plot_name(path: Path) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless the name ends in .html or .svg."""
    if path.suffix not in {".html", ".svg"}:
        message = f"the name of a plot must end in .html or .svg, not {path.name!r}"
        raise UsageError(message)


def _draw_line(
    line: Line,
    colour: str,
    legend_y: float,
    compute_x: Callable[[int], float],
    compute_y: Callable[[float], float],
) -> Iterator[str]:
    drawn_points = [(compute_x(size), compute_y(value), size, value) for size, value in sorted(line.points)]
    if drawn_points:
        path_data = " L ".join(f"{point_x:.1f} {point_y:.1f}" for point_x, point_y, _, _ in drawn_points)
        yield f'<path d="M {path_data}" stroke="{colour}"/>'
    for point_x, point_y, size, value in drawn_points:
        tooltip = html.escape(f"{line.name}, {format_bytes(size)}: {value:.3g}")
        yield f'<circle cx="{point_x:.1f}" cy="{point_y:.1f}" r="4" fill="{colour}"><title>{tooltip}</title></circle>'
    legend_x = _WIDTH - _RIGHT + 22
    yield f'<circle cx="{legend_x}" cy="{legend_y:.1f}" r="5" fill="{colour}"/>'
    yield _draw_text(legend_x + 12, legend_y + 4, line.name)


def _choose_axis_step(highest: float) -> float:
    """Return the distance of the ticks: 1, 2, 5 or 10 times a power of ten, so that the axis has at most six steps."""
    step_min = highest / _AXIS_STEPS_MAX
    power_of_ten: float = 10.0 ** math.floor(math.log10(step_min))
    return next(factor * power_of_ten for factor in (1, 2, 5, 10) if factor * power_of_ten >= step_min)


def _draw_text(x: float, y: float, text: str, css_class: str = "", *, anchor: str = "start") -> str:
    class_attribute = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{class_attribute}>{html.escape(text)}</text>'
