# ruff: noqa: FBT001, PLR0917 - click calls commands by the names of their options.
"""The commands ``gdrkit copy`` and ``gdrkit bench storage``, which transfer files to and from device memory.

:mod:`gdrkit.cli` adds them to its command line, and turns their errors into messages and exit codes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdrkit.errors import UsageError
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.gds import CopyResult, CopyTotals
    from gdrkit.gds.speed import BenchmarkPoint

__all__ = ["COMMANDS"]

_FILE_TYPE = click.Path(path_type=Path)
_FOLDER_TYPE = click.Path(path_type=Path, exists=True, file_okay=False)
_device_option = click.option("--device", type=click.IntRange(0), metavar="N", help="The CUDA device. Default: 0.")
_host_option = click.option("--host", is_flag=True, help="Use host memory instead of a CUDA device.")
_direct_option = click.option(
    "--direct",
    type=click.Choice(["preferred", "required", "never"]),
    default="preferred",
    show_default=True,
    help="Whether the bytes go between disk and device without host memory. With `required`, the command fails if "
    "this cannot be proven.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit copy model.bin /mnt/nvme/model.bin\n"
        "  gdrkit copy --direct required --check model.bin /mnt/nvme/\n"
        "  gdrkit copy --host --access direct a b"
    )
)
@click.argument("source", type=_FILE_TYPE)
@click.argument("destination", type=_FILE_TYPE)
@_device_option
@_host_option
@_direct_option
@click.option(
    "--access",
    type=click.Choice(["automatic", "buffered", "direct"]),
    default="automatic",
    show_default=True,
    help="How the copy engine does its I/O: `buffered` uses the page cache, `direct` uses O_DIRECT, `automatic` uses "
    "the page cache for ranges that are cached.",
)
@click.option("--sync", is_flag=True, help="Sync the new file and its directory before the command ends.")
@click.option("--check", is_flag=True, help="Compare both files byte by byte before the new file gets its name.")
@_json_option
def copy(
    source: Path,
    destination: Path,
    device: int | None,
    host: bool,
    direct: Any,  # noqa: ANN401 - click has checked that it is one of the choices.
    access: Any,  # noqa: ANN401 - click has checked that it is one of the choices.
    sync: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Copy a file through device memory, and report its route.

    DESTINATION is the new file, or the folder for it. The new file gets its name when it is complete. A copy that is
    interrupted leaves no file. If DESTINATION exists, the command replaces a regular file, follows a symbolic link, and
    refuses every other type of file.
    """
    from gdrkit import gds

    with (
        _cancel_on_interrupt(),
        _show_progress("copy", unit_is_bytes=True, is_visible=not as_json) as update_progress,
        _suppress_fallback_warning(),
    ):
        copy_result = gds.copy_file(
            source,
            destination,
            device_index=_choose_device_index(device, host=host),
            access=access,
            direct=direct,
            durable=sync,
            check=check,
            on_progress=update_progress,
        )
    substrate_by_api = _find_cuda_substrates()
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(copy_result), "substrate": substrate_by_api}, indent=2))
        return 0
    for line in _describe_copy(copy_result, substrate_by_api):
        click.echo(line)
    return 0


@click.group()
def bench() -> None:
    """Measure how fast this machine is."""


@bench.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit bench storage --folder /mnt/nvme\n"
        "  gdrkit bench storage --host --size 4096 --plot rates.html"
    )
)
@click.option(
    "--folder",
    type=_FOLDER_TYPE,
    default=".",
    show_default=True,
    metavar="DIR",
    help="The folder for the test files, which are removed afterwards.",
)
@click.option(
    "--size",
    "size_mib",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    metavar="MIB",
    help="Size of each file in MiB.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Duration of the measurement of each transfer size, in seconds.",
)
@_device_option
@_host_option
@_direct_option
@_json_option
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw the rates into FILE, whose name ends in .svg or .html.",
)
def storage(
    folder: Path,
    size_mib: int,
    seconds: float,
    device: int | None,
    host: bool,
    direct: Any,  # noqa: ANN401 - click has checked that it is one of the choices.
    as_json: bool,
    plot: Path | None,
) -> int:
    """Measure the rate of transfers between files and memory, for several transfer sizes.

    The command measures cached reads, uncached reads, writes, and writes with a sync, one transfer at a time and
    without tuning. suites/bench has longer benchmarks that compare gdrkit with other libraries.
    """
    from gdrkit.gds import speed
    from gdrkit.report.plot import check_plot_name, write_plot

    if plot is not None:
        check_plot_name(plot)
    plan = speed.BenchmarkPlan(
        folder=folder,
        file_bytes=size_mib * MIB,
        device_index=_choose_device_index(device, host=host),
        seconds=seconds,
        direct=direct,
    )
    with (
        _show_progress("bench storage", unit_is_bytes=False, is_visible=not as_json) as update_progress,
        _suppress_fallback_warning(),
    ):
        points_so_far: list[BenchmarkPoint] = []

        def on_point(point: BenchmarkPoint, point_count: int) -> None:
            points_so_far.append(point)
            update_progress(len(points_so_far), point_count)

        points = speed.measure(plan, on_point=on_point)
    substrate_by_api = _find_cuda_substrates()
    if plot is not None:
        write_plot(plot, _make_plot(points, plan, substrate_by_api))
    if as_json:
        json_data = {
            "file_bytes": plan.file_bytes,
            "device_index": None if host else plan.device_index,
            "substrate": substrate_by_api,
            "points": [dataclasses.asdict(point) for point in points],
        }
        click.echo(json.dumps(json_data, indent=2))
        return 0
    _print_points(points, substrate_by_api)
    if plot is not None:
        click.echo(f"Plot: {plot}")
    return 0


