"""Write junit.xml, summary.md and index.html of a run.

Level 5. The HTML page stands alone: no script, no font, no picture from elsewhere.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from gdrkit.house import house
from gdrkit.report.junit import render_junit
from gdrkit.report.view import make_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Environment

    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record
    from gdrkit.report.run import Run, RunFolder

__all__ = ["render", "render_html", "render_markdown"]


def render(folder: RunFolder) -> None:
    """Make the three documents of what the run wrote.

    Raises
    ------
    UsageError
        It is no folder of a run, or a file in it is malformed.
    """
    run, facts, records = folder.read()
    folder.junit.write_bytes(render_junit(run, records))
    folder.summary.write_text(render_markdown(run, facts, records), encoding="utf-8", errors="backslashreplace")
    folder.index.write_text(render_html(run, facts, records), encoding="utf-8", errors="backslashreplace")


def render_html(run: Run, facts: Facts, records: Sequence[Record]) -> str:
    """The page."""
    return _environment(escaped=True).get_template("index.html.j2").render(view=make_view(run, facts, records))


def render_markdown(run: Run, facts: Facts, records: Sequence[Record]) -> str:
    """The summary, for a terminal or a merge request."""
    return _environment(escaped=False).get_template("summary.md.j2").render(view=make_view(run, facts, records))


@cache
def _environment(*, escaped: bool) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(house().templates),
        autoescape=escaped,  # noqa: S701 - Markdown has rules of its own: see _cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _cell
    environment.filters["seconds"] = _seconds
    environment.filters["short"] = _short
    return environment


def _cell(text: object) -> str:
    """Into one cell of a Markdown table: no new line, no bar, no tag."""
    flat = " ".join(str(text).split())
    for sign, shown in (("&", "&amp;"), ("|", "\\|"), ("`", "&#96;")):
        flat = flat.replace(sign, shown)
    # What no tag can begin with stays as it is, so that "GPU 0 <- NIC mlx5_0" can be read without a renderer.
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", flat)


def _seconds(duration_ms: float) -> str:
    if duration_ms < 1000:  # noqa: PLR2004 - from a second on, in seconds.
        return f"{duration_ms:.0f} ms"
    return f"{duration_ms / 1000:.1f} s"


def _short(identifier: str) -> str:
    """The first 12 digits of a digest or commit, and what follows it after a dash."""
    head, dash, tail = identifier.removeprefix("sha256:").partition("-")
    return head[:12] + dash + tail
