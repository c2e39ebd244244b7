# ruff: noqa: FBT001 - click calls commands by the names of their options.
"""The commands of storage tiers. Their implementation is in :mod:`gdrkit.tiers`."""

from __future__ import annotations

import json
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import click

from gdrkit.errors import Reason
from gdrkit.exit_code import ExitCode
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.tiers import Configuration, TierManager

__all__ = ["tiers"]

_P = ParamSpec("_P")


@click.group()
def tiers() -> None:
    r"""Keep files in tiers of storage, each where its use asks for.

    \b
    gdrkit tiers status                    what lies where
    gdrkit tiers migrate --dry-run         what would move
    gdrkit tiers migrate                   move it
    gdrkit tiers pin NAME                  have a file stay where it is

    The tiers are /nvme, /ssd and /hdd unless --config, --tier or the environment (GDRKIT_TIERS_CONFIG, GDRKIT_TIERS,
    GDRKIT_TIERS_CATALOGUE) say otherwise.
    """


def _configured(command: Callable[_P, int]) -> Callable[..., int]:
    """Add the options that define the tiers to a command, which receives a Configuration instead of them."""

    @wraps(command)
    def configured(config: Path | None, tier_options: tuple[str, ...], catalogue: Path | None, **rest: object) -> int:
        from gdrkit.tiers import configure

        found = configure(file=config, tiers=tier_options, catalogue=catalogue)
        return command(found, **rest)  # type: ignore[arg-type] # click has converted them to their types.

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option(
            "--catalogue",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="Where the catalogue is.",
        ),
        click.option(
            "--tier",
            "tier_options",
            multiple=True,
            metavar="NAME=DIR[,capacity=SIZE][,accesses_min=N]",
            help="A tier; may stand more than once, fastest first.",
        ),
        click.option(
            "--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="A TOML file of tiers."
        ),
    ):
        configured = option(configured)
    return configured


@tiers.command()
@_configured
def status(configuration: Configuration, as_json: bool) -> int:
    """Say what lies in each tier."""
    from gdrkit.tiers.tables import status_table, write

    with _manager(configuration) as manager:
        found = manager.status()
    if as_json:
        _say(found)
    else:
        write(status_table(found), sys.stdout)
    return int(ExitCode.FAILED) if any(tier.absent for tier in found) else 0


@tiers.command()
@click.argument("names", nargs=-1)
@click.option("--to", "destination", metavar="TIER", help="Move the named files there, whatever the policy says.")
@click.option("--dry-run", is_flag=True, help="Say what would move, and move nothing.")
@_configured
def migrate(
    configuration: Configuration, names: tuple[str, ...], destination: str | None, dry_run: bool, as_json: bool
) -> int:
    """Move every file to the tier that its use asks for, or the NAMES to the tier of --to.

    A file that is being written, or for which there is no room, stays where it is. Nothing is lost when this ends at
    any moment: the next command puts in order what it left.
    """
    from gdrkit.tiers.runs import migrate_by_policy, migrate_named, print_plan

    if bool(names) != (destination is not None):
        message = "name the files and the tier (--to), or neither"
        raise click.UsageError(message)
    with _manager(configuration) as manager:
        if dry_run:
            print_plan(manager, names, destination, as_json=as_json, stream=sys.stdout)
            return 0
        if destination is not None:
            found = migrate_named(manager, names, destination, stream=sys.stderr)
        else:
            found = migrate_by_policy(manager, stream=sys.stderr)
    if as_json:
        _say(found)
    else:
        for refused in found.refused:
            click.echo(f"stays: {refused.text}")
        click.echo(f"{found.moved} of {found.considered} files moved, {len(found.refused)} had to stay")
    # A file in use is not a failure: a later migration moves it.
    return int(ExitCode.FAILED) if any(each.reason is not Reason.BUSY for each in found.refused) else 0


@tiers.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--in", "where", metavar="TIER", help="The tier where they have to be. Default: where they are.")
@click.option("--dry-run", is_flag=True, help="Say where they would be pinned, and pin nothing.")
@_configured
def pin(configuration: Configuration, names: tuple[str, ...], where: str | None, dry_run: bool, as_json: bool) -> int:
    """Have files stay in a tier, however they are used."""
    with _manager(configuration) as manager:
        target = configuration.tier(where).name if where else None
        found = {name: (target or manager.find(name).tier) if dry_run else manager.pin(name, target) for name in names}
    _say_each(found, as_json=as_json)
    return 0


@tiers.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Say what would be unpinned, and unpin nothing.")
@_configured
def unpin(configuration: Configuration, names: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Let the policy have files again."""
    with _manager(configuration) as manager:
        found = {name: manager.find(name).pinned or "" for name in names}
        for name in names if not dry_run else ():
            manager.unpin(name)
    _say_each(found, as_json=as_json)
    return 0


@tiers.command()
@click.option("--repair", is_flag=True, help="Make the catalogue agree with the disks, and end what was interrupted.")
@click.option("--dry-run", is_flag=True, help="As without --repair.")
@_configured
def check(configuration: Configuration, repair: bool, dry_run: bool, as_json: bool) -> int:
    """Compare the catalogue with the disks; ends with 1 when something is wrong and was not mended."""
    from gdrkit.tiers.tables import findings_table, write

    with _manager(configuration) as manager:
        found = [*manager.recovery_findings, *manager.check(repair=repair and not dry_run)]
    if as_json:
        _say(found)
    elif found:
        write(findings_table(found), sys.stdout)
    else:
        click.echo("catalogue and disks agree")
    return int(ExitCode.FAILED) if any(each.is_wrong for each in found) else 0


@tiers.command()
@click.option("--size", "length", default="256MiB", metavar="SIZE", help="Of the file that is written and read.")
@_configured
def bench(configuration: Configuration, length: str, as_json: bool) -> int:
    """Measure each tier, beside what the GDS integration update states of it."""
    from gdrkit.tiers.bench import measure
    from gdrkit.tiers.configuration import parse_size
    from gdrkit.tiers.tables import speeds_table, write

    wanted = parse_size(length)
    with _manager(configuration) as manager:
        there = [tier.name for tier in manager.status() if not tier.absent]
        found = [measure(manager.folder(name), length_bytes=wanted) for name in there]
        for each in found:
            if each.device_read_gb_per_s is not None:
                manager.catalogue.record_route(each.tier, each.route)
    if as_json:
        _say(found)
    else:
        write(speeds_table(found), sys.stdout)
    return 0


def _manager(configuration: Configuration) -> TierManager:
    from gdrkit.tiers import TierManager

    return TierManager(configuration)


def _say(found: object) -> None:
    click.echo(json.dumps(to_json_data(found), indent=2))


def _say_each(found: dict[str, str], *, as_json: bool) -> None:
    from gdrkit.tiers.names import printable

    if as_json:
        _say({printable(name): tier for name, tier in found.items()})
        return
    for name, tier in found.items():
        click.echo(f"{printable(name)}: {tier or 'not pinned'}")
