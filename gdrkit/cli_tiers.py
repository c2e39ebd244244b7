# ruff: noqa: FBT001 - click calls commands by the names of their options.
"""The commands of ``gdrkit tiers``, which move files between storage tiers, implemented in :mod:`gdrkit.tiers`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import click

from gdrkit.errors import Reason
from gdrkit.exit_code import ExitCode
from gdrkit.serialization import to_json_data
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.tiers import Configuration, TierManager

__all__ = ["tiers"]

_Parameters = ParamSpec("_Parameters")


@click.group(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit tiers status                        show the usage of each tier\n"
        "  gdrkit tiers migrate --dry-run             list the files that would be moved\n"
        "  gdrkit tiers migrate                       move them\n"
        "  gdrkit tiers migrate model.bin --to nvme   move one file\n"
        "  gdrkit tiers run --rate 200MiB             move files in the background\n"
        "  gdrkit tiers pin model.bin                 keep a file in its tier"
    )
)
def tiers() -> None:
    """Move files between storage tiers according to how often the files are used.

    The tiers are /nvme, /ssd and /hdd, unless --config, --tier or the environment (GDRKIT_TIERS_CONFIG, GDRKIT_TIERS,
    GDRKIT_TIERS_CATALOGUE) define others.
    """


def _add_tier_options(command: Callable[_Parameters, int]) -> Callable[..., int]:
    """Add the options --config, --tier, --catalogue and --json to a command.

    The command gets one Configuration in place of the first three options.
    """

    @wraps(command)
    def command_with_options(
        config: Path | None, tier_options: tuple[str, ...], catalogue: Path | None, **other_arguments: object
    ) -> int:
        from gdrkit.tiers import configure

        configuration = configure(file=config, tiers=tier_options, catalogue=catalogue)
        return command(configuration, **other_arguments)  # type: ignore[arg-type] # click has converted the arguments to their types.

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option(
            "--catalogue",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="The folder of the catalogue, which is an index of the files and their tiers.",
        ),
        click.option(
            "--tier",
            "tier_options",
            multiple=True,
            metavar="NAME=DIR[,capacity=SIZE][,accesses_min=N]",
            help="A tier. The option can be repeated, with the fastest tier first.",
        ),
        click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="A TOML file that defines the tiers.",
        ),
    ):
        command_with_options = option(command_with_options)
    return command_with_options


@tiers.command(epilog="\b\nExit codes:\n  0 every tier is available\n  1 a tier is not available")
@_add_tier_options
def status(configuration: Configuration, as_json: bool) -> int:
    """Show the capacity and the usage of each tier."""
    from gdrkit.tiers.tables import make_status_table, print_table

    with _open_manager(configuration) as manager:
        statuses = manager.status()
    if as_json:
        _print_json(statuses)
    else:
        print_table(make_status_table(statuses), sys.stdout)
    return int(ExitCode.FAILED) if any(tier_status.absent for tier_status in statuses) else 0


@tiers.command()
@click.argument("names", nargs=-1)
@click.option(
    "--to", "destination", metavar="TIER", help="Move the files NAMES to this tier, whatever the policy says."
)
@click.option("--dry-run", is_flag=True, help="List the files that would be moved, and move none.")
@_add_tier_options
def migrate(
    configuration: Configuration, names: tuple[str, ...], destination: str | None, dry_run: bool, as_json: bool
) -> int:
    """Move every file to the tier that its use requires.

    With NAMES, the command moves only these files, to the tier of --to. A file that is open for writing, or for which
    the tier has no space, is not moved. The command can be killed at any time without loss of data: the next command
    completes or undoes an interrupted migration.
    """
    from gdrkit.tiers.runs import migrate_by_policy, migrate_named, print_plan

    if bool(names) != (destination is not None):
        message = "NAMES and --to TIER must be given together"
        raise click.UsageError(message)
    with _open_manager(configuration) as manager:
        if dry_run:
            print_plan(manager, names, destination, as_json=as_json, stream=sys.stdout)
            return 0
        if destination is not None:
            result = migrate_named(manager, names, destination, stream=sys.stderr)
        else:
            result = migrate_by_policy(manager, stream=sys.stderr)
    if as_json:
        _print_json(result)
    else:
        for refused_move in result.refused:
            click.echo(f"not moved: {refused_move.text}")
        click.echo(
            f"{result.moved} of {format_count(result.considered, 'file')} moved, {len(result.refused)} not moved"
        )
    # A file in use is not a failure: a later migration moves it.
    return int(ExitCode.FAILED) if any(refused_move.reason is not Reason.BUSY for refused_move in result.refused) else 0


@tiers.command(epilog="\b\nExit codes:\n  0 the run was stopped by SIGTERM or SIGINT\n  1 the run cannot continue")
@click.option("--interval-s", type=float, metavar="SECONDS", help="Time between two passes. Default: 600.")
@click.option("--rate", metavar="SIZE", help="Copy at most SIZE per second, such as 200MiB. Default: no limit.")
@click.option(
    "--quiet-hours",
    multiple=True,
    metavar="HH:MM-HH:MM",
    help="Move no file at this time of day. The option can be repeated.",
)
@click.option(
    "--watch",
    type=click.Choice(["preferred", "required", "never"]),
    help="Whether a file also counts as used when another program opens it. Detecting this needs root. preferred: yes, "
    "if possible; required: yes, and the command fails if it is not possible; never: no. Default: preferred.",
)
@_add_tier_options
def run(
    configuration: Configuration,
    *,
    interval_s: float | None,
    rate: str | None,
    quiet_hours: tuple[str, ...],
    watch: str | None,
    as_json: bool,
) -> int:
    """Move files by policy in the background, until SIGTERM or SIGINT.

    A file also counts as used when another program opens it (see --watch). The command ends within two seconds after a
    signal, and can be killed at any time without loss of data. With --json, it prints one JSON object for each event.
    `gdrkit tiers migrate --dry-run` lists the files that the next pass would move.
    """
    from gdrkit.tiers.configuration import override_run
    from gdrkit.tiers.runs import run_until_signalled

    settings = override_run(
        configuration.run, interval_s=interval_s, rate=rate, quiet_hours=quiet_hours or None, watch=watch
    )
    run_until_signalled(replace(configuration, run=settings), as_json=as_json, stream=sys.stdout)
    return 0


@tiers.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--in", "tier", metavar="TIER", help="The tier to keep the files in. Default: the tier of each file.")
@click.option("--dry-run", is_flag=True, help="Print the tier of each file, and pin no file.")
@_add_tier_options
def pin(configuration: Configuration, names: tuple[str, ...], tier: str | None, dry_run: bool, as_json: bool) -> int:
    """Keep files in a tier, independent of their use."""
    with _open_manager(configuration) as manager:
        target_tier_name = configuration.tier(tier).name if tier else None
        tier_by_file = {
            name: (target_tier_name or manager.find(name).tier) if dry_run else manager.pin(name, target_tier_name)
            for name in names
        }
    _print_pins(tier_by_file, as_json=as_json)
    return 0


@tiers.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Print the tier to which each file is pinned, and unpin no file.")
@_add_tier_options
def unpin(configuration: Configuration, names: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Unpin files, so that the policy can move them again."""
    with _open_manager(configuration) as manager:
        tier_by_file = {name: manager.find(name).pinned or "" for name in names}
        for name in names if not dry_run else ():
            manager.unpin(name)
    _print_pins(tier_by_file, as_json=as_json)
    return 0


