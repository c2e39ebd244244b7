"""The pytest processes of a run.

A case may end its process (a fault, an abort of a twin) or never return from a library. The record of that case then
says so, and another process runs the remaining cases.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.children import kill_child
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.install_paths import install_paths
from gdrkit.qualify.interrupt import interruptible_children
from gdrkit.qualify.plan import Plan, read_plan
from gdrkit.report import CaseReason, Record, Verdict, append_record, parse_records
from gdrkit.report.record import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gdrkit.report import RunFolder

__all__ = ["Common", "Suites"]

_LOOK_S = 0.1
_STALLED_S = 180.0
# The time in seconds that an interrupted case has for closing what it opened.
_CLOSE_S = 10.0
_SHOWN_CHARACTERS = 3000
_PYTEST_USAGE = 4


@dataclass(frozen=True, slots=True)
class Common:
    """The fields that are the same in all records of cases that left no record themselves."""

    facts_digest: str
    seed: int
    commit: str | None
    version: str
    command: str


class Suites:
    """The child processes that collect and run the cases of a qualification.

    Parameters
    ----------
    folder : RunFolder
        The folder of the facts and the records.
    environment : mapping
        Environment of the children. It decides the substrate.
    options : list of str
        Options for pytest: profile, seed, selection.
    suites : Path or None
        The folder of the cases; gdrkit's own if None.

    Attributes
    ----------
    abandoned : list of str
        A sentence for each process that was killed and did not end.
    """

    def __init__(
        self, folder: RunFolder, environment: Mapping[str, str], options: list[str], *, suites: Path | None = None
    ) -> None:
        self._folder = folder
        self._environment = dict(environment)
        settings = install_paths().suites / "pytest.ini"
        suites = (suites or install_paths().suites).resolve()
        self._command = [
            *(sys.executable, "-m", "pytest", str(suites), f"--ignore={suites / 'meta'}"),
            *("-c", str(settings), "--rootdir", str(suites), "-p", "gdrkit.harness.plugin"),
            *("-m", "qualify", "--color=no", f"--facts={folder.facts}", *options),
        ]
        self._log = folder.path / "pytest.log"
        self.abandoned: list[str] = []

    def plan(self) -> Plan:
        """Collect the cases without running them.

        Raises
        ------
        UsageError
            pytest does not accept the options, or the profile does not fit.
        GdrkitError
            A file of the suites cannot be collected; the log has the reason.
        """
        reader = _Reader(self._folder, lambda _plan: None, lambda _record: None)
        how = self._run_child(["--collect-only", "-q", f"--plan={self._folder.plan}"], reader)
        if reader.plan is None:
            raise self._no_plan(how)
        return reader.plan

    def run(self, common: Common, begin: Callable[[Plan], None], done: Callable[[Record], None]) -> Plan:
        """Collect the cases and run them, all in one child as long as it lives.

        Parameters
        ----------
        common : Common
            The common fields of records for cases that leave none.
        begin : callable
            Called once with the plan, before the first case ends.
        done : callable
            Called with each record.

        Raises
        ------
        UsageError, GdrkitError
            See :meth:`plan`.
        """
        reader = _Reader(self._folder, begin, done)
        list_file = self._folder.path / "cases.txt"
        records = f"--records={self._folder.records}"
        how = self._run_child([records, f"--plan={self._folder.plan}"], reader)
        plan = reader.plan
        # pytest writes the plan before it evaluates the expression of -k.
        if plan is None or (how.code == _PYTEST_USAGE and not reader.seen):
            raise self._no_plan(how)
        remaining = [case.case for case in plan.cases]
        while remaining := [case for case in remaining if case not in reader.seen]:
            # Records come in the order of the plan, so the first case without a record is the one that was running.
            lost = _lost(remaining.pop(0), str(how), self._log_tail(), plan.profile, common)
            append_record(self._folder.records, lost)
            reader.read()
            if remaining:
                list_file.write_text("\n".join(remaining) + "\n", encoding="utf-8")
                how = self._run_child([records, f"--cases={list_file}"], reader)
        list_file.unlink(missing_ok=True)
        return plan

    def _run_child(self, options: list[str], reader: _Reader) -> _End:
        # The child has its own process group, so that it receives SIGINT once, from this process, even if a terminal
        # also interrupts this process. A second SIGINT would abort the clean-up of the running case.
        with self._log.open("ab") as log, interruptible_children():
            child = subprocess.Popen(
                [*self._command, *options],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            return _watch(child, reader)
        except BaseException:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_CLOSE_S)
            raise
        finally:
            if left := kill_child(child):
                self.abandoned.append(left)

    def _no_plan(self, how: _End) -> GdrkitError:
        text = self._log_tail()
        if how.code == _PYTEST_USAGE:
            said = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
            return UsageError(" ".join(said) or text)
        message = f"the suites cannot be collected ({how}):\n{text}"
        return GdrkitError(message, what_to_do=f"read {self._log}")

    def _log_tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="backslashreplace")[-_SHOWN_CHARACTERS:]


class _Reader:
    """A reader of the plan, when it exists, and of records as they are appended."""

    def __init__(self, folder: RunFolder, begin: Callable[[Plan], None], done: Callable[[Record], None]) -> None:
        self._folder = folder
        self._begin = begin
        self._done = done
        self._offset_bytes = 0
        self.plan: Plan | None = None
        self.seen: set[str] = set()

    def read(self) -> bool:
        """Read what is new, and return whether there was anything."""
        is_new = False
        if self.plan is None and self._folder.plan.exists():
            self.plan = read_plan(self._folder.plan)
            self._begin(self.plan)
            is_new = True
        path = self._folder.records
        if self.plan is None or not path.exists():
            return is_new
        with path.open("rb") as file:
            file.seek(self._offset_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        for record in parse_records(whole.split(b"\n"), name=str(path)):
            self.seen.add(record.case)
            self._done(record)
            is_new = True
        return is_new


@dataclass(frozen=True, slots=True)
class _End:
    """The way in which a child ended.

    Attributes
    ----------
    code : int or None
        The return code; None for a child that did not end.
    left : str
        A text that says that the child was left behind, and why; empty for one that ended.
    """

    code: int | None
    is_stalled: bool = False
    left: str = ""

    def __str__(self) -> str:
        if self.is_stalled or self.code is None:
            killed = f"nothing happened for {_STALLED_S:g} s, and its process was killed"
            return f"{killed}; {self.left}" if self.left else killed
        if self.code < 0:
            return f"its process was ended by {signal.Signals(-self.code).name}"
        return f"its process ended with {self.code}"


def _watch(child: subprocess.Popen[bytes], reader: _Reader) -> _End:
    moved = time.monotonic()
    code: int | None = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(_LOOK_S)
        if reader.read():
            moved = time.monotonic()
        if code is None and time.monotonic() - moved > _STALLED_S:
            left = kill_child(child)
            return _End(child.returncode, is_stalled=True, left=left)
    return _End(code)


def _lost(case: str, how: str, log: str, profile: str, common: Common) -> Record:
    return Record(
        schema_version=SCHEMA_VERSION,
        case=case,
        title="",
        verdict=Verdict.FAIL,
        reasons=(CaseReason(text=f"the case left no record: {how}"),),
        profile=profile,
        facts_digest=common.facts_digest,
        substrate={},
        libraries=(),
        seed=common.seed,
        evidence={"traceback": log},
        numbers={},
        routes=(),
        duration_ms=0.0,
        started=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=common.commit,
        version=common.version,
        command=common.command,
    )
