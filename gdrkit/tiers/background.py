"""A background run moves files between tiers as the policy requires, one pass after another, until it is stopped.

If the run is stopped, or quiet hours (periods without migrations) begin, the migration in progress is undone. If the
copy has already been renamed to the name of the file, the migration is completed instead, which takes only a few system
calls.
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
from gdrkit.tiers.schedule import RateLimiter
from gdrkit.tiers.tables import describe_outcome

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from gdrkit.tiers.finding import TierFinding
    from gdrkit.tiers.manager import TierManager
    from gdrkit.tiers.migration import PhaseObserver
    from gdrkit.tiers.plan import PlannedMove
    from gdrkit.tiers.results import Migrated

__all__ = ["BackgroundRun", "RunOutput"]

# Phases before which a stop of the run undoes the migration. A later pass must then copy the file again.
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

    def report_ready(self, watched_tiers: Sequence[str], reason_by_unwatched_tier: Mapping[str, str]) -> None:
        """Report that the run has begun, with the tiers in which opens are counted.

        `reason_by_unwatched_tier` has the other tiers, each with the reason why its opens are not counted.
        """
        texts = [f"opens by other programs are counted in {', '.join(watched_tiers)}"] if watched_tiers else []
        for reason in dict.fromkeys(reason_by_unwatched_tier.values()):
            tier_names = ", ".join(
                tier for tier, tier_reason in reason_by_unwatched_tier.items() if tier_reason == reason
            )
            texts.append(f"not counted in {tier_names}: {reason}")
        text = f"ready: {'; '.join(texts)}"
        self._print("ready", text, watched=watched_tiers, unwatched=reason_by_unwatched_tier, pid=os.getpid())

    def report_finding(self, finding: TierFinding) -> None:
        """Report a difference between catalogue and disks that an administrator has to resolve."""
        text = f"{printable(finding.name)}: {finding.kind.value} in {finding.tier}: {finding.text}"
        self._print("finding", text, finding=finding)

    def report_move(self, move: PlannedMove, why_not_moved: str) -> None:
        """Report a file that was moved, or the reason why it was not moved."""
        self._print("moved", describe_outcome(move, why_not_moved), move=move, why_not_moved=why_not_moved)

    def report_pass(self, result: Migrated) -> None:
        """Report the end of a pass. In text form, a pass in which no file had to move has no line."""
        text = f"{result.moved} of {format_count(result.considered, 'file')} moved, {len(result.refused)} not moved"
        self._print("passed", text if result.moved or result.refused else "", result=result)

    def report_failed_pass(self, error: ApiError) -> None:
        """Report that a pass failed. The next pass tries again."""
        self._print("failed", f"the pass failed: {error}", error=str(error), reason=error.reason)

    def report_lost_opens(self, count: int) -> None:
        """Report how often the kernel has dropped reports of opened files since the last report."""
        text = f"opens were too fast to be counted: the kernel has dropped reports {format_count(count, 'time')}"
        self._print("lost", text, count=count)

    def report_end(self, *, is_complete: bool) -> None:
        """Report the end of the run. `is_complete` is False if a recovery must complete or undo its last migration."""
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
    """An exception that ends a pass: the run was stopped, or quiet hours have begun."""


class BackgroundRun:
    """A loop that moves files between the tiers as the policy requires, until it is stopped.

    Parameters
    ----------
    manager : TierManager
        The tiers, with the settings of the run in ``configuration.run``.
    stop : threading.Event
        The run ends when this event is set. All waits of the run use the event's method ``wait``, so they end at once.
    output : RunOutput
        The object that prints the events of the run.
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
        observe: PhaseObserver | None = None,
    ) -> None:
        self._manager, self._settings = manager, manager.configuration.run
        self._stop, self._output, self._clock = stop, output, clock
        self._observe = observe
        self._rate_limiter = RateLimiter(self._settings.rate_bytes_per_s, wait=stop.wait)
        self._reported_findings: set[TierFinding] = set()
        self._reported_lost_count = 0

    def run(self) -> None:
        """Move files until the event `stop` is set.

        Raises
        ------
        ApiError
            ``BUSY``: another run moves the files of these tiers. ``NO_PERMISSION`` and others: the opens by other
            programs cannot be counted, but ``watch`` is ``required``.
        """
        with ExitStack() as stack:
            stack.callback(os.close, self._take_lock())
            watcher = self._start_watcher()
            if watcher is not None:
                stack.enter_context(watcher)
            while not self._stop.is_set():
                remaining_quiet_s = self._settings.remaining_quiet_s(self._clock())
                if not remaining_quiet_s:
                    self._run_pass(watcher)
                interval_s = self._settings.interval_s
                self._stop.wait(min(remaining_quiet_s, interval_s) if remaining_quiet_s else interval_s)

    def _run_pass(self, watcher: OpenWatcher | None) -> None:
        """Recover interrupted migrations, update the catalogue, and move files as the policy requires."""
        if watcher is not None:
            with convert_os_errors("watch opens"):
                watcher.refresh()
            if new_lost_count := watcher.lost_count - self._reported_lost_count:
                self._output.report_lost_opens(new_lost_count)
                self._reported_lost_count = watcher.lost_count
        try:
            findings = set(self._manager.check(repair=True))
            for finding in findings - self._reported_findings:
                if finding.needs_action:
                    self._output.report_finding(finding)
            self._reported_findings = findings
            self._output.report_pass(
                self._manager.migrate(
                    observe=self._observe_or_interrupt,
                    on_outcome=self._output.report_move,
                    rate_limiter=self._rate_limiter,
                )
            )
        except _Interrupted:
            return
        except ApiError as error:
            # The catalogue may be locked or damaged, or a disk may have failed. The next pass may succeed.
            self._output.report_failed_pass(error)

    def _observe_or_interrupt(self, phase: Phase, name: str, offset_bytes: int) -> None:
        """Report the phase. Raise an exception if the run must stop and the migration can still be undone."""
        if self._observe is not None:
            self._observe(phase, name, offset_bytes)
        if phase in _UNDOABLE_PHASES and (self._stop.is_set() or self._settings.remaining_quiet_s(self._clock())):
            raise _Interrupted

    def _start_watcher(self) -> OpenWatcher | None:
        """Return a watcher of the opens by other programs, or None if these opens are not counted."""
        tier_names = [tier.name for tier in self._manager.status() if not tier.absent]
        if self._settings.watch == "never":
            self._output.report_ready((), dict.fromkeys(tier_names, "not requested"))
            return None
        try:
            with convert_os_errors("watch opens"):
                watcher = OpenWatcher([self._manager.folder(name) for name in tier_names], self._manager.access_counter)
        except ApiError as error:
            if self._settings.watch == "required":
                raise
            self._output.report_ready((), dict.fromkeys(tier_names, str(error)))
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
