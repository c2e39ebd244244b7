"""Writer of report.json, junit.xml, summary.md, metrics.prom and index.html of a run.

The HTML page is self-contained: no font, no picture and no script from other sources. Its only script searches the
cases. The page has a content security policy with the digest of this script, so a browser runs no script that the text
of a record could bring into the page.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.install_paths import install_paths
from gdrkit.report.contents import RunContents, read_contents
from gdrkit.report.document import render_document
from gdrkit.report.junit import render_junit
from gdrkit.report.metrics import render_metrics
from gdrkit.report.run import RunFolder, make_folder, write_atomically
from gdrkit.report.view import make_view
from gdrkit.text import escape_controls, markdown_cell, shorten_identifier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jinja2 import Environment

    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record
    from gdrkit.report.run import Run

__all__ = ["make_template_environment", "render", "render_html", "render_markdown"]


def render(path: Path, output: Path | None = None) -> RunFolder:
    """Write the documents of a run.

    Parameters
    ----------
    path : Path
        The folder of a run, a records file, or a folder of records files. The run need not have ended.
    output : Path or None
        The folder for the documents. If None, they are written into `path`, which must then be a folder. For a records
        file the caller must name a folder: the folder of the file may contain the more complete report of the run.

    Raises
    ------
    UsageError
        There is no record, a file is malformed, or `output` is missing.
    SetupMissing
        A file cannot be read or written.
    """
    if output is None and not path.is_dir():
        message = f"{path} is a file, and a report next to it could replace another report"
        what_to_do = "name a folder for the report (--output DIR), or name the folder of the run"
        raise UsageError(message, what_to_do=what_to_do)
    contents = read_contents(path)
    folder = RunFolder(output or path)
    make_folder(folder.path)
    view = make_view(contents)
    write_atomically(folder.report, render_document(contents, view))
    write_atomically(folder.junit, render_junit(contents.run, contents.records))
    write_atomically(
        folder.summary, make_template_environment(escaped=False).get_template("summary.md.j2").render(view=view)
    )
    write_atomically(folder.metrics, render_metrics(contents, view))
    # The page is written last, so that the files to which it links already exist.
    write_atomically(
        folder.index, make_template_environment(escaped=True).get_template("index.html.j2").render(view=view)
    )
    return folder


def render_html(run: Run, facts: Facts, records: Sequence[Record]) -> str:
    """Return the report as an HTML page."""
    return (
        make_template_environment(escaped=True)
        .get_template("index.html.j2")
        .render(view=_make_view_of_records(run, facts, records))
    )


def render_markdown(run: Run, facts: Facts, records: Sequence[Record]) -> str:
    """Return the summary as Markdown, for a terminal or a merge request."""
    return (
        make_template_environment(escaped=False)
        .get_template("summary.md.j2")
        .render(view=_make_view_of_records(run, facts, records))
    )


def _make_view_of_records(run: Run, facts: Facts, records: Sequence[Record]) -> object:
    origins = tuple(f"records.jsonl:{line_number}" for line_number in range(1, len(records) + 1))
    return make_view(RunContents(run, facts, tuple(records), origins))


@cache
def make_template_environment(*, escaped: bool) -> Environment:
    """Return the Jinja environment of the report templates. It escapes control characters in all texts.

    With `escaped`, it also escapes the special characters of HTML.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FileSystemLoader(install_paths().templates),
        autoescape=escaped,  # noqa: S701 - Markdown is escaped by text.markdown_cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
    )
    script = (install_paths().templates / "search.js").read_text(encoding="utf-8")
    environment.globals["script"] = Markup(script)  # noqa: S704 - our own script.
    environment.globals["script_digest"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.filters["cell"] = markdown_cell
    environment.filters["seconds"] = _format_duration
    environment.filters["short"] = shorten_identifier
    return environment


def _format_duration(duration_ms: float) -> str:
    if duration_ms < 1000:  # noqa: PLR2004 - durations from 1 s on are shown in seconds.
        return f"{duration_ms:.0f} ms"
    return f"{duration_ms / 1000:.1f} s"
