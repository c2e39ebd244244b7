"""The commands for the results of a run: report, compare.

They belong to the command line of :mod:`gdrkit.cli`, which turns errors into messages and exit codes.
"""

from __future__ import annotations

from pathlib import Path

import click

from gdrkit.exit_code import ExitCode
from gdrkit.text import escape_controls
from gdrkit.verdict import NOISE_PERCENT

__all__ = ["COMMANDS"]


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where to write. Default: PATH, if that is a folder.",
)
@click.option("--fleet", is_flag=True, help="PATH holds the folders of many hosts: one report over all of them.")
def report(path: Path, output: Path | None, *, fleet: bool) -> int:
    """Make the report of a run again, from its records.

    PATH is the folder of a run, also of one that was killed, or a file of records, which takes --output. Writes
    index.html, summary.md, report.json, junit.xml and metrics.prom; with --fleet index.html, fleet.json and
    metrics.prom.
    """
    from gdrkit.report.render import render

    if fleet:
        from gdrkit.report.fleet import render_fleet

        made = render_fleet(path, output)
        for problem in made.problems:
            click.echo(f"gdrkit: {escape_controls(problem)}", err=True)
        click.echo(escape_controls(f"Report: {made.index}"))
        return int(ExitCode.FAILED if made.problems else ExitCode.PROVEN)
    click.echo(escape_controls(f"Report: {render(path, output).index}"))
    return 0


@click.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True))
@click.argument("after", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--noise",
    "noise_percent",
    type=click.FloatRange(0, 100, max_open=True),
    default=NOISE_PERCENT,
    show_default=True,
    metavar="PERCENT",
    help="What no number is believed to be better than; a wider spread of its own rounds widens it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def compare(before: Path, after: Path, noise_percent: float, *, as_json: bool) -> int:
    """Say what became worse from BEFORE to AFTER: numbers beyond their noise, verdicts, routes.

    Each is the folder of a run, a records file, or a folder of them. Ends with 1 when something became worse.
    """
    from gdrkit.report.compare import compare as compare_contents
    from gdrkit.report.compare import describe_comparison
    from gdrkit.report.contents import read_contents

    found = compare_contents(read_contents(before), read_contents(after), noise_percent=noise_percent)
    click.echo(found.to_json() if as_json else describe_comparison(found), nl=not as_json)
    return int(ExitCode.FAILED if found.is_worse else ExitCode.PROVEN)


COMMANDS = (report, compare)