@tiers.command(
    epilog="\b\nExit codes:\n  0 the catalogue and the disks agree, or --repair made them agree\n  1 they do not agree"
)
@click.option("--repair", is_flag=True, help="Correct the catalogue, and complete or undo interrupted migrations.")
@click.option("--dry-run", is_flag=True, help="Override --repair: change nothing.")
@_add_tier_options
def check(configuration: Configuration, repair: bool, dry_run: bool, as_json: bool) -> int:
    """Compare the catalogue with the disks."""
    from gdrkit.tiers.tables import make_findings_table, print_table

    with _open_manager(configuration) as manager:
        findings = [*manager.recovery_findings, *manager.check(repair=repair and not dry_run)]
    if as_json:
        _print_json(findings)
    elif findings:
        print_table(make_findings_table(findings), sys.stdout)
    else:
        click.echo("catalogue and disks agree")
    return int(ExitCode.FAILED) if any(finding.needs_action for finding in findings) else 0


@tiers.command()
@click.option("--size", "size_text", default="256MiB", show_default=True, metavar="SIZE", help="Size of the test file.")
@_add_tier_options
def bench(configuration: Configuration, size_text: str, as_json: bool) -> int:
    """Measure the read and write rates of each tier."""
    from gdrkit.tiers.bench import measure
    from gdrkit.tiers.configuration import parse_size
    from gdrkit.tiers.tables import make_speeds_table, print_table

    file_bytes = parse_size(size_text)
    with _open_manager(configuration) as manager:
        available_tier_names = [tier_status.name for tier_status in manager.status() if not tier_status.absent]
        speeds = [measure(manager.folder(name), length_bytes=file_bytes) for name in available_tier_names]
        for speed in speeds:
            if speed.device_read_gb_per_s is not None:
                manager.catalogue.record_route(speed.tier, speed.route)
    if as_json:
        _print_json(speeds)
    else:
        print_table(make_speeds_table(speeds), sys.stdout)
    return 0


def _open_manager(configuration: Configuration) -> TierManager:
    from gdrkit.tiers import TierManager

    return TierManager(configuration)


def _print_json(value: object) -> None:
    click.echo(json.dumps(to_json_data(value), indent=2))


def _print_pins(tier_by_file: dict[str, str], *, as_json: bool) -> None:
    from gdrkit.tiers.names import printable

    if as_json:
        _print_json({printable(name): tier for name, tier in tier_by_file.items()})
        return
    for name, tier in tier_by_file.items():
        click.echo(f"{printable(name)}: {tier or 'not pinned'}")
