"""Display of the progress of a qualification: implementations of :class:`gdrkit.qualify.run.Progress`.

On a terminal, a bar shows the progress and the name of the running case. In a file or pipe, each case gets a line.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from gdrkit.report.record import Verdict
from gdrkit.text import format_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from gdrkit.qualify.plan import CasePlan
    from gdrkit.report import Record

__all__ = ["LineProgress", "TerminalProgress", "make_progress"]

_VERDICT_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.UNPROVEN: "yellow", Verdict.NOT_RUN: "dim"}
# The command must print a line at least every five seconds. The thread checks more than twice in this time, because the
# last line may have been printed just after a check.
_CHECK_PERIOD_S = 2.4
_JOIN_TIMEOUT_S = 5.0
_VERDICT_NAMES = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.UNPROVEN: "unproven", Verdict.NOT_RUN: "not run"}


class LineProgress:
    """Progress as lines of text, for a log.

    If no line was printed for a few seconds, a thread prints which case runs and since how many seconds.

    Parameters
    ----------
    stream : TextIO
        The stream to which the lines are printed.
    period_s : float
        Time between two checks for silence, in seconds. A silence lasts at most twice as long.
    """

    def __init__(self, stream: TextIO, *, period_s: float = _CHECK_PERIOD_S) -> None:
        self._stream = stream
        self._case_names: tuple[str, ...] = ()
        self._completed_count = 0
        self._running_text = "querying the APIs of this machine"
        self._running_since_s = time.monotonic()
        self._line_count = 0
        self._lock = threading.Lock()
        self._close_event = threading.Event()
        self._thread = threading.Thread(target=self._report_silence, args=(period_s,), daemon=True)
        self._thread.start()

    @property
    def is_reporting(self) -> bool:
        """Whether the thread that reports silence runs."""
        return self._thread.is_alive()

    def print_line(self, line: str) -> None:
        """Print a line."""
        with self._lock:
            self._line_count += 1
            print(line, file=self._stream, flush=True)

    def begin_cases(self, plan: CasePlan) -> None:
        """Print the profile and the number of cases."""
        self._case_names = tuple(case.case for case in plan.cases)
        self._begin_next_case()
        self.print_line(f"profile {plan.profile}, {format_count(len(self._case_names), 'case')}")

    def show_record(self, record: Record) -> None:
        """Print a line for a completed case, and a line for each reason of its verdict."""
        self._completed_count += 1
        count_text, verdict_name = f"{self._completed_count}/{len(self._case_names)}", _VERDICT_NAMES[record.verdict]
        self._begin_next_case()
        self.print_line(f"[{count_text}] {verdict_name:8} {record.case} ({record.duration_ms:.0f} ms)")
        for reason in record.reasons:
            self.print_line(f"    {reason.need + ': ' if reason.need else ''}{reason.text}")

    def close(self) -> None:
        """End the thread that reports silence."""
        self._close_event.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _begin_next_case(self) -> None:
        has_completed_all = self._completed_count >= len(self._case_names)
        self._running_text = "ending the cases" if has_completed_all else self._case_names[self._completed_count]
        self._running_since_s = time.monotonic()

    def _report_silence(self, period_s: float) -> None:
        last_line_count = self._line_count
        while not self._close_event.wait(period_s):
            if self._line_count == last_line_count:
                self.print_line(f"    {self._running_text} ({time.monotonic() - self._running_since_s:.0f} s)")
            last_line_count = self._line_count


class TerminalProgress:
    """A progress bar with the name of the running case. Completed cases are printed above the bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task_id: TaskID | None = None
        self._remaining_cases: list[str] = []

    def print_line(self, line: str) -> None:
        """Print a line above the bar."""
        from rich.text import Text

        self._console.print(Text(line, style="bold"), soft_wrap=True)

    def begin_cases(self, plan: CasePlan) -> None:
        """Show the progress bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._remaining_cases = [case.case for case in plan.cases]
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
        self._task_id = self._bar.add_task(self._find_running_case(), total=len(self._remaining_cases))
        self._bar.start()

    def show_record(self, record: Record) -> None:
        """Print a line for a completed case above the bar, and advance the bar."""
        from rich.text import Text

        line = Text()
        line.append(f"{_VERDICT_NAMES[record.verdict]:9}", style=_VERDICT_STYLES[record.verdict])
        line.append(record.case)
        line.append(f"  {record.duration_ms:.0f} ms", style="dim")
        # With soft_wrap, the terminal and not rich wraps a long line, so that the user can copy it as one line.
        self._console.print(line, soft_wrap=True)
        for reason in record.reasons:
            text = f"         {reason.need + ': ' if reason.need else ''}{reason.text}"
            self._console.print(Text(text, style="dim"), soft_wrap=True)
        if self._bar is not None and self._task_id is not None:
            self._remaining_cases = [name for name in self._remaining_cases if name != record.case]
            self._bar.update(self._task_id, advance=1, description=self._find_running_case())

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()

    def _find_running_case(self) -> str:
        return self._remaining_cases[0].rpartition("::")[2] if self._remaining_cases else ""


def make_progress(stream: TextIO | None = None) -> LineProgress | TerminalProgress:
    """Return the progress display for `stream` (standard output if None)."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return LineProgress(stream)
    from rich.console import Console

    return TerminalProgress(Console(file=stream, highlight=False))
