"""Migrations with progress output: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from gdrkit.errors import ApiError, DataMismatch
from gdrkit.serialization import to_json_data
from gdrkit.tiers.migration import Phase
from gdrkit.tiers.names import shown
from gdrkit.tiers.plan import PlannedMove
from gdrkit.tiers.policy import Why
from gdrkit.tiers.results import Migrated, Refused
from gdrkit.tiers.tables import moves_table, size, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import Progress

    from gdrkit.tiers.manager import TierManager

__all__ = ["migrate_by_policy", "migrate_named", "planned"]


class _Onlooker:
    """The progress output of a run. `bar` is set on a terminal."""

    def __init__(self, stream: TextIO, bar: Progress | None) -> None:
        self._stream = stream
        self._bar = bar
        self._task = bar.add_task("", total=0) if bar is not None else None
        self._done_bytes = 0

    def begin(self, count: int, count_bytes: int) -> None:
        """Report how much will be moved."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=count_bytes)
        else:
            self._say(f"{count} files, {size(count_bytes)} to move")

    def observe(self, phase: Phase, name: str, offset_bytes: int) -> None:
        """Report the progress of one migration."""
        if self._bar is not None and self._task is not None:
            copied = offset_bytes if phase is Phase.COPY else 0
            text = f"{phase.value} {shown(name)}"
            self._bar.update(self._task, completed=self._done_bytes + copied, description=text)

    def moved(self, move: PlannedMove, why: str) -> None:
        """Report that one file is finished."""
        self._done_bytes += move.allocated_bytes
        if self._bar is None:
            how = f"stays in {move.source}: {why}" if why else f"{move.source} -> {move.destination}"
            self._say(f"{shown(move.name)}: {how}")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def migrate_by_policy(manager: TierManager, *, stream: TextIO) -> Migrated:
    """Move files as the policy asks."""
    with _onlooker(stream) as onlooker:
        return manager.migrate(begin=onlooker.begin, observe=onlooker.observe, moved=onlooker.moved)


def migrate_named(manager: TierManager, names: Sequence[str], destination: str, *, stream: TextIO) -> Migrated:
    """Move the named files to a tier."""
    refused: list[Refused] = []
    count = count_bytes = 0
    moves = _named(manager, names, destination)
    with _onlooker(stream) as onlooker:
        onlooker.begin(len(moves), sum(move.allocated_bytes for move in moves))
        for move in moves:
            why = ""
            try:
                count_bytes += manager.move(move.name, destination, observe=onlooker.observe)
                count += 1
            except (ApiError, DataMismatch) as error:
                why = str(error)
                refused.append(Refused(move.name, destination, error.reason, why))
            onlooker.moved(move, why)
    return Migrated(count, count_bytes, tuple(refused), len(names))


def planned(
    manager: TierManager, names: Sequence[str], destination: str | None, *, as_json: bool, stream: TextIO
) -> None:
    """Print the moves that would be made."""
    if destination is not None:
        moves = _named(manager, names, destination)
        _say_moves(moves, len(names), as_json=as_json, stream=stream)
        return
    with manager.plan() as plan:
        _say_moves(list(plan.moves()), plan.considered, as_json=as_json, stream=stream)


def _say_moves(moves: list[PlannedMove], considered: int, *, as_json: bool, stream: TextIO) -> None:
    if as_json:
        print(json.dumps({"moves": to_json_data(moves), "considered": considered}, indent=2), file=stream)
        return
    if moves:
        write(moves_table(moves), stream)
    total = sum(move.allocated_bytes for move in moves)
    print(f"{len(moves)} of {considered} files would move, {size(total)}", file=stream)


def _named(manager: TierManager, names: Sequence[str], destination: str) -> list[PlannedMove]:
    there = manager.configuration.tier(destination).name
    found = map(manager.find, names)
    return [
        PlannedMove(each.name, each.tier, there, each.allocated_bytes, Why.PINNED)
        for each in found
        if each.tier != there
    ]


@contextmanager
def _onlooker(stream: TextIO) -> Iterator[_Onlooker]:
    if not stream.isatty():
        yield _Onlooker(stream, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        yield _Onlooker(stream, bar)
