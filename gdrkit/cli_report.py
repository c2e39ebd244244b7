"""The commands for the results of a run: ``gdrkit report`` and ``gdrkit compare``.

:mod:`gdrkit.cli` adds them to its command line, and turns their errors into messages and exit codes.
"""

from __future__ import annotations

from pathlib import Path

import click

from gdrkit.exit_code import ExitCode
from gdrkit.text import escape_controls
from gdrkit.verdict import NOISE_PERCENT

__all__ = ["COMMANDS"]


@click.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit report reports/runs/20261120T100000Z\n"
        "  gdrkit report records.jsonl --output /tmp/report\n"
        "  gdrkit report --fleet all-hosts --output /srv/www/fleet"
    )
)
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The folder of the report. Default: PATH, if PATH is a folder.",
)
@click.option("--fleet", is_flag=True, help="Write one report about many hosts. PATH contains a folder for each host.")
def report(path: Path, output: Path | None, *, fleet: bool) -> int:
    """Write the report of a run again, from its records.

    PATH is the folder of a run, even of a killed run, or a file of records. A file of records requires --output.
    The files of a report are index.html, summary.md, report.json, junit.xml and metrics.prom. With --fleet they are
    index.html, fleet.json and metrics.prom.
    """
    from gdrkit.report.render import render

    if fleet:
        from gdrkit.report.fleet import render_fleet

        fleet_report = render_fleet(path, output)
        for problem in fleet_report.problems:
            click.echo(f"gdrkit: {escape_controls(problem)}", err=True)
        click.echo(escape_controls(f"Report: {fleet_report.index}"))
        return int(ExitCode.FAILED) if fleet_report.problems else 0
    click.echo(escape_controls(f"Report: {render(path, output).index}"))
    return 0


@click.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit compare reports/baselines/h200-1 reports/runs/20261120T100000Z\n"
        "  gdrkit compare --noise 10 before after\n\n"
        "\b\nExit codes:\n  0 nothing became worse\n  1 something became worse or is gone\n  2 wrong usage"
    )
)
@click.argument("before", type=click.Path(path_type=Path, exists=True))
@click.argument("after", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--noise",
    "noise_percent",
    type=click.FloatRange(0, 100, max_open=True),
    default=NOISE_PERCENT,
    show_default=True,
    metavar="PERCENT",
    help="A measured number that changes by at most this percentage counts as unchanged. The limit is larger if the "
    "rounds of a run scatter more.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(before: Path, after: Path, noise_percent: float, *, as_json: bool) -> int:
    """Compare run BEFORE with run AFTER, and list first what became worse.

    The command compares numbers, verdicts and routes. BEFORE and AFTER are each the folder of a run, a file of records,
    or a folder of such files.
    """
    from gdrkit.report.compare import compare as compare_contents
    from gdrkit.report.compare import describe_comparison
    from gdrkit.report.contents import read_contents

    comparison = compare_contents(read_contents(before), read_contents(after), noise_percent=noise_percent)
    click.echo(comparison.to_json() if as_json else describe_comparison(comparison), nl=not as_json)
    return int(ExitCode.FAILED) if comparison.is_worse else 0


COMMANDS = (report, compare)
