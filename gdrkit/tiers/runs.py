"""The commands ``gdrkit tiers migrate`` and ``gdrkit tiers run``, and their output.

``migrate`` shows a progress bar on a terminal, and prints lines elsewhere. ``run`` prints lines of text or of JSON.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from gdrkit.errors import ApiError, DataMismatch
from gdrkit.serialization import to_json_data
from gdrkit.text import format_count
from gdrkit.tiers.background import BackgroundRun, RunOutput
from gdrkit.tiers.manager import TierManager
from gdrkit.tiers.migration import Phase
from gdrkit.tiers.names import printable
from gdrkit.tiers.plan import PlannedMove
from gdrkit.tiers.policy import MoveReason
from gdrkit.tiers.results import Migrated, RefusedMove
from gdrkit.tiers.tables import describe_outcome, format_size, make_moves_table, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import Progress

    from gdrkit.tiers.configuration import Configuration

__all__ = ["migrate_by_policy", "migrate_named", "print_plan", "run_until_signalled"]

# Longest time that a background run may take to end after a signal, in seconds. After that time, the process ends
# without waiting for the run.
_STOP_TIMEOUT_S = 1.5
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


class _ProgressOutput:
    """The progress output of a run.

    Parameters
    ----------
    stream : text file
        Stream for the lines.
    progress_bar : Progress or None
        The progress bar, on a terminal. None: lines are printed instead.
    """

    def __init__(self, stream: TextIO, progress_bar: Progress | None) -> None:
        self._stream = stream
        self._bar = progress_bar
        self._bar_task_id = progress_bar.add_task("", total=0) if progress_bar is not None else None
        self._moved_bytes = 0

    def begin(self, file_count: int, total_bytes: int) -> None:
        """Print how many files and bytes will be moved, or set the length of the progress bar."""
        if self._bar is not None and self._bar_task_id is not None:
            self._bar.update(self._bar_task_id, total=total_bytes)
        else:
            self._print(f"{format_count(file_count, 'file')}, {format_size(total_bytes)} to move")

    def observe(self, phase: Phase, name: str, offset_bytes: int) -> None:
        """Show the phase and the progress of a migration in the progress bar, if there is one."""
        if self._bar is not None and self._bar_task_id is not None:
            copied_bytes = offset_bytes if phase is Phase.COPY else 0
            text = f"{phase.value} {printable(name)}"
            self._bar.update(self._bar_task_id, completed=self._moved_bytes + copied_bytes, description=text)

    def report_outcome(self, move: PlannedMove, why_not_moved: str) -> None:
        """Print that a file was moved, or why it was not; `why_not_moved` is empty if the file was moved."""
        self._moved_bytes += move.allocated_bytes
        if self._bar is None:
            self._print(describe_outcome(move, why_not_moved))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def run_until_signalled(configuration: Configuration, *, as_json: bool, stream: TextIO) -> None:
    """Move files by policy in the background until SIGTERM or SIGINT, and then end within two seconds."""
    output, stop_event = RunOutput(stream, as_json=as_json), threading.Event()

    def run_in_background() -> None:
        with TierManager(configuration) as manager:
            BackgroundRun(manager, stop=stop_event, output=output).run()

    # sigwait() below receives these signals. Threads that start after this call inherit the mask, so the kernel gives
    # the signals to none of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gdrkit-run") as executor:
        run_future = executor.submit(run_in_background)
        # If the run ends by itself, because of an error, this signal ends sigwait().
        run_future.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        signal.sigwait(_STOP_SIGNALS)
        stop_event.set()
        try:
            run_future.result(_STOP_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            # A system call takes long, for example fsync on a slow device, or a scan of a million files. The process
            # ends as after SIGKILL, and a later recovery completes or undoes the migration.
            try:
                output.report_end(is_complete=False)
            finally:
                os._exit(0)
    output.report_end(is_complete=True)


def migrate_by_policy(manager: TierManager, *, stream: TextIO) -> Migrated:
    """Move files as the policy requires."""
    with _open_progress_output(stream) as output:
        return manager.migrate(on_begin=output.begin, observe=output.observe, on_outcome=output.report_outcome)


def migrate_named(manager: TierManager, names: Sequence[str], destination: str, *, stream: TextIO) -> Migrated:
    """Move the named files to a tier."""
    refused_moves: list[RefusedMove] = []
    moved_count = moved_bytes = 0
    moves = _plan_named_moves(manager, names, destination)
    with _open_progress_output(stream) as output:
        output.begin(len(moves), sum(move.allocated_bytes for move in moves))
        for move in moves:
            why_not_moved = ""
            try:
                moved_bytes += manager.move(move.name, destination, observe=output.observe)
                moved_count += 1
            except (ApiError, DataMismatch) as error:
                why_not_moved = str(error)
                refused_moves.append(RefusedMove(move.name, destination, error.reason, why_not_moved))
            output.report_outcome(move, why_not_moved)
    return Migrated(moved_count, moved_bytes, tuple(refused_moves), len(names))


def print_plan(
    manager: TierManager, names: Sequence[str], destination: str | None, *, as_json: bool, stream: TextIO
) -> None:
    """Print the moves that a run would make.

    These are the moves of the named files to `destination`. If `destination` is None, the policy decides the moves.
    """
    if destination is not None:
        moves = _plan_named_moves(manager, names, destination)
        _print_moves(moves, len(names), as_json=as_json, stream=stream)
        return
    with manager.plan() as plan:
        _print_moves(list(plan.moves()), plan.considered_count, as_json=as_json, stream=stream)


def _print_moves(moves: list[PlannedMove], considered_count: int, *, as_json: bool, stream: TextIO) -> None:
    if as_json:
        print(json.dumps({"moves": to_json_data(moves), "considered": considered_count}, indent=2), file=stream)
        return
    if moves:
        print_table(make_moves_table(moves), stream)
    total_bytes = sum(move.allocated_bytes for move in moves)
    print(
        f"{len(moves)} of {format_count(considered_count, 'file')} would move, {format_size(total_bytes)}", file=stream
    )


def _plan_named_moves(manager: TierManager, names: Sequence[str], destination: str) -> list[PlannedMove]:
    """Return the moves of the named files that are not in the destination yet.

    Each move has the reason PINNED, because the user, not the policy, has chosen the destination.
    """
    tier_name = manager.configuration.tier(destination).name
    entries = map(manager.find, names)
    return [
        PlannedMove(entry.name, entry.tier, tier_name, entry.allocated_bytes, MoveReason.PINNED)
        for entry in entries
        if entry.tier != tier_name
    ]


@contextmanager
def _open_progress_output(stream: TextIO) -> Iterator[_ProgressOutput]:
    if not stream.isatty():
        yield _ProgressOutput(stream, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=stream), transient=True) as progress_bar:
        yield _ProgressOutput(stream, progress_bar)
