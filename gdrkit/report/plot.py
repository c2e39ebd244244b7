"""Plot of lines over sizes as one self-contained SVG, alone or in a page.

The axis of sizes is logarithmic, by powers of two. A plot of numbers that were not measured on hardware has a note in
the picture itself.
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

__all__ = ["Line", "Plot", "check_name", "draw", "write_plot"]

_WIDTH, _HEIGHT = 960, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 76, 56
_COLOURS = ("#2f6fd0", "#1f8a5b", "#c2571a", "#7a4fb5", "#8a6d00")
_TICKS_MAX = 6

# The style follows the light or dark colour scheme of the reader.
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
    """The contents of a plot."""

    title: str
    note: str
    unit: str
    lines: Sequence[Line]


def draw(plot: Plot) -> str:
    """Return the plot as SVG.

    Raises
    ------
    UsageError
        There is nothing to draw.
    """
    sizes = sorted({size for line in plot.lines for size, _ in line.points})
    if not sizes:
        message = "there is nothing to draw"
        raise UsageError(message)
    top = max(value for line in plot.lines for _, value in line.points) or 1.0
    step = _step(top)
    top = math.ceil(top / step) * step
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(size: int) -> float:
        share = (math.log2(size) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{html.escape(plot.title)}</title><style>{_STYLE}</style>",
        _text(_LEFT, 28, plot.title, "title"),
        _text(_LEFT, 50, plot.note, "note"),
        _text(12, _TOP - 10, plot.unit, "note"),
    ]
    for number in range(round(top / step) + 1):
        at = y(number * step)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{number * step:g}", anchor="end"))
    parts += [_text(x(size), _HEIGHT - _BOTTOM + 22, format_bytes(size), anchor="middle") for size in sizes]
    for index, line in enumerate(plot.lines):
        parts += _draw_line(line, _COLOURS[index % len(_COLOURS)], _TOP + 22 * index, x, y)
    return "\n".join([*parts, "</svg>", ""])


def write_plot(path: Path, plot: Plot) -> None:
    """Write the plot: an HTML page if the file name ends in .html, else the SVG alone.

    Raises
    ------
    UsageError
        The name ends in neither .html nor .svg.
    """
    check_name(path)
    picture = draw(plot)
    if path.suffix == ".html":
        title = html.escape(plot.title)
        picture = (
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
            f'<meta name="viewport" content="width=device-width"><body>\n{picture}</body></html>\n'
        )
    path.write_text(picture, encoding="utf-8")


def check_name(path: Path) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless the name ends in .html or .svg."""
    if path.suffix not in {".html", ".svg"}:
        message = f"the name of a plot must end in .html or .svg, not {path.name!r}"
        raise UsageError(message)


def _draw_line(
    line: Line, colour: str, legend_y: float, x: Callable[[int], float], y: Callable[[float], float]
) -> Iterator[str]:
    points = [(x(size), y(value), size, value) for size, value in sorted(line.points)]
    if points:
        path = " L ".join(f"{left:.1f} {top:.1f}" for left, top, _, _ in points)
        yield f'<path d="M {path}" stroke="{colour}"/>'
    for left, top, size, value in points:
        tooltip = html.escape(f"{line.name}, {format_bytes(size)}: {value:.3g}")
        yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{colour}"><title>{tooltip}</title></circle>'
    legend_x = _WIDTH - _RIGHT + 22
    yield f'<circle cx="{legend_x}" cy="{legend_y:.1f}" r="5" fill="{colour}"/>'
    yield _text(legend_x + 12, legend_y + 4, line.name)


def _step(top: float) -> float:
    """Return the distance of the ticks: 1, 2 or 5 times a power of ten, so that there are only a few ticks."""
    least = top / _TICKS_MAX
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _text(x: float, y: float, text: str, css_class: str = "", *, anchor: str = "start") -> str:
    style = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{html.escape(text)}</text>'