def _choose_device_index(device: int | None, *, host: bool) -> int:
    """Return the index of the CUDA device of --device, or gds.HOST for --host."""
    from gdrkit import gds

    if host and device is not None:
        message = "--host and --device cannot be combined"
        raise UsageError(message)
    return gds.HOST if host else device or 0


def _find_cuda_substrates() -> dict[str, str]:
    """Return the names of the substrates on which CUDA and cuFile of this process run, by API."""
    from gdrkit import evidence, inventory
    from gdrkit.report.substrate import substrate_of

    facts = inventory.probe(query_apis=False)
    substrates = substrate_of(evidence.libraries(), facts, open_nodes=evidence.device_nodes())
    return {api: substrate.value for api, substrate in sorted(substrates.items()) if api in {"cuda", "cufile"}}


def _make_caveat(substrate_by_api: dict[str, str]) -> str:
    """Return the reason why measured rates do not describe this machine, or an empty text if they do."""
    from gdrkit.report.substrate import Substrate, describe

    substrate_texts = [
        f"{api}: {describe(Substrate(substrate_name))}"
        for api, substrate_name in substrate_by_api.items()
        if substrate_name != "hardware"
    ]
    return f"{', '.join(substrate_texts)}; the rates do not describe this machine" if substrate_texts else ""


def _describe_copy(copy_result: CopyResult, substrate_by_api: dict[str, str]) -> Iterator[str]:
    from gdrkit.units import format_bytes

    caveat = _make_caveat(substrate_by_api)
    rate_text = caveat or f"{copy_result.bytes / max(copy_result.duration_s, 1e-9) / 1e9:.2f} GB/s"
    check_text = ", every byte compared" if copy_result.is_checked else ""
    size_text = format_bytes(copy_result.bytes)
    yield f"{copy_result.destination}: {size_text} in {copy_result.duration_s:.2f} s ({rate_text}){check_text}"
    yield f"  read by {_format_routes(copy_result.read)}"
    yield f"  written by {_format_routes(copy_result.write)}"
    for reason in dict.fromkeys((copy_result.read.why_not_direct, copy_result.write.why_not_direct)):
        if reason:
            yield f"  not direct: {reason}"


def _format_routes(totals: CopyTotals) -> str:
    return ", ".join(sorted(totals.routes)) or "no route, because the file is empty"


def _print_points(points: list[BenchmarkPoint], substrate_by_api: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gdrkit.units import format_bytes

    caveat = _make_caveat(substrate_by_api)
    table = Table("operation", "transfer size", "GB/s", "median us", "CPU s/GiB", "route", box=None)
    for point in points:
        rate_cells = ["-"] * 3
        if not caveat:
            rate_cells = [f"{point.rate_gb_per_s:.3g}", f"{point.latency_us:.0f}", f"{point.cpu_s_per_gib:.3f}"]
        table.add_row(point.kind, format_bytes(point.size_bytes), *rate_cells, ", ".join(point.routes))
    Console().print(table)
    for line in dict.fromkeys([caveat, *(f"{point.kind}: {point.note}" for point in points if point.note)]):
        if line:
            click.echo(line)


def _make_plot(points: list[BenchmarkPoint], plan: Any, substrate_by_api: dict[str, str]) -> Any:  # noqa: ANN401 - the types are imported in the function.
    from gdrkit.report.plot import Line, Plot
    from gdrkit.units import format_bytes

    operations = dict.fromkeys(point.kind for point in points)
    notes = [f"{point.kind}: {point.note}" for point in points if point.note]
    note = "; ".join(dict.fromkeys(filter(None, [_make_caveat(substrate_by_api), *notes])))
    return Plot(
        title=f"Files of {format_bytes(plan.file_bytes)}: GB/s by the size of a transfer",
        note=note,
        unit="GB/s",
        lines=[
            Line(operation, [(point.size_bytes, point.rate_gb_per_s) for point in points if point.kind == operation])
            for operation in operations
        ],
    )


@contextlib.contextmanager
def _cancel_on_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP remove an unfinished copy, as Ctrl-C does, and then end the process by that signal."""
    received_signals: list[int] = []

    def interrupt(signal_number: int, _frame: object) -> None:
        received_signals.append(signal_number)
        # A second signal is ignored, because it would interrupt the clean-up.
        signal.signal(signal_number, signal.SIG_IGN)
        raise KeyboardInterrupt

    # An ignored signal (nohup) stays ignored.
    handled_signals = [
        signal_number
        for signal_number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signal_number) == signal.SIG_DFL
    ]
    for signal_number in handled_signals:
        signal.signal(signal_number, interrupt)
    try:
        yield
    finally:
        for signal_number in handled_signals:
            signal.signal(signal_number, signal.SIG_DFL)
        if received_signals:
            os.kill(os.getpid(), received_signals[0])


@contextlib.contextmanager
def _suppress_fallback_warning() -> Iterator[None]:
    """Suppress the warning of a fallback, because the result of the command reports the fallback."""
    import warnings

    from gdrkit.gds import FallbackWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield


@contextlib.contextmanager
def _show_progress(title: str, *, unit_is_bytes: bool, is_visible: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere; yield the function that updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not is_visible or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    count_column = DownloadColumn(binary_units=True) if unit_is_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count_column, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress_bar:
        task_id = progress_bar.add_task(title, total=None)
        yield lambda done, total: progress_bar.update(task_id, completed=done, total=total)


COMMANDS = (copy, bench)
