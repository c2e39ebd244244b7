"""The pytest processes that collect and run the cases of a qualification.

A case can end its process (by a fault, or an abort in a twin) or hang in a library. The runner then writes the record
of that case, and another process runs the remaining cases.
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
from gdrkit.qualify.plan import CasePlan, read_plan
from gdrkit.report import CaseReason, Record, Verdict, append_record, parse_records
from gdrkit.report.record import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gdrkit.report import RunFolder

__all__ = ["CommonFields", "SuiteRunner"]

_POLL_S = 0.1
# A child that writes no record for so long is killed.
_STALLED_S = 180.0
# The time that an interrupted case has for its clean-up.
_CLEAN_UP_S = 10.0
_LOG_TAIL_CHARACTERS = 3000
# The exit code of pytest for a usage error.
_PYTEST_USAGE = 4


@dataclass(frozen=True, slots=True)
class CommonFields:
    """The fields that the records of all cases of a run share, for the record of a case whose process has ended."""

    facts_digest: str
    seed: int
    commit: str | None
    version: str
    command: str


class SuiteRunner:
    """A runner of the cases in child processes.

    Parameters
    ----------
    folder : RunFolder
        The folder of the facts and the records.
    environment : mapping
        Environment of the children. It selects the substrate.
    options : list of str
        Options for pytest: profile, seed, selection.
    suites : Path or None
        The folder of the cases; None for the suites of gdrkit.

    Attributes
    ----------
    abandoned : list of str
        One sentence for each process that did not end after SIGKILL.
    """

    def __init__(
        self, folder: RunFolder, environment: Mapping[str, str], options: list[str], *, suites: Path | None = None
    ) -> None:
        self._folder = folder
        self._environment = dict(environment)
        configuration = install_paths().suites / "pytest.ini"
        suites = (suites or install_paths().suites).resolve()
        self._command = [
            *(sys.executable, "-m", "pytest", str(suites), f"--ignore={suites / 'meta'}"),
            *("-c", str(configuration), "--rootdir", str(suites), "-p", "gdrkit.harness.plugin"),
            *("-m", "qualify", "--color=no", f"--facts={folder.facts}", *options),
        ]
        self._log = folder.path / "pytest.log"
        self.abandoned: list[str] = []

    def plan(self) -> CasePlan:
        """Collect the cases without running them.

        Raises
        ------
        UsageError
            pytest rejects the options, or the profile does not fit.
        GdrkitError
            A file of the suites cannot be collected; the log contains the reason.
        """
        reader = _OutputReader(self._folder, lambda _plan: None, lambda _record: None)
        end = self._run_child(["--collect-only", "-q", f"--plan={self._folder.plan}"], reader)
        if reader.plan is None:
            raise self._collection_error(end)
        return reader.plan

    def run(self, common: CommonFields, begin: Callable[[CasePlan], None], done: Callable[[Record], None]) -> CasePlan:
        """Collect and run the cases, in one child process unless a case ends that process.

        Parameters
        ----------
        common : CommonFields
            The fields of the record of a case that ended its process.
        begin : callable
            Called once with the plan, before the first record.
        done : callable
            Called with each record.

        Raises
        ------
        UsageError, GdrkitError
            See :meth:`plan`.
        """
        reader = _OutputReader(self._folder, begin, done)
        list_file = self._folder.path / "cases.txt"
        records = f"--records={self._folder.records}"
        end = self._run_child([records, f"--plan={self._folder.plan}"], reader)
        plan = reader.plan
        # The plan is written before pytest evaluates the expression of -k, so it also exists if that is invalid.
        if plan is None or (end.code == _PYTEST_USAGE and not reader.recorded):
            raise self._collection_error(end)
        remaining = [case.case for case in plan.cases]
        while remaining := [case for case in remaining if case not in reader.recorded]:
            # Cases run in the order of the plan, so the first case without a record was running when the child ended.
            record = _record_of_lost_case(remaining.pop(0), str(end), self._log_tail(), plan.profile, common)
            append_record(self._folder.records, record)
            reader.read()
            if remaining:
                list_file.write_text("\n".join(remaining) + "\n", encoding="utf-8")
                end = self._run_child([records, f"--cases={list_file}"], reader)
        list_file.unlink(missing_ok=True)
        return plan

    def _run_child(self, options: list[str], reader: _OutputReader) -> _ChildEnd:
        # Ctrl-C sends SIGINT to the whole process group of the terminal. The child has its own group, so that it gets
        # exactly one SIGINT, from this process. A second one would abort the clean-up of the running case.
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
                child.wait(_CLEAN_UP_S)
            raise
        finally:
            if abandoned := kill_child(child):
                self.abandoned.append(abandoned)

    def _collection_error(self, end: _ChildEnd) -> GdrkitError:
        text = self._log_tail()
        if end.code == _PYTEST_USAGE:
            errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
            return UsageError(" ".join(errors) or text)
        message = f"the suites cannot be collected ({end}):\n{text}"
        return GdrkitError(message, what_to_do=f"read {self._log}")

    def _log_tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="backslashreplace")[-_LOG_TAIL_CHARACTERS:]


class _OutputReader:
    """An incremental reader of the plan and the records that a child process writes.

    Attributes
    ----------
    plan : CasePlan or None
        The plan; None until the child has written it.
    recorded : set of str
        The cases that have a record.
    """

    def __init__(self, folder: RunFolder, begin: Callable[[CasePlan], None], done: Callable[[Record], None]) -> None:
        self._folder = folder
        self._begin = begin
        self._done = done
        self._offset_bytes = 0
        self.plan: CasePlan | None = None
        self.recorded: set[str] = set()

    def read(self) -> bool:
        """Read the output since the last call, and return whether there was any."""
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
        complete_lines = data[: data.rfind(b"\n") + 1]
        self._offset_bytes += len(complete_lines)
        for record in parse_records(complete_lines.split(b"\n"), name=str(path)):
            self.recorded.add(record.case)
            self._done(record)
            is_new = True
        return is_new


@dataclass(frozen=True, slots=True)
class _ChildEnd:
    """The end of a child process; as a text, a clause for an error.

    Attributes
    ----------
    code : int or None
        The return code; None for a child that did not end after SIGKILL.
    is_stalled : bool
        Whether it was killed because it wrote no record for a long time.
    abandoned : str
        The sentence that states that the child did not end after SIGKILL; empty for a child that ended.
    """

    code: int | None
    is_stalled: bool = False
    abandoned: str = ""

    def __str__(self) -> str:
        if self.is_stalled or self.code is None:
            killed = f"its process made no progress for {_STALLED_S:g} s and was killed"
            return f"{killed}; {self.abandoned}" if self.abandoned else killed
        if self.code < 0:
            return f"its process was ended by {signal.Signals(-self.code).name}"
        return f"its process exited with code {self.code}"


def _watch(child: subprocess.Popen[bytes], reader: _OutputReader) -> _ChildEnd:
    last_progress = time.monotonic()
    code: int | None = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(_POLL_S)
        if reader.read():
            last_progress = time.monotonic()
        if code is None and time.monotonic() - last_progress > _STALLED_S:
            abandoned = kill_child(child)
            return _ChildEnd(child.returncode, is_stalled=True, abandoned=abandoned)
    return _ChildEnd(code)


def _record_of_lost_case(case: str, end: str, log: str, profile: str, common: CommonFields) -> Record:
    return Record(
        schema_version=SCHEMA_VERSION,
        case=case,
        title="",
        verdict=Verdict.FAIL,
        reasons=(CaseReason(text=f"the case left no record: {end}"),),
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
