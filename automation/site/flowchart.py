"""Drawings of the flowcharts in the documents as SVG, so that the site loads no script for them.

This module reads the part of Mermaid's language that docs/architecture.md uses: ``subgraph`` with one node per line,
and arrows.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

__all__ = ["Flowchart", "draw", "parse"]

# Sizes in units of the SVG. A unit is a CSS pixel if the page is at least 760 pixels wide.
_WIDTH, _ROW_HEIGHT, _BOX_HEIGHT, _BOX_WIDTH = 760, 92, 30, 104
_SUBGRAPH = re.compile(r'subgraph \w+\["(?P<title>[^"]+)"\](?P<nodes>.*?)\bend\b', re.DOTALL)
_EDGE = re.compile(r"(\w+) --> (\w+)")
_STYLE = (
    ".flow rect{fill:none;stroke:currentColor}.flow .row{stroke-opacity:.25}.flow path{fill:none;stroke:currentColor;"
    "stroke-opacity:.55}.flow text{fill:currentColor;font:13px sans-serif;text-anchor:middle}"
    ".flow .title{text-anchor:start;font-size:11px;opacity:.7}"
)


@dataclass(frozen=True)
class Flowchart:
    """A flowchart.

    Attributes
    ----------
    rows : dict of str to tuple of str
        The names of the nodes in each row, by the title of the row, from top to bottom.
    edges : tuple of pairs of str
        The arrows: the node that they leave, and the node that they reach.
    """

    rows: dict[str, tuple[str, ...]]
    edges: tuple[tuple[str, str], ...]


def parse(text: str) -> Flowchart:
    """Read a flowchart in Mermaid's language.

    Raises
    ------
    ValueError
        The text has an arrow from or to an unknown node, or it has no rows.
    """
    rows = {match["title"]: tuple(match["nodes"].split()) for match in _SUBGRAPH.finditer(text)}
    edges = tuple((start, end) for start, end in _EDGE.findall(text))
    unknown_names = {name for edge in edges for name in edge} - {name for names in rows.values() for name in names}
    if not rows or unknown_names:
        message = f"the flowchart has no row, or its arrows have nodes that are in no row: {sorted(unknown_names)}"
        raise ValueError(message)
    return Flowchart(rows=rows, edges=edges)


def draw(chart: Flowchart) -> str:
    """Return the flowchart as an SVG element."""
    label_positions: dict[str, tuple[float, float]] = {}
    shapes = []
    for row_index, (title, names) in enumerate(chart.rows.items()):
        top = row_index * _ROW_HEIGHT + 8
        shapes.append(f'<rect class="row" x="1" y="{top}" width="{_WIDTH - 2}" height="{_ROW_HEIGHT - 26}" rx="6"/>')
        shapes.append(f'<text class="title" x="10" y="{top + 14}">{html.escape(title)}</text>')
        for index, name in enumerate(names):
            # y is the baseline of the text. The middle of the box is 5 units above it.
            x, y = _WIDTH * (index + 0.5) / len(names), top + 40
            label_positions[name] = (x, y)
            left = x - _BOX_WIDTH / 2
            shapes.append(
                f'<rect x="{left:.0f}" y="{y - _BOX_HEIGHT / 2 - 5:.0f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" '
                f'rx="4"/><text x="{x:.0f}" y="{y:.0f}">{html.escape(name)}</text>'
            )
    for start, end in chart.edges:
        (x1, y1), (x2, y2) = label_positions[start], label_positions[end]
        # The arrow leaves its box at the bottom, and ends 4 units above the other box, so that the head fits between.
        y1, y2 = y1 + _BOX_HEIGHT / 2 - 5, y2 - _BOX_HEIGHT / 2 - 9
        middle = (y1 + y2) / 2
        curve = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"
        shapes.append(f'<path d="{curve}" marker-end="url(#flow-arrow)"/>')
    marker = (
        '<defs><marker id="flow-arrow" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
        '<path d="M0 0L6 3L0 6"/></marker></defs>'
    )
    height = len(chart.rows) * _ROW_HEIGHT
    label = "; ".join(f"{start} imports {end}" for start, end in chart.edges)
    return (
        f'<svg class="flow" role="img" aria-label="{html.escape(label)}" viewBox="0 0 {_WIDTH} {height}" width="100%">'
        f"<style>{_STYLE}</style>{marker}{''.join(shapes)}</svg>"
    )
