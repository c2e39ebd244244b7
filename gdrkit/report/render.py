"""Writer of report.json, junit.xml, summary.md, metrics.prom and index.html of a run.

The HTML page is self-contained: no script, no font, no picture from other sources.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.install_paths import install_paths
from gdrkit.report.contents import Contents, read_contents
from gdrkit.report.document import render_document
from gdrkit.report.junit import render_junit
from gdrkit.report.metrics import render_metrics
from gdrkit.report.run import RunFolder, make_folder, write_whole
from gdrkit.report.view import make_view
from gdrkit.text import escape_controls, markdown_cell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jinja2 import Environment

    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record
    from gdrkit.report.run import Run

__all__ = ["environment", "render", "render_html", "render_markdown"]


def render(path: Path, output: Path | None = None) -> RunFolder:
    """Write the documents of a run.

    Parameters
    ----------
    path : Path
        The folder of a run, even of one that did not end; a records file, or a folder of records files.
    output : Path or None
        The folder for the documents. If None, it is `path`, which must be a folder. Beside a records file there may be
        the report of its run, which is more complete than one that is made of the records alone.

    Raises
    ------
    UsageError
        There is no record, a file is malformed, or no output folder was named.
    SetupMissing
        A file cannot be read or written.
    """
    if output is None and not path.is_dir():
        message = f"{path} is a file, and its report would lie beside it, perhaps in place of another"
        what_to_do = "name a folder to write to: --output DIR; or the folder of the run, to make its own report again"
        raise UsageError(message, what_to_do=what_to_do)
    contents = read_contents(path)
    folder = RunFolder(output or path)
    make_folder(folder.path)
    view = make_view(contents)
    write_whole(folder.report, render_document(contents, view))
    write_whole(folder.junit, render_junit(contents.run, contents.records))
    write_whole(folder.summary, environment(escaped=False).get_template("summary.md.j2").render(view=view))
    write_whole(folder.metrics, render_metrics(contents, view))
    # The page is written last, so that all linked files exist before it.
    write_whole(folder.index, environment(escaped=True).get_template("index.html.j2").render(view=view))
    return folder


def render_html(run: Run, facts: Facts, records: Sequence[Record]) -> str:
    """Return the HTML page."""
    return environment(escaped=True).get_template("index.html.j2").render(view=_view(run, facts, records))


def render_markdown(run: Run, facts: Facts, records: Sequence[Record]) -> str:
    """Return the summary as Markdown, for a terminal or a merge request."""
    return environment(escaped=False).get_template("summary.md.j2").render(view=_view(run, facts, records))


def _view(run: Run, facts: Facts, records: Sequence[Record]) -> object:
    origins = tuple(f"records.jsonl:{number}" for number in range(1, len(records) + 1))
    return make_view(Contents(run, facts, tuple(records), origins))


@cache
def environment(*, escaped: bool) -> Environment:
    """Return the template environment. It escapes control characters in all text of a record."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalized(value: object) -> object:
        return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = Environment(
        loader=FileSystemLoader(install_paths().templates),
        autoescape=escaped,  # noqa: S701 - Markdown is escaped by text.markdown_cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalized,
    )
    made.filters["cell"] = markdown_cell
    made.filters["seconds"] = _seconds
    made.filters["short"] = _short
    return made


def _seconds(duration_ms: float) -> str:
    if duration_ms < 1000:  # noqa: PLR2004 - durations from 1 s on are shown in seconds.
        return f"{duration_ms:.0f} ms"
    return f"{duration_ms / 1000:.1f} s"


def _short(identifier: str) -> str:
    """Return the first 12 digits of a digest or commit, and the text from the dash on, if there is one."""
    head, dash, tail = identifier.removeprefix("sha256:").partition("-")
    return head[:12] + dash + tail
