"""A background run moves files between tiers as the policy requires, one pass after another, until it is stopped.

If the run is stopped, or quiet hours begin, the migration in progress is undone. If the copy already has the name of
the file, the migration is completed instead, which takes a few system calls.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

from gdrkit.errors import Api, ApiError, Reason
from gdrkit.serialization import to_json_data
from gdrkit.text import format_count
from gdrkit.tiers.kernel_errors import busy_error, convert_os_errors
from gdrkit.tiers.migration import Phase
from gdrkit.tiers.names import printable
from gdrkit.tiers.opens import OpenWatcher
from gdrkit.tiers.schedule import Pace
from gdrkit.tiers.tables import describe_outcome

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from gdrkit.tiers.finding import TierFinding
    from gdrkit.tiers.manager import TierManager
    from gdrkit.tiers.migration import Observer
    from gdrkit.tiers.plan import PlannedMove
    from gdrkit.tiers.results import Migrated

__all__ = ["BackgroundRun", "RunOutput"]

# If the run is stopped before one of these phases, the migration is undone. Only the copied bytes are lost.
_UNDOABLE_PHASES = frozenset({Phase.RECORD, Phase.COPY, Phase.ATTRIBUTES, Phase.SYNC, Phase.VERIFY, Phase.RENAME})


class RunOutput:
    """The output of a background run: one line for each event, as text or as a JSON object.

    Parameters
    ----------
    stream : text file
        Stream for the lines.
    as_json : bool
        Whether each line is a JSON object. Its member ``event`` has the type of the event.
    """

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json

    def report_ready(self, watched: Sequence[str], unwatched: Mapping[str, str]) -> None:
        """Report the begin of the run, the tiers whose opens are counted, and why the opens in other tiers are not."""
        texts = [f"opens by other programs are counted in {', '.join(watched)}"] if watched else []
        for reason in dict.fromkeys(unwatched.values()):
            names = ", ".join(tier for tier, reason_of_tier in unwatched.items() if reason_of_tier == reason)
            texts.append(f"not counted in {names}: {reason}")
        self._print("ready", f"ready: {'; '.join(texts)}", watched=watched, unwatched=unwatched, pid=os.getpid())

    def report_finding(self, finding: TierFinding) -> None:
        """Report a difference between catalogue and disks that an administrator has to resolve."""
        text = f"{printable(finding.name)}: {finding.kind.value} in {finding.tier}: {finding.text}"
        self._print("finding", text, finding=finding)

    def report_move(self, move: PlannedMove, why_not_moved: str) -> None:
        """Report a file that was moved, or the reason why it was not moved."""
        self._print("moved", describe_outcome(move, why_not_moved), move=move, why_not_moved=why_not_moved)

    def report_pass(self, result: Migrated) -> None:
        """Report the end of a pass. A pass without moves has no line of text."""
        text = f"{result.moved} of {format_count(result.considered, 'file')} moved, {len(result.refused)} not moved"
        self._print("passed", text if result.moved or result.refused else "", result=result)

    def report_failed_pass(self, error: ApiError) -> None:
        """Report that a pass failed. The next pass tries again."""
        self._print("failed", f"the pass failed: {error}", error=str(error), reason=error.reason)

    def report_lost_opens(self, count: int) -> None:
        """Report how often the kernel has dropped reports of opened files."""
        text = f"opens were too fast to be counted: the kernel has dropped reports {format_count(count, 'time')}"
        self._print("lost", text, count=count)

    def report_end(self, *, is_complete: bool) -> None:
        """Report the end of the run, and whether it left an incomplete migration to the recovery."""
        text = (
            "ended" if is_complete else "ended during a migration; the next gdrkit tiers command completes or undoes it"
        )
        self._print("ended", text, is_complete=is_complete)

    def _print(self, event: str, text: str, **members: object) -> None:
        if self._as_json:
            text = json.dumps({"event": event, **{name: to_json_data(value) for name, value in members.items()}})
        if text:
            print(text, file=self._stream, flush=True)


class _Interrupted(Exception):
    """The run was stopped, or quiet hours have begun."""


class BackgroundRun:
    """Moves of files by policy in the background.

    Parameters
    ----------
    manager : TierManager
        The tiers, with the settings of the run in ``configuration.run``.
    stop : threading.Event
        The event that ends the run. All waits of the run are calls of its method ``wait``.
    output : RunOutput
        The output.
    clock : callable
        Function that returns the seconds since 1970, for the quiet hours.
    observe : callable or None
        Called at each phase of each migration; see :meth:`TierManager.move`.
    """

    def __init__(
        self,
        manager: TierManager,
        *,
        stop: threading.Event,
        output: RunOutput,
        clock: Callable[[], float] = time.time,
        observe: Observer | None = None,
    ) -> None:
        self._manager, self._settings = manager, manager.configuration.run
        self._stop, self._output, self._clock = stop, output, clock
        self._observe = observe
        self._pace = Pace(self._settings.rate_bytes_per_s, wait=stop.wait)
        self._reported_findings: set[TierFinding] = set()
        self._reported_lost_count = 0

    def run(self) -> None:
        """Move files until the event `stop` is set.

        Raises
        ------
        ApiError
            ``BUSY``: another run moves the files of these tiers. ``NO_PERMISSION`` and others: the opens by other
            programs cannot be counted, and the settings require that.
        """
        with ExitStack() as stack:
            stack.callback(os.close, self._take_lock())
            watcher = self._start_watcher()
            if watcher is not None:
                stack.enter_context(watcher)
            while not self._stop.is_set():
                quiet_s = self._settings.quiet_s(self._clock())
                if not quiet_s:
                    self._run_pass(watcher)
                self._stop.wait(min(quiet_s, self._settings.interval_s) if quiet_s else self._settings.interval_s)

    def _run_pass(self, watcher: OpenWatcher | None) -> None:
        """Recover interrupted migrations, update the catalogue, and move files as the policy requires."""
        if watcher is not None:
            with convert_os_errors("watch opens"):
                watcher.refresh()
            if lost_count := watcher.lost_count - self._reported_lost_count:
                self._output.report_lost_opens(lost_count)
                self._reported_lost_count = watcher.lost_count
        try:
            findings = set(self._manager.check(repair=True))
            for finding in findings - self._reported_findings:
                if finding.is_wrong:
                    self._output.report_finding(finding)
            self._reported_findings = findings
            self._output.report_pass(
                self._manager.migrate(observe=self._observe_and_check, moved=self._output.report_move, pace=self._pace)
            )
        except _Interrupted:
            return
        except ApiError as error:
            # The catalogue may be locked or damaged, or a disk may have failed. The next pass may succeed.
            self._output.report_failed_pass(error)

    def _observe_and_check(self, phase: Phase, name: str, offset_bytes: int) -> None:
        if self._observe is not None:
            self._observe(phase, name, offset_bytes)
        if phase in _UNDOABLE_PHASES and (self._stop.is_set() or self._settings.quiet_s(self._clock())):
            raise _Interrupted

    def _start_watcher(self) -> OpenWatcher | None:
        """Return a watcher of the opens by other programs, or None if these opens are not counted."""
        names = [tier.name for tier in self._manager.status() if not tier.absent]
        if self._settings.watch == "never":
            self._output.report_ready((), dict.fromkeys(names, "not requested"))
            return None
        try:
            with convert_os_errors("watch opens"):
                watcher = OpenWatcher([self._manager.folder(name) for name in names], self._manager.accesses)
        except ApiError as error:
            if self._settings.watch == "required":
                raise
            self._output.report_ready((), dict.fromkeys(names, str(error)))
            return None
        if self._settings.watch == "required" and watcher.unwatched:
            watcher.close()
            raise _make_unwatched_error(watcher.unwatched)
        self._output.report_ready(watcher.watched, watcher.unwatched)
        return watcher

    def _take_lock(self) -> int:
        """Take the lock that only one background run of these tiers can hold, and return its descriptor."""
        path = self._manager.catalogue.folder / "run"
        with convert_os_errors("run", catalogue=str(path.parent)):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(descriptor)
                text = "another gdrkit tiers run moves the files of these tiers"
                raise busy_error("run", text, catalogue=str(path.parent)) from error
        return descriptor


def _make_unwatched_error(unwatched: dict[str, str]) -> ApiError:
    return ApiError(
        api=Api.KERNEL,
        operation="watch opens",
        status=None,
        status_name="NOT_WATCHED",
        arguments={"tiers": ", ".join(unwatched)},
        reason=Reason.NOT_SUPPORTED,
        what_to_do="use a file system with file handles (ext4, xfs), or --watch preferred",
        detail="; ".join(f"{tier}: {why}" for tier, why in unwatched.items()),
    )
