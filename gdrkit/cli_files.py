# ruff: noqa: FBT001, PLR0917 - click calls commands by the names of their options.
"""The commands that move files: copy, bench storage.

They belong to the command line of :mod:`gdrkit.cli`, which turns errors into messages and exit codes.
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

    from gdrkit.gds import Copied, Half
    from gdrkit.gds.speed import Point

__all__ = ["COMMANDS"]

_FILE = click.Path(path_type=Path)
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_device = click.option("--device", type=click.IntRange(0), metavar="N", help="The CUDA device. Default: 0.")
_host = click.option("--host", is_flag=True, help="Memory of the host, and no device.")
_direct = click.option(
    "--direct",
    type=click.Choice(["preferred", "required", "never"]),
    default="preferred",
    show_default=True,
    help="A path between disk and device without host memory; required: fail where none is proven.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.command()
@click.argument("source", type=_FILE)
@click.argument("destination", type=_FILE)
@_device
@_host
@_direct
@click.option(
    "--access",
    type=click.Choice(["automatic", "buffered", "direct"]),
    default="automatic",
    show_default=True,
    help="How the copy engine reaches the disk: by what is cached, by the page cache, by O_DIRECT.",
)
@click.option("--sync", is_flag=True, help="Wait until the disk has the new file and its name.")
@click.option("--check", is_flag=True, help="Compare both files byte by byte before the new one gets its name.")
@_json
def copy(
    source: Path,
    destination: Path,
    device: int | None,
    host: bool,
    direct: Any,  # noqa: ANN401 - a string of the choices.
    access: Any,  # noqa: ANN401
    sync: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Copy a file by way of device memory, and say which way its bytes took.

    DESTINATION is the new file, or the folder where it goes. It gets its name when all of it is there; a copy that is
    ended earlier leaves nothing. A regular file is replaced, a symbolic link followed, anything else refused.
    """
    from gdrkit import gds

    with _ended_by_signals(), _bar("copy", unit_is_bytes=True, shown=not as_json) as tell, _quiet():
        copied = gds.copy_file(
            source,
            destination,
            device_index=_index(device, host=host),
            access=access,
            direct=direct,
            durable=sync,
            check=check,
            on_progress=tell,
        )
    substrate = _substrate()
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(copied), "substrate": substrate}, indent=2))
        return 0
    for line in _described(copied, substrate):
        click.echo(line)
    return 0


@click.group()
def bench() -> None:
    """Measure how fast this machine is."""


@bench.command()
@click.option("--folder", type=_FOLDER, default=".", show_default=True, help="Where the files are made; they go again.")
@click.option(
    "--size", "size_mib", type=click.IntRange(1), default=1024, show_default=True, metavar="MIB", help="Of each file."
)
@click.option(
    "--seconds", type=click.FloatRange(0, 600), default=1.0, show_default=True, help="How long a point is measured."
)
@_device
@_host
@_direct
@_json
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw it: FILE.svg or FILE.html.")
def storage(
    folder: Path,
    size_mib: int,
    seconds: float,
    device: int | None,
    host: bool,
    direct: Any,  # noqa: ANN401 - a string of the choices.
    as_json: bool,
    plot: Path | None,
) -> int:
    """Measure how fast files reach memory and come back, by the size of a transfer.

    Reads of what the page cache has and of what it has not, writes, and writes until the disk has them; one transfer
    after another. Nothing is tuned; what a real comparison needs is in suites/bench.
    """
    from gdrkit.gds import speed
    from gdrkit.report.plot import check_name, write_plot

    if plot is not None:
        check_name(plot)
    plan = speed.Plan(
        folder=folder,
        file_bytes=size_mib * MIB,
        device_index=_index(device, host=host),
        seconds=seconds,
        direct=direct,
    )
    with _bar("bench storage", unit_is_bytes=False, shown=not as_json) as tell, _quiet():
        done: list[Point] = []

        def count(point: Point, whole: int) -> None:
            done.append(point)
            tell(len(done), whole)

        points = speed.measure(plan, on_point=count)
    substrate = _substrate()
    if plot is not None:
        write_plot(plot, _plot(points, plan, substrate))
    if as_json:
        found = {
            "file_bytes": plan.file_bytes,
            "device_index": None if host else plan.device_index,
            "substrate": substrate,
            "points": [dataclasses.asdict(point) for point in points],
        }
        click.echo(json.dumps(found, indent=2))
        return 0
    _print_points(points, substrate)
    if plot is not None:
        click.echo(f"Plot: {plot}")
    return 0


