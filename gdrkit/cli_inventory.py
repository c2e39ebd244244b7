# ruff: noqa: FBT001 - click calls commands by the names of their options.
"""The commands that examine a machine: facts, topology, doctor, explain.

They belong to the command line of :mod:`gdrkit.cli`, which turns errors into messages and exit codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdrkit.exit_code import ExitCode

if TYPE_CHECKING:
    from gdrkit.inventory import Machine

__all__ = ["COMMANDS"]

_replay = click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Of a captured machine: what `facts --save` wrote, a topology XML of NCCL, the text of lspci -vvv, or a "
    "copied /sys/class/infiniband.",
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
@click.option("--no-apis", is_flag=True, help="Read files only; ask neither CUDA nor verbs nor NVML.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep everything that was read, so that doctor and topology answer elsewhere; .gz compresses.",
)
@_replay
def facts(as_json: bool, no_apis: bool, save: Path | None, replay: Path | None) -> int:
    """Say what is in this machine, and what its APIs answer.

    Reads sysfs, procfs and the loader's cache, for which no driver is needed, then asks CUDA, verbs, NVML and
    registration in child processes.
    """
    from gdrkit import inventory
    from gdrkit.report.describe import describe_facts

    machine = _machine(replay, ask_apis=not no_apis, record=save is not None)
    if save is not None:
        # The files that the rules and the topology read are part of the capture.
        inventory.diagnose(machine)
        inventory.topology(machine)
        inventory.write_capture(save, machine.capture())
    found = machine.facts
    click.echo(found.to_json() if as_json else describe_facts(found), nl=not as_json)
    return 0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@_replay
def topology(as_json: bool, replay: Path | None) -> int:
    """Show where GPUs, NICs and NVMe controllers sit, and how far they are apart."""
    from gdrkit import inventory

    found = inventory.topology(_machine(replay, ask_apis=False))
    if as_json:
        click.echo(found.to_json(), nl=False)
        return 0
    from gdrkit.report.topology import describe_topology

    click.echo(describe_topology(found))
    return 0


@click.command(
    epilog=(
        "\b\nExit codes: 0 no known cause was found; 1 at least one is here; 2 wrong usage;\n"
        "4 there is no GPU and no NIC to ask about. With --any 0 instead of 1 and 4."
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--read-only", is_flag=True, help="Allocate, register and move nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Say of every rule what it read.")
@click.option("--any", "any_result", is_flag=True, help="End with 0 whatever was found.")
@_replay
def doctor(as_json: bool, read_only: bool, verbose: bool, any_result: bool, replay: Path | None) -> int:
    """Say why transfers are not direct here: every known cause, what was read, and what to do.

    A few rules act: they register a little memory and move bytes by a loop, in a child process with a time limit.
    """
    from gdrkit import inventory
    from gdrkit.verdict import Verdict

    machine = _machine(replay, act=not read_only)
    found = inventory.diagnose(machine)
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        from gdrkit.report.doctor import describe_diagnosis

        click.echo(describe_diagnosis(found, verbose=verbose))
    if any_result:
        return 0
    if not machine.has_gpu_or_nic:
        return int(ExitCode.NOTHING_PROVEN)
    return int(ExitCode.FAILED if found.of(Verdict.FAIL) else ExitCode.PROVEN)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON: an object, or a list of all without CODE.")
@click.argument("code", required=False)
def explain(code: str | None, as_json: bool) -> int:
    """Explain a cause that the doctor knows, or list them all."""
    from gdrkit import inventory
    from gdrkit.report.doctor import describe_rule, list_rules, rules_as_json

    chosen = None if code is None else inventory.rule_of(code)
    if as_json:
        click.echo(rules_as_json(inventory.RULES if chosen is None else chosen), nl=False)
    else:
        click.echo(list_rules(inventory.RULES) if chosen is None else describe_rule(chosen))
    return 0


def _machine(replay: Path | None, *, ask_apis: bool = True, record: bool = False, act: bool = True) -> Machine:
    from gdrkit import inventory

    if replay is not None:
        return inventory.replayed(inventory.read_capture(replay))
    return inventory.this_machine(ask_apis=ask_apis, record=record, act=act and ask_apis)


COMMANDS = (facts, topology, doctor, explain)
