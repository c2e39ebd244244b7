# ruff: noqa: FBT001, PLR0917 - click passes the options as keyword arguments.
"""The command line ``gdrkit``.

An error of gdrkit is printed as one line: API, call, errno and what to do. The class of the exception determines the
exit code. With GDRKIT_TRACEBACK=1 the exception is raised, so that Python prints its traceback.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

import gdrkit
from gdrkit import cli_files, cli_inventory, cli_observe, cli_report, cli_serve, cli_tiers
from gdrkit.errors import Api, ApiError, GdrkitError, UsageError
from gdrkit.exit_code import ExitCode
from gdrkit.text import escape_controls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

# The exit codes with which a shell reports a command that it cannot start, and a command that SIGINT ended (128 + 2).
_EXIT_NOT_FOUND, _EXIT_NOT_EXECUTABLE = 127, 126
_EXIT_INTERRUPTED = 130
# The shortest --budget of `gdrkit check`, in seconds: an idle machine needs about half of it to start the cases.
_BUDGET_S_MIN = 10.0
# The list of exit codes in the help texts of `gdrkit qualify` and `gdrkit check`.
_EXIT_CODES_TEXT = "\n".join(f"  {int(code)} {code.meaning}" for code in ExitCode)


class _CommandGroup(click.Group):
    """The group of all commands. If a command fails with a GdrkitError, the group returns the error."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command and return its result, or its GdrkitError, which :func:`main` prints.

        The error is returned and not raised, because a GdrkitError can be an OSError too. If click sees an OSError with
        the errno EPIPE, it ends the process without a message.
        """
        try:
            return super().invoke(ctx)
        except GdrkitError as error:
            return error


# A line with the character "\b" makes click keep the line breaks of a paragraph. A docstring with a backslash must be
# raw (ruff D301), and a raw string cannot contain this character. So the examples are in the epilogs.
@click.group(
    cls=_CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit qualify                       run the cases that fit this machine and write a report\n"
        "  gdrkit doctor                        find the reasons why transfers are not direct\n"
        "  gdrkit topology                      show which GPU is near to which NIC and NVMe controller\n"
        "  gdrkit observe -- COMMAND            show which path the bytes of a program took\n"
        "  gdrkit run --software -- COMMAND     run a program on software twins (drop-in libraries that\n"
        "                                       emulate the hardware)\n\n"
        "`gdrkit COMMAND --help` describes a command. A command that fails prints one line: the API, the call, the "
        "errno and what to do."
    ),
)
@click.version_option(gdrkit.__version__, message="gdrkit %(version)s", help="Print the version and exit.")
def cli() -> None:
    """Qualify this machine for direct transfers between GPU memory, RDMA NICs and storage."""


@cli.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit qualify                               qualify this machine\n"
        "  gdrkit qualify --software                    run all cases on software twins\n"
        "  gdrkit qualify -k registration --out /tmp/r  run some cases\n"
        "  mpirun -n 2 --host a,b gdrkit qualify --mpi  measure between two hosts\n\n"
        f"\b\nExit codes:\n{_EXIT_CODES_TEXT}\n\n"
        "On a machine without a GPU the exit code is never 0, so `gdrkit qualify && admit_node` does not admit it."
    )
)
@click.option(
    "--software",
    is_flag=True,
    help="Run every API on its software twin. This tests gdrkit, and says nothing about this machine.",
)
@click.option(
    "--profile",
    metavar="NAME",
    help="The profile of this kind of machine, from hardware/profiles. Default: the profile that fits best.",
)
@click.option(
    "--output",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The folder of the report. Default: a new folder in reports/runs, or gdrkit-report outside of a checkout.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    help="Seed of payloads, memory keys and delays. With the same seed, a run uses the same values again. "
    "Default: a random seed.",
)
@click.option("-k", "select", metavar="EXPRESSION", help="Run only the cases whose names match, as pytest -k does.")
@click.option(
    "--suites",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Run the cases in this folder that have the pytest mark `qualify`, instead of the cases of gdrkit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and the progress to standard error.")
@click.option(
    "--mpi",
    type=click.Choice(["hosts", "within"]),
    is_flag=False,
    flag_value="hosts",
    help="Measure between the NICs and GPUs of the ranks of mpirun or srun, and write one report: `hosts` measures "
    "between hosts, `within` inside each host. --mpi without a value means `hosts`.",
)
def qualify(
    software: bool,
    profile: str | None,
    output: Path | None,
    seed: int | None,
    select: str | None,
    suites: Path | None,
    as_json: bool,
    mpi: str | None,
) -> int:
    """Test which transfers are direct on this machine, and write a report.

    The command examines the host, selects the cases that fit, runs them in separate processes, and writes
    records.jsonl, junit.xml, summary.md and index.html.

    An API runs on its hardware if this machine has that hardware, and otherwise on its software twin, a drop-in library
    that emulates the hardware. A result on a twin says nothing about the machine.
    """
    from gdrkit.qualify import Options
    from gdrkit.qualify import qualify as run_qualification
    from gdrkit.qualify.progress import make_progress
    from gdrkit.report.contents import read_contents
    from gdrkit.report.failures import describe_failures
    from gdrkit.report.routes import route_statuses

    command_line = shlex.join(["gdrkit", *sys.argv[1:]])
    options = Options(
        uses_only_twins=software,
        profile=profile,
        output=output,
        seed=seed,
        select=select,
        suites=suites,
        command=command_line,
    )
    progress = make_progress(sys.stderr if as_json else sys.stdout)
    if mpi is not None:
        from gdrkit.qualify.ranks import qualify_ranks

        if select or suites or as_json:
            message = "--mpi cannot be combined with -k, --suites or --json: it runs no cases and prints no JSON"
            raise UsageError(message)
        return qualify_ranks(options, progress, within_hosts=mpi == "within")
    run, report_folder = run_qualification(options, progress)
    if as_json:
        from gdrkit.serialization import to_json_data

        report_contents = read_contents(report_folder.path)
        routes = [
            {"name": status.name, "state": status.state.value, "cause": status.cause}
            for status in route_statuses(report_contents.facts, report_contents.records)
        ]
        result = {"run": to_json_data(run), "routes": routes, "folder": str(report_folder.path)}
        click.echo(json.dumps(result, indent=2))
        return run.exit_code
    report_contents = read_contents(report_folder.path)
    for line in describe_failures(report_contents.facts, report_contents.records):
        click.echo(escape_controls(line))
    click.echo(escape_controls(run.verdict))
    for line in (*run.causes, *(f"To do: {action}" for action in run.to_do)):
        click.echo(escape_controls(f"  {line}"))
    click.echo(f"Report: {report_folder.index}")
    return run.exit_code


@cli.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit check                          checks a node in at most 60 s\n"
        "  gdrkit check --budget 20 || exit 1    in a Slurm prolog\n\n"
        f"\b\nExit codes:\n{_EXIT_CODES_TEXT}\n\n"
        "If the time does not suffice, for example because a driver hangs, the exit code is 1."
    )
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(_BUDGET_S_MIN, 3600),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="The command ends within this time.",
)
@click.option(
    "--software", is_flag=True, help="Run every API on its software twin. This says nothing about the machine."
)
@click.option("--profile", metavar="NAME", help="The profile of this kind of machine. Default: the best fit.")
def check(budget_s: float, software: bool, profile: str | None) -> int:
    """Check the routes that the profile requires, and print one line.

    The command moves bytes between each GPU and each NIC, and compares them. It writes no report. A workload manager
    can run it before each job; `gdrkit qualify` runs all cases.
    """
    from gdrkit.qualify import Options
    from gdrkit.qualify import check as run_check

    options = Options(uses_only_twins=software, profile=profile, command=shlex.join(["gdrkit", *sys.argv[1:]]))
    result = run_check(options, budget_s=budget_s)
    click.echo(result.line)
    return int(result.code)


@cli.command(
    name="run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit run --software -- python my_program.py\n"
        "  gdrkit run --software --apis verbs -- ibv_devinfo\n"
        "  gdrkit run --software --faults plan.txt -- ./my_test\n"
        "  gdrkit run --software --require verbs -- ucx_perftest ...\n\n"
        '\b\nA fault plan begins with the line "gdrkit-faults 1" and has one rule per line:\n'
        "  ibv_reg_dmabuf_mr  call=2    errno=EOPNOTSUPP\n"
        "  cuMemAlloc_v2      call=1-3  status=2\n"
        "  wc.rdma_write      call=*    status=12\n\n"
        "\b\nExit codes: the exit code of COMMAND, or\n"
        "  127 COMMAND was not found\n"
        "  126 COMMAND cannot be executed\n"
        "  2 wrong usage, or a malformed fault plan\n"
        "  3 the twins are not installed\n"
        "  125 COMMAND ended with 0, but did not use every API of --require"
    ),
)
@click.option("--software", is_flag=True, help="Run COMMAND on software twins. This option is required.")
@click.option("--apis", metavar="LIST", help="The APIs that run on twins, such as verbs,cuda. Default: all.")
@click.option(
    "--faults",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="A file with rules: which calls of which functions fail, and how.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    metavar="N",
    help="Seed of memory keys, queue pair numbers and delays. Default: a random seed.",
)
@click.option(
    "--isolated",
    is_flag=True,
    help="Keep COMMAND and its children from communicating with other processes on twins. Default: all processes of "
    "one user on twins can communicate.",
)
@click.option(
    "--require",
    metavar="LIST",
    help="Exit with 125 if COMMAND ends with 0, but did not use every API of LIST, such as verbs,cuda.",
)
@click.option("--quiet", is_flag=True, help="Do not print which twins COMMAND used.")
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a JSON file about the twins that COMMAND used: the number of objects and of moved bytes per process.",
)
@click.argument("command", nargs=-1, required=True)
def run_command(
    software: bool,
    apis: str | None,
    faults: Path | None,
    seed: int | None,
    isolated: bool,
    require: str | None,
    quiet: bool,
    report_file: Path | None,
    command: tuple[str, ...],
) -> NoReturn:
    """Run a program on software twins of its libraries.

    A software twin is a drop-in library that emulates the hardware. The program is not changed: variables of the
    dynamic loader make it use the twins. Signals reach the program, and gdrkit returns its exit code. When the program
    has ended, gdrkit prints one line for each API: which processes used the twin. docs/twins.md lists programs that
    were tested.
    """
    from gdrkit import host, launch
    from gdrkit.twin_run import run_on_twins

    if not software:
        message = "gdrkit run needs --software"
        raise UsageError(message, what_to_do="add --software, or start the command without gdrkit")
    twin_apis = launch.APIS_WITH_TWINS if apis is None else launch.parse_apis(apis)
    launch_options = launch.Launch(twin_apis=twin_apis, seed=seed, faults=faults, isolated=isolated)
    warning = launch.describe_hardware_replaced_by_twins(launch_options, host.HostTree())
    if warning:
        click.echo(f"gdrkit: {warning}", err=True)
    required_apis = frozenset[Api]() if require is None else launch.parse_apis(require)
    run_on_twins(launch_options, command, required=required_apis, quiet=quiet, report_file=report_file)


@cli.command(epilog="\b\nExamples:\n  gdrkit plan\n  gdrkit plan --profile h200-1 --json")
@click.option("--software", is_flag=True, help="Print the plan of `gdrkit qualify --software`.")
@click.option("--profile", metavar="NAME", help="The profile, as for `gdrkit qualify --profile`.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(software: bool, profile: str | None, as_json: bool) -> int:
    """List the cases that `gdrkit qualify` would run on this machine.

    For each other case, the command prints why it would not run.
    """
    from gdrkit.qualify import Options, plan_only
    from gdrkit.qualify.progress import LineProgress

    plan_data = plan_only(Options(uses_only_twins=software, profile=profile), LineProgress(sys.stderr))
    if as_json:
        click.echo(json.dumps(plan_data, indent=2))
        return 0
    from gdrkit.report.describe import describe_plan

    click.echo(describe_plan(plan_data))
    return 0


for _module in (cli_inventory, cli_observe, cli_report, cli_files, cli_serve):
    for _command in _module.COMMANDS:
        cli.add_command(_command)


@cli.command()
def version() -> int:
    """Print the version of gdrkit, and its commit in a checkout."""
    from gdrkit.install_paths import install_paths

    commit = install_paths().commit()
    click.echo(f"gdrkit {gdrkit.__version__}" + (f" ({commit})" if commit else ""))
    return 0


cli.add_command(cli_tiers.tiers)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code."""
    sys.exit(
        _run_and_report(
            lambda: cli.main(
                args=None if arguments is None else list(arguments), prog_name="gdrkit", standalone_mode=False
            )
        )
    )


def _run_and_report(command: Callable[[], object]) -> int:
    """Run a command, print its error if it fails, and return the exit code."""
    try:
        result = command()
    except click.exceptions.Abort:
        click.echo("gdrkit: interrupted", err=True)
        return _EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return int(ExitCode.WRONG_USAGE)
    except GdrkitError as error:
        result = error
    if isinstance(result, GdrkitError):
        if os.environ.get("GDRKIT_TRACEBACK") == "1":
            raise result
        click.echo(f"gdrkit: {escape_controls(str(result))}", err=True)
        return _find_exit_code(result)
    return result if isinstance(result, int) else 0


def _find_exit_code(error: GdrkitError) -> int:
    # `gdrkit run` starts COMMAND with execvp(3). If that fails, gdrkit ends with the same exit code as a shell.
    if isinstance(error, ApiError) and error.operation == "execvp":
        return _EXIT_NOT_FOUND if error.errno == errno.ENOENT else _EXIT_NOT_EXECUTABLE
    is_fault_plan_error = isinstance(error, ApiError) and error.operation == "read fault plan"
    return int(ExitCode.WRONG_USAGE if is_fault_plan_error else ExitCode.of(error))
