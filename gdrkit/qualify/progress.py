"""Display of the progress of a qualification.

A terminal shows a bar with the running case. Other output is one plain line per case, so that it fits a log.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from gdrkit.report.record import Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from gdrkit.qualify.plan import Plan
    from gdrkit.report import Record

__all__ = ["LineProgress", "TerminalProgress", "progress_for"]

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.UNPROVEN: "yellow", Verdict.NOT_RUN: "dim"}
_NAMES = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.UNPROVEN: "unproven", Verdict.NOT_RUN: "not run"}


class LineProgress:
    """Progress as plain lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = 0
        self._count = 0

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, file=self._stream, flush=True)

    def begin(self, plan: Plan) -> None:
        """Print the profile and the number of cases."""
        self._total = len(plan.cases)
        self.say(f"profile {plan.profile}, {self._total} cases")

    def done(self, record: Record) -> None:
        """Print a line for a case, and one for each of its reasons."""
        self._count += 1
        self.say(
            f"[{self._count}/{self._total}] {_NAMES[record.verdict]:8} {record.case} ({record.duration_ms:.0f} ms)"
        )
        for reason in record.reasons:
            self.say(f"    {reason.need + ': ' if reason.need else ''}{reason.text}")

    def end(self) -> None:
        """Do nothing, as nothing is left open."""


class TerminalProgress:
    """A progress bar with the running case. Ended cases are printed above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._names: list[str] = []

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        from rich.text import Text

        self._console.print(Text(line, style="bold"), soft_wrap=True)

    def begin(self, plan: Plan) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._names = [case.case for case in plan.cases]
        self._bar = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            expand=True,
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(self._current(), total=len(self._names))
        self._bar.start()

    def done(self, record: Record) -> None:
        """Print a case that has ended, and advance the bar."""
        from rich.text import Text

        line = Text()
        line.append(f"{_NAMES[record.verdict]:9}", style=_STYLES[record.verdict])
        line.append(record.case)
        line.append(f"  {record.duration_ms:.0f} ms", style="dim")
        # The terminal wraps a long line, so that a user can still copy it as one line.
        self._console.print(line, soft_wrap=True)
        for reason in record.reasons:
            text = f"         {reason.need + ': ' if reason.need else ''}{reason.text}"
            self._console.print(Text(text, style="dim"), soft_wrap=True)
        if self._bar is not None and self._task is not None:
            self._names = [name for name in self._names if name != record.case]
            self._bar.update(self._task, advance=1, description=self._current())

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _current(self) -> str:
        return self._names[0].rpartition("::")[2] if self._names else ""


def progress_for(stream: TextIO | None = None) -> LineProgress | TerminalProgress:
    """Return the progress display for `stream` (standard output if None)."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return LineProgress(stream)
    from rich.console import Console

    return TerminalProgress(Console(file=stream, highlight=False))
