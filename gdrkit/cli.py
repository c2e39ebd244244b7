# ruff: noqa: FBT001, PLR0917 - click calls commands by the names of their options.
"""The command line.

Every error is one line: API, operation, status, errno, what to do. The type of the error decides the exit code.
GDRKIT_TRACEBACK=1 shows the Python traceback.
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
from gdrkit import cli_files, cli_inventory, cli_report, cli_tiers
from gdrkit.errors import ApiError, GdrkitError, UsageError
from gdrkit.exit_code import ExitCode
from gdrkit.text import escape_controls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_CODES = "\n".join(f"  {int(code)} {code.meaning}" for code in ExitCode)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(gdrkit.__version__, message="gdrkit %(version)s", help="Print the version and exit.")
def cli() -> None:
    r"""Qualify this machine for direct transfers between GPU memory, RDMA NICs and storage.

    \b
    gdrkit qualify                        what can this machine really do directly? writes a report
    gdrkit run --software -- COMMAND      run a program on software twins of its libraries
    gdrkit doctor                         why are transfers not direct here, and what to do?
    gdrkit topology                       which GPU is near to which NIC and NVMe?
    gdrkit facts                          what is in this machine, and what do its APIs answer?

    A command that cannot do what it was asked says so in one line, with the API, the operation, the errno and what to
    do.
    """


@cli.command(
    epilog=f"\b\nExit codes:\n{_CODES}\n\n`gdrkit qualify && admit_node` never admits a machine without a GPU."
)
@click.option(
    "--software", is_flag=True, help="Run every API on its software twin: qualifies the code, not this machine."
)
@click.option(
    "--profile",
    metavar="NAME",
    help="The profile of this machine (hardware/profiles). Default: the one that fits best.",
)
@click.option(
    "--output",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The folder of the report. Default: a new one below reports/runs, or gdrkit-report outside of a checkout.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    help="Of payloads, keys and delays: repeats a run. Default: drawn.",
)
@click.option("-k", "select", metavar="EXPRESSION", help="Run only cases whose names match, as with pytest -k.")
@click.option(
    "--suites",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Run the cases of another folder that are marked `qualify`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to standard error.")
@click.option(
    "--mpi",
    type=click.Choice(["hosts", "within"]),
    is_flag=False,
    flag_value="hosts",
    help="Started by mpirun or srun: measure NICs and GPUs of different hosts, or =within the same host; one report.",
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
    """Find out what this machine does directly, and write the report.

    Probes the host, plans which cases fit, runs them between real processes, and writes records.jsonl, junit.xml,
    summary.md and index.html.

    An API whose hardware is here runs on it; one whose hardware is missing runs on its software twin, and then nothing
    is claimed about the machine.
    """
    from gdrkit.qualify import Options
    from gdrkit.qualify import qualify as run_qualification
    from gdrkit.qualify.progress import progress_for
    from gdrkit.report.contents import read_contents
    from gdrkit.report.routes import route_statuses

    command = shlex.join(["gdrkit", *sys.argv[1:]])
    options = Options(
        software=software, profile=profile, output=output, seed=seed, select=select, suites=suites, command=command
    )
    progress = progress_for(sys.stderr if as_json else sys.stdout)
    if mpi is not None:
        from gdrkit.qualify.ranks import qualify_ranks

        if select or suites or as_json:
            message = "--mpi measures pairs and runs no cases: it takes neither -k nor --suites, and prints no --json"
            raise UsageError(message)
        return qualify_ranks(options, progress, within_hosts=mpi == "within")
    run, folder = run_qualification(options, progress)
    if as_json:
        from gdrkit.serialization import to_json_data

        contents = read_contents(folder.path)
        routes = [
            {"name": status.name, "state": status.state.value, "cause": status.cause}
            for status in route_statuses(contents.facts, contents.records)
        ]
        click.echo(json.dumps({"run": to_json_data(run), "routes": routes, "folder": str(folder.path)}, indent=2))
        return run.exit_code
    progress.say(run.verdict)
    for line in (*run.causes, *(f"To do: {line}" for line in run.to_do)):
        click.echo(f"  {line}")
    click.echo(f"Report: {folder.index}")
    return run.exit_code


@cli.command(
    name="run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=(
        "\b\nExit codes: that of COMMAND; 127 it is not found; 126 it cannot be executed;\n"
        "2 wrong usage (also a malformed fault plan); 3 the twins are not installed."
    ),
)
@click.option("--software", is_flag=True, help="Put the software twins beneath COMMAND.")
@click.option("--apis", metavar="LIST", help="Which APIs, e.g. verbs or verbs,cuda. Default: all that have a twin.")
@click.option(
    "--faults",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="A fault plan: which call of which function fails, and how.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    metavar="N",
    help="Of keys, queue-pair numbers and delays. Default: drawn.",
)
@click.option(
    "--isolated",
    is_flag=True,
    help="Let COMMAND and its children see no other process on twins. Default: all of one user see each other, as "
    "programs of one machine do.",
)
@click.argument("command", nargs=-1, required=True)
def run_command(
    software: bool, apis: str | None, faults: Path | None, seed: int | None, isolated: bool, command: tuple[str, ...]
) -> NoReturn:
    r"""Run a program on the software twins: gdrkit run --software -- COMMAND.

    The program is not changed: the dynamic loader finds the twins by LD_LIBRARY_PATH. gdrkit becomes the program, so
    signals and the exit code are its own. docs/twins.md says which programs were seen to run.

    \b
    A fault plan begins with the line "gdrkit-faults 1" and has one rule a line:
      ibv_reg_dmabuf_mr  call=2    errno=EOPNOTSUPP
      cuMemAlloc_v2      call=1-3  status=2
      wc.rdma_write      call=*    status=12
    """
    from gdrkit import host, launch

    if not software:
        message = "gdrkit run without --software would run the command as it is"
        raise UsageError(message, what_to_do="add --software, or run the command itself")
    chosen = launch.TWINNED if apis is None else launch.parse_apis(apis)
    started = launch.Launch(software=chosen, seed=seed, faults=faults, isolated=isolated)
    overridden = launch.overridden_hardware(started, host.HostTree())
    if overridden:
        click.echo(f"gdrkit: {overridden}", err=True)
    launch.execute(started, command)


@cli.command()
@click.option("--software", is_flag=True, help="As for qualify.")
@click.option("--profile", metavar="NAME", help="As for qualify.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def plan(software: bool, profile: str | None, as_json: bool) -> int:
    """Say what would run on this machine, and why the rest would not."""
    from gdrkit.qualify import Options, plan_only
    from gdrkit.qualify.progress import LineProgress

    found = plan_only(Options(software=software, profile=profile), LineProgress(sys.stderr))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return 0
    from gdrkit.report.describe import describe_plan

    click.echo(describe_plan(found))
    return 0


@cli.command()
@click.option(
    "--store",
    "root",
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="The folder whose files are served; gdrkit keeps their checksums in DIR/.gdrkit.",
)
@click.option(
    "--listen",
    metavar="PLACE",
    help="HOST:PORT (a client needs DIR/.gdrkit/token) or unix:PATH. Default: unix:DIR/.gdrkit/server.sock.",
)
@click.option(
    "--nic", "nics", multiple=True, metavar="NAME", help="Use this NIC; may stand more than once. Default: all."
)
@click.option(
    "--chunk-bytes", type=int, metavar="N", help="What a checksum covers, for a new store: 4096 (default) to 65536."
)
def serve(root: Path, listen: str | None, nics: tuple[str, ...], chunk_bytes: int | None) -> int:
    """Serve the files of a folder over RDMA, until SIGTERM or SIGINT.

    One node, no replication. The line that says where it listens is printed when clients can come.
    """
    from gdrkit.storage.command import serve as serve_store

    return serve_store(root, listen=listen, nic_names=nics, chunk_bytes=chunk_bytes)


@cli.command()
@click.argument("mount", type=click.Path(path_type=Path))
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Serve this folder, which is the mount itself unless --fuse is given.",
)
@click.option("--server", metavar="HOST:PORT", help="Serve what this storage server has, by a FUSE mount.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="The token of that server's store.")
@click.option("--fuse", is_flag=True, help="Mount on MOUNT, an empty folder, also with --store.")
@click.option("--spin-us", type=click.IntRange(0, 10_000_000), default=50, help="How long to look before sleeping.")
@click.option(
    "--silence-ms",
    type=click.IntRange(1, 86_400_000),
    default=60_000,
    help="How long a storage server that has operations may give no result before they fail.",
)
@click.option("--json", "as_json", is_flag=True, help="Say that it is ready, and what it counted, as JSON.")
def agent(
    mount: Path,
    store: Path | None,
    server: str | None,
    token_file: Path | None,
    fuse: bool,
    spin_us: int,
    silence_ms: int,
    as_json: bool,
) -> int:
    """Serve the hf3fs interface below MOUNT, until SIGTERM or SIGINT.

    Registers the memory of applications with every active NIC, and has a storage server of its own move the files of
    DIR. The line that it is ready is printed when applications can come.
    """
    from gdrkit.usrbio.agent._agent_loop import limit_arenas
    from gdrkit.usrbio.agent.agent import block_signals, plain_agent, serve_until_signalled

    if (store is None) == (server is None):
        message = "one storage server is needed"
        raise UsageError(message, what_to_do="add --store DIR, or --server HOST:PORT")
    block_signals()
    limit_arenas()
    if store is not None and not fuse:
        running = plain_agent(mount, store, spin_us=spin_us, silence_ms=silence_ms)
        serve_until_signalled(running, as_json=as_json)
        return 0
    from gdrkit.storage.token import read_token_file
    from gdrkit.usrbio.fuse.agent import fuse_agent

    token = None if token_file is None else read_token_file(token_file)
    mounted = fuse_agent(mount, store=store, server=server, token=token, spin_us=spin_us, silence_ms=silence_ms)
    serve_until_signalled(mounted, as_json=as_json)
    return 0


for _command in (*cli_inventory.COMMANDS, *cli_report.COMMANDS, *cli_files.COMMANDS):
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
        _guarded(
            lambda: cli.main(
                args=None if arguments is None else list(arguments), prog_name="gdrkit", standalone_mode=False
            )
        )
    )


def _guarded(command: Callable[[], object]) -> int:
    try:
        code = command()
    except click.exceptions.Abort:
        click.echo("gdrkit: interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return int(ExitCode.WRONG_USAGE)
    except GdrkitError as error:
        if os.environ.get("GDRKIT_TRACEBACK") == "1":
            raise
        click.echo(f"gdrkit: {escape_controls(str(error))}", err=True)
        return _code_of(error)
    return code if isinstance(code, int) else 0


def _code_of(error: GdrkitError) -> int:
    if isinstance(error, ApiError) and error.operation == "execvp":  # The exit codes are those of a shell.
        return _NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE
    is_plan = isinstance(error, ApiError) and error.operation == "read fault plan"
    return int(ExitCode.WRONG_USAGE if is_plan else ExitCode.of(error))
