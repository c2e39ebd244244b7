# ruff: noqa: FBT001, PLR0917 - click calls commands by the names of their options.
"""The commands ``gdrkit observe`` (which path the bytes of a program took) and ``gdrkit monitor`` (live metrics).

:mod:`gdrkit.cli` adds them to its command line, and turns their errors into messages and exit codes.
"""

from __future__ import annotations

from pathlib import Path

import click

from gdrkit.errors import UsageError

__all__ = ["COMMANDS"]


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit observe -- python train.py\n"
        "  gdrkit observe --logs --html path.html -- mpirun -n 2 all_reduce_perf\n"
        "  gdrkit observe --pid 4711 --seconds 10 --json\n"
        "  gdrkit run --software -- gdrkit observe -- ib_write_bw\n\n"
        "\b\nExit codes: the exit code of COMMAND, or\n"
        "  0 the process of --pid was observed\n"
        "  1 there is no such process, or it belongs to another user\n"
        "  2 wrong usage\n"
        "  127 COMMAND was not found\n"
        "  126 COMMAND cannot be executed"
    ),
)
@click.option(
    "--pid", "process_id", type=click.IntRange(1), metavar="PID", help="Observe this running process and its children."
)
@click.option(
    "--seconds",
    "duration_s",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="With --pid: stop after N seconds. Default: when the process ends, or at Ctrl-C.",
)
@click.option("--logs", is_flag=True, help="Switch on the log lines in which NCCL and UCX name their transports.")
@click.option("--json", "as_json", is_flag=True, help="Print the observation as JSON to standard output.")
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the observation as JSON to this file.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the observation as an HTML page.",
)
@click.argument("command", nargs=-1)
def observe(
    process_id: int | None,
    duration_s: float | None,
    logs: bool,
    as_json: bool,
    report_file: Path | None,
    html_file: Path | None,
    command: tuple[str, ...],
) -> int:
    """Say which path the bytes of a program took: NIC, NVLink, nvidia-fs, host memory or TCP.

    The program is not changed. The command reads what the kernel, the drivers and the counters of the devices show
    about the program, gives one verdict per route, and lists what could not be observed, and why. For a COMMAND, the
    verdicts are printed to standard error when COMMAND has ended.
    """
    from gdrkit.observe import describe_observation, observe_process, render_page, run_observed
    from gdrkit.twin_run import exit_like

    if (process_id is None) == (not command):
        message = "gdrkit observe needs either --pid PID or a command"
        raise UsageError(message, what_to_do="write the command after --: gdrkit observe -- python my_program.py")
    if process_id is None and duration_s is not None:
        message = "--seconds needs --pid: a command is observed until it ends"
        raise UsageError(message)
    if process_id is not None and logs:
        message = "--logs needs a command: a running process has read its environment already"
        raise UsageError(message)
    wait_status = None
    if process_id is not None:
        observation = observe_process(process_id, duration_s=duration_s)
    else:
        observation, wait_status = run_observed(command, with_logs=logs)
    if report_file is not None:
        report_file.write_text(observation.to_json(), encoding="utf-8")
    if html_file is not None:
        html_file.write_text(render_page(observation), encoding="utf-8")
    if as_json:
        click.echo(observation.to_json(), nl=False)
    else:
        prefix = "" if wait_status is None else "gdrkit: "
        for line in describe_observation(observation).splitlines():
            click.echo(prefix + line, err=wait_status is not None)
    if wait_status is not None:
        exit_like(wait_status)
    return 0


@click.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit monitor\n"
        "  gdrkit monitor --listen 0.0.0.0:9988\n\n"
        "\b\nExit codes:\n"
        "  0 the command was ended by SIGTERM or SIGINT\n"
        "  1 the address cannot be used\n"
        "  2 wrong usage\n"
        "  3 prometheus_client is not installed"
    )
)
@click.option(
    "--listen",
    default="127.0.0.1:9988",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the HTTP server. Port 0 chooses a free port.",
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0, 3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Read the machine at most once in this many seconds, however often the metrics are requested.",
)
def monitor(listen: str, interval_s: float) -> int:
    """Serve metrics of this machine to Prometheus, until SIGTERM or SIGINT.

    The metrics are the queue pairs, memory regions and dma-bufs of every process, BAR1 of every GPU, and the counters
    of NICs and of nvidia-fs. The command reads them when Prometheus asks. The first line of the output is the address.
    """
    import logging
    import signal

    from gdrkit.monitor import MachineReader, parse_address, serve_metrics

    logging.basicConfig(level=logging.WARNING, format="gdrkit monitor: %(message)s")
    host, port = parse_address(listen)
    # sigwait() receives a signal only if every thread blocks it.
    end_signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, end_signals)
    with serve_metrics(host, port, metrics=MachineReader(interval_s=interval_s).read) as server:
        click.echo(server.address)
        signal.sigwait(end_signals)
    return 0


COMMANDS = (observe, monitor)
