# ruff: noqa: FBT001 - click calls commands by the names of their options.
"""The commands that examine a machine: ``gdrkit facts``, ``topology``, ``doctor``, ``reach`` and ``explain``.

:mod:`gdrkit.cli` adds them to its command line, and turns their errors into messages and exit codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdrkit.exit_code import ExitCode

if TYPE_CHECKING:
    from gdrkit.inventory import Machine

__all__ = ["COMMANDS"]

_replay_option = click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Examine another machine, from a file of `gdrkit facts --save`, a topology XML of NCCL, the output of lspci "
    "-vvv, or a copy of the folder /sys/class/infiniband.",
)


@click.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit facts --json\n"
        "  gdrkit facts --save node7.json.gz\n"
        "  gdrkit facts --replay node7.json.gz"
    )
)
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
@click.option("--no-apis", is_flag=True, help="Only read files, and call no API (CUDA, verbs, NVML).")
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Save all data in a file, for --replay on another machine. A name that ends in .gz is compressed.",
)
@_replay_option
def facts(as_json: bool, no_apis: bool, save: Path | None, replay: Path | None) -> int:
    """List the devices, drivers and libraries of this machine.

    The command reads sysfs, procfs and the cache of the dynamic loader. These reads need no driver. Then the command
    queries CUDA, verbs, NVML and memory registration in child processes.
    """
    from gdrkit import inventory
    from gdrkit.report.describe import describe_facts

    machine = _choose_machine(replay, query_apis=not no_apis, record_files=save is not None)
    if save is not None:
        # A capture contains only the files that this process has read. These two calls read the files that
        # `gdrkit doctor --replay` and `gdrkit topology --replay` need.
        inventory.diagnose(machine)
        inventory.topology(machine)
        inventory.write_capture(save, machine.capture())
    machine_facts = machine.facts
    click.echo(machine_facts.to_json() if as_json else describe_facts(machine_facts), nl=not as_json)
    return 0


@click.command(epilog="\b\nExamples:\n  gdrkit topology\n  gdrkit topology --replay node7.json.gz --json")
@click.option("--json", "as_json", is_flag=True, help="Print the topology as JSON.")
@_replay_option
def topology(as_json: bool, replay: Path | None) -> int:
    """Show the PCI topology of GPUs, NICs and NVMe controllers."""
    from gdrkit import inventory

    pci_topology = inventory.topology(_choose_machine(replay, query_apis=False))
    if as_json:
        click.echo(pci_topology.to_json(), nl=False)
        return 0
    from gdrkit.report.topology import describe_topology

    click.echo(describe_topology(pci_topology))
    return 0


@click.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit doctor\n"
        "  gdrkit doctor --read-only --json\n"
        "  gdrkit doctor --replay node7.json.gz\n\n"
        "\b\nExit codes:\n"
        "  0 no known cause was found\n"
        "  1 at least one known cause was found (0 with --any)\n"
        "  2 wrong usage\n"
        "  4 the machine has neither a GPU nor a NIC (0 with --any)"
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as JSON.")
@click.option("--read-only", is_flag=True, help="Run no rule that allocates or registers memory or transfers bytes.")
@click.option("-v", "--verbose", is_flag=True, help="Print what each rule read.")
@click.option(
    "--any", "ignores_result", is_flag=True, help="Exit with 0 even if a cause was found or there is no device."
)
@_replay_option
def doctor(as_json: bool, read_only: bool, verbose: bool, ignores_result: bool, replay: Path | None) -> int:
    """Find the reasons why transfers are not direct on this machine.

    Each rule checks one known cause, and says what to do about it. A few rules register a little memory and transfer
    bytes in loopback, in a child process with a time limit; --read-only omits these rules.
    """
    from gdrkit import inventory
    from gdrkit.verdict import Verdict

    machine = _choose_machine(replay, run_experiments=not read_only)
    diagnosis = inventory.diagnose(machine)
    if as_json:
        click.echo(diagnosis.to_json(), nl=False)
    else:
        from gdrkit.report.doctor import describe_diagnosis

        click.echo(describe_diagnosis(diagnosis, verbose=verbose))
    if ignores_result:
        return 0
    if not machine.has_gpu_or_nic:
        return int(ExitCode.NOTHING_PROVEN)
    return int(ExitCode.FAILED) if diagnosis.findings_with(Verdict.FAIL) else 0


@click.command(
    epilog=(
        "\b\nExamples:\n  gdrkit reach\n  gdrkit reach --json\n  gdrkit reach --balance 10\n\n"
        "\b\nExit codes:\n"
        "  0 every NIC reaches every GPU\n"
        "  1 a NIC does not reach a GPU (gdrkit does not use it for this GPU), or --balance found a slow NIC\n"
        "  2 wrong usage\n"
        "  3 a library is missing\n"
        "  4 there is no GPU, or no NIC with an active port"
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
@click.option(
    "--balance",
    "balance_s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    metavar="SECONDS",
    help="After the measurements of single NICs, transfer between all GPUs and all NICs at once for this time, and "
    "show the share of each NIC.",
)
def reach(as_json: bool, balance_s: float) -> int:
    """Measure which NICs reach which GPUs, and store the results for programs that choose NICs.

    For each GPU and each pair of NICs, the command registers a page of GPU memory, and writes and reads it through the
    NICs. It checks every byte and the counters of both ports. The path of a result is "loopback" if both ends are the
    same NIC, and "wire" otherwise.
    """
    from gdrkit.inventory.reach import measure_machine
    from gdrkit.report.reach import describe_reach, reach_as_json
    from gdrkit.report.routes import why_not_hardware
    from gdrkit.report.substrate import substrates_of_facts

    results, balance = measure_machine(balance_s=balance_s)
    substrates = substrates_of_facts(_choose_machine(None).facts) if results else {}
    caveat = why_not_hardware({api: substrate.value for api, substrate in substrates.items()})
    format_results = reach_as_json if as_json else describe_reach
    click.echo(format_results(results, balance, caveat=caveat), nl=not as_json)
    if not results:
        return int(ExitCode.NOTHING_PROVEN)
    measured_pairs = {(result.gpu_uuid, result.nic) for result in results}
    reached_pairs = {(result.gpu_uuid, result.nic) for result in results if result.moved}
    is_slow = balance is not None and bool(balance.slow_nics)
    return int(ExitCode.PROVEN if reached_pairs == measured_pairs and not is_slow else ExitCode.FAILED)


@click.command(epilog="\b\nExamples:\n  gdrkit explain\n  gdrkit explain acs-redirect")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the cause as a JSON object, or all causes as a list if CODE is missing.",
)
@click.argument("code", required=False)
def explain(code: str | None, as_json: bool) -> int:
    """Explain one cause that the doctor knows, or list all of them."""
    from gdrkit import inventory
    from gdrkit.report.doctor import describe_rule, list_rules, rules_as_json

    rule = None if code is None else inventory.rule_of(code)
    if as_json:
        click.echo(rules_as_json(inventory.RULES if rule is None else rule), nl=False)
    else:
        click.echo(list_rules(inventory.RULES) if rule is None else describe_rule(rule))
    return 0


def _choose_machine(
    replay: Path | None, *, query_apis: bool = True, record_files: bool = False, run_experiments: bool = True
) -> Machine:
    """Return the machine that the file `replay` describes, or this machine if `replay` is None.

    `record_files` keeps the files that are read, for a capture. `run_experiments` allows the rules of the doctor to
    register memory and transfer bytes.
    """
    from gdrkit import inventory

    if replay is not None:
        return inventory.captured_machine(inventory.read_capture(replay))
    return inventory.this_machine(
        query_apis=query_apis, record_files=record_files, run_experiments=run_experiments and query_apis
    )


COMMANDS = (facts, topology, doctor, reach, explain)