def _index(device: int | None, *, host: bool) -> int:
    from gdrkit import gds

    if host and device is not None:
        message = "--host and --device exclude each other"
        raise UsageError(message)
    return gds.HOST if host else device or 0


def _substrate() -> dict[str, str]:
    """Return the substrate of each API of this process."""
    from gdrkit import evidence, inventory
    from gdrkit.report.substrate import substrate_of

    facts = inventory.probe(ask_apis=False)
    judged = substrate_of(evidence.libraries(), facts, nodes=evidence.device_nodes())
    return {api: found.value for api, found in sorted(judged.items()) if api in {"cuda", "cufile"}}


def _not_of_this_machine(substrate: dict[str, str]) -> str:
    """Return why the numbers say nothing about the machine; empty if they describe it."""
    from gdrkit.report.substrate import Substrate, describe

    weak = [f"{api}: {describe(Substrate(found))}" for api, found in substrate.items() if found != "hardware"]
    return f"{', '.join(weak)}; no performance of this machine" if weak else ""


def _described(copied: Copied, substrate: dict[str, str]) -> Iterator[str]:
    from gdrkit.units import format_bytes

    weak = _not_of_this_machine(substrate)
    rate = weak or f"{copied.bytes / max(copied.duration_s, 1e-9) / 1e9:.2f} GB/s"
    checked = ", every byte compared" if copied.is_checked else ""
    yield f"{copied.destination}: {format_bytes(copied.bytes)} in {copied.duration_s:.2f} s ({rate}){checked}"
    yield f"  read by {_ways(copied.read)}"
    yield f"  written by {_ways(copied.write)}"
    for why in dict.fromkeys(each for each in (copied.read.why_not_direct, copied.write.why_not_direct) if each):
        yield f"  not direct: {why}"


def _ways(half: Half) -> str:
    return ", ".join(sorted(half.routes)) or "nobody, since it is empty"


def _print_points(points: list[Point], substrate: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gdrkit.units import format_bytes

    weak = _not_of_this_machine(substrate)
    table = Table("kind", "transfer", "GB/s", "median us", "CPU s/GiB", "route", box=None)
    for each in points:
        numbers = ["-"] * 3
        if not weak:
            numbers = [f"{each.rate_gb_per_s:.3g}", f"{each.latency_us:.0f}", f"{each.cpu_s_per_gib:.3f}"]
        table.add_row(each.kind, format_bytes(each.size_bytes), *numbers, ", ".join(each.routes))
    Console().print(table)
    for line in dict.fromkeys([weak, *(f"{each.kind}: {each.note}" for each in points if each.note)]):
        if line:
            click.echo(line)


def _plot(points: list[Point], plan: Any, substrate: dict[str, str]) -> Any:  # noqa: ANN401 - types of late imports.
    from gdrkit.report.plot import Line, Plot
    from gdrkit.units import format_bytes

    kinds = dict.fromkeys(each.kind for each in points)
    notes = [f"{each.kind}: {each.note}" for each in points if each.note]
    note = "; ".join(dict.fromkeys(filter(None, [_not_of_this_machine(substrate), *notes])))
    return Plot(
        title=f"Files of {format_bytes(plan.file_bytes)}: GB/s by the size of a transfer",
        note=note,
        unit="GB/s",
        lines=[
            Line(kind, [(each.size_bytes, each.rate_gb_per_s) for each in points if each.kind == kind])
            for kind in kinds
        ],
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP undo the unfinished work, as Ctrl-C does, and then end the process by that signal."""
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        # A second signal would interrupt the clean-up.
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # An ignored signal (nohup) stays ignored.
    caught = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning of a fallback, because the result reports it."""
    import warnings

    from gdrkit.gds import FallbackWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield


@contextlib.contextmanager
def _bar(what: str, *, unit_is_bytes: bool, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere; yield the function that updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not shown or not sys.stderr.isatty():
        yield lambda _done, _whole: None
        return
    count = DownloadColumn(binary_units=True) if unit_is_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


COMMANDS = (copy, bench)
