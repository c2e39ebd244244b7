"""Runner of the pytest processes that collect and run the cases of a qualification.

A case may end its process, for example by SIGSEGV in a library, or hang in a library. The runner then writes the failed
record of that case itself, and starts another pytest process for the remaining cases.
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

__all__ = ["CommonRecordFields", "SuiteRunner"]

# Interval between two reads of the plan and the records of a running child.
_POLL_INTERVAL_S = 0.1
# A child that writes no record for this time is killed.
_STALL_TIMEOUT_S = 180.0
# An error or a record contains this many characters from the end of pytest's log.
_LOG_TAIL_CHARACTERS = 3000
# The exit code of pytest for a usage error.
_PYTEST_USAGE_ERROR = 4


@dataclass(frozen=True, slots=True)
class CommonRecordFields:
    """The fields that are the same in all records of a run.

    The runner needs them for the record of a case whose process ended before the process could write the record.
    """

    facts_digest: str
    seed: int
    commit: str | None
    version: str
    command: str


class SuiteRunner:
    """A runner of cases in pytest child processes.

    Parameters
    ----------
    folder : RunFolder
        The folder of the run. It contains the facts, and the children write the plan and the records into it.
    environment : mapping
        Environment of the children, which decides whether they load the real libraries or the software twins (libraries
        that emulate the hardware).
    options : list of str
        Options for pytest: profile, seed, selection.
    suites : Path or None
        The folder of the cases; None for the suites of gdrkit.
    clean_up_timeout_s : float
        Time for the clean-up of the running case if this process is interrupted, in seconds.

    Attributes
    ----------
    kill_failures : list of str
        One sentence for each process that did not end after SIGKILL.
    """

    def __init__(
        self,
        folder: RunFolder,
        environment: Mapping[str, str],
        options: list[str],
        *,
        suites: Path | None = None,
        clean_up_timeout_s: float = 10.0,
    ) -> None:
        self._folder = folder
        self._clean_up_timeout_s = clean_up_timeout_s
        self._environment = dict(environment)
        configuration_path = install_paths().suites / "pytest.ini"
        suites = (suites or install_paths().suites).resolve()
        self._command = [
            *(sys.executable, "-m", "pytest", str(suites), f"--ignore={suites / 'meta'}"),
            *("-c", str(configuration_path), "--rootdir", str(suites), "-p", "gdrkit.harness.plugin"),
            *("-m", "qualify", "--color=no", f"--facts={folder.facts}", *options),
        ]
        self._log_path = folder.path / "pytest.log"
        self.kill_failures: list[str] = []

    def plan(self) -> CasePlan:
        """Collect the cases, without running them, and return the plan.

        Raises
        ------
        UsageError
            pytest rejects the options, or the profile does not fit this machine.
        GdrkitError
            pytest cannot collect a file of the suites; its log contains the reason.
        """
        reader = _OutputReader(self._folder, lambda _plan: None, lambda _record: None)
        child_exit = self._run_child(["--collect-only", "-q", f"--plan={self._folder.plan}"], reader)
        if reader.plan is None:
            raise self._make_collection_error(child_exit)
        return reader.plan

    def run(
        self,
        common_fields: CommonRecordFields,
        on_plan: Callable[[CasePlan], None],
        on_record: Callable[[Record], None],
    ) -> CasePlan:
        """Collect and run the cases, and return the plan. All cases run in one child process, unless a case ends it.

        Parameters
        ----------
        common_fields : CommonRecordFields
            The fields for the record of a case that ended or stalled its process.
        on_plan : callable
            Called once with the plan, before the first call of `on_record`.
        on_record : callable
            Called with each record.

        Raises
        ------
        UsageError, GdrkitError
            See :meth:`plan`.
        """
        reader = _OutputReader(self._folder, on_plan, on_record)
        remaining_cases_path = self._folder.path / "cases.txt"
        records_option = f"--records={self._folder.records}"
        child_exit = self._run_child([records_option, f"--plan={self._folder.plan}"], reader)
        plan = reader.plan
        # pytest writes the plan before it evaluates the expression of -k. So the plan exists even if the expression is
        # invalid.
        if plan is None or (child_exit.code == _PYTEST_USAGE_ERROR and not reader.recorded_cases):
            raise self._make_collection_error(child_exit)
        remaining_cases = [case.case for case in plan.cases]
        while remaining_cases := [case for case in remaining_cases if case not in reader.recorded_cases]:
            # Cases run in the order of the plan, so the first case without a record was running when the child ended.
            record = _make_lost_case_record(
                remaining_cases.pop(0), str(child_exit), self._read_log_tail(), plan.profile, common_fields
            )
            append_record(self._folder.records, record)
            reader.read()
            if remaining_cases:
                remaining_cases_path.write_text("\n".join(remaining_cases) + "\n", encoding="utf-8")
                child_exit = self._run_child([records_option, f"--cases={remaining_cases_path}"], reader)
        remaining_cases_path.unlink(missing_ok=True)
        return plan

    def _run_child(self, options: list[str], reader: _OutputReader) -> _ChildExit:
        # Ctrl-C sends SIGINT to the whole process group of the terminal, and this process also sends one to the child.
        # The second SIGINT would abort the clean-up of the running case. So the child gets a process group of its own.
        with self._log_path.open("ab") as log_file, interruptible_children():
            child = subprocess.Popen(
                [*self._command, *options],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            return _watch_until_exit(child, reader)
        except BaseException:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(self._clean_up_timeout_s)
            raise
        finally:
            if kill_failure := kill_child(child):
                self.kill_failures.append(kill_failure)

    def _make_collection_error(self, child_exit: _ChildExit) -> GdrkitError:
        log_tail = self._read_log_tail()
        if child_exit.code == _PYTEST_USAGE_ERROR:
            error_texts = [line.removeprefix("ERROR: ") for line in log_tail.splitlines() if line.startswith("ERROR: ")]
            return UsageError(" ".join(error_texts) or log_tail)
        message = f"the suites cannot be collected ({child_exit}):\n{log_tail}"
        return GdrkitError(message, what_to_do=f"read {self._log_path}")

    def _read_log_tail(self) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="backslashreplace")[-_LOG_TAIL_CHARACTERS:]


class _OutputReader:
    """A reader that passes the plan and the records of a child process to `on_plan` and `on_record`.

    Attributes
    ----------
    plan : CasePlan or None
        The plan. None until the child has written it.
    recorded_cases : set of str
        The cases that have a record.
    """

    def __init__(
        self, folder: RunFolder, on_plan: Callable[[CasePlan], None], on_record: Callable[[Record], None]
    ) -> None:
        self._folder = folder
        self._on_plan = on_plan
        self._on_record = on_record
        self._records_offset_bytes = 0
        self.plan: CasePlan | None = None
        self.recorded_cases: set[str] = set()

    def read(self) -> bool:
        """Read the plan and the records that the child wrote since the last call. Return whether there were any."""
        has_new_output = False
        if self.plan is None and self._folder.plan.exists():
            self.plan = read_plan(self._folder.plan)
            self._on_plan(self.plan)
            has_new_output = True
        records_path = self._folder.records
        if self.plan is None or not records_path.exists():
            return has_new_output
        with records_path.open("rb") as file:
            file.seek(self._records_offset_bytes)
            data = file.read()
        complete_lines = data[: data.rfind(b"\n") + 1]
        self._records_offset_bytes += len(complete_lines)
        for record in parse_records(complete_lines.split(b"\n"), name=str(records_path)):
            self.recorded_cases.add(record.case)
            self._on_record(record)
            has_new_output = True
        return has_new_output


@dataclass(frozen=True, slots=True)
class _ChildExit:
    """The exit status of a child process. ``str()`` returns a clause for error messages, such as "its process ...".

    Attributes
    ----------
    code : int or None
        The return code, or None if the child did not end after SIGKILL.
    is_stalled : bool
        Whether the runner killed the child because it wrote no record for a long time.
    kill_failure : str
        The result of :func:`~gdrkit.children.kill_child`: a text if the child did not end after SIGKILL, else empty.
    """

    code: int | None
    is_stalled: bool = False
    kill_failure: str = ""

    def __str__(self) -> str:
        if self.is_stalled or self.code is None:
            stall_text = f"its process made no progress for {_STALL_TIMEOUT_S:g} s and was killed"
            return f"{stall_text}; {self.kill_failure}" if self.kill_failure else stall_text
        if self.code < 0:
            return f"its process was ended by {signal.Signals(-self.code).name}"
        return f"its process exited with code {self.code}"


def _watch_until_exit(child: subprocess.Popen[bytes], reader: _OutputReader) -> _ChildExit:
    """Read the plan and the records of a child until the child ends. Kill the child if it writes none for too long."""
    last_output_s = time.monotonic()
    code: int | None = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(_POLL_INTERVAL_S)
        if reader.read():
            last_output_s = time.monotonic()
        if code is None and time.monotonic() - last_output_s > _STALL_TIMEOUT_S:
            kill_failure = kill_child(child)
            return _ChildExit(child.returncode, is_stalled=True, kill_failure=kill_failure)
    return _ChildExit(code)


def _make_lost_case_record(
    case: str, child_exit: str, log_tail: str, profile: str, common_fields: CommonRecordFields
) -> Record:
    return Record(
        schema_version=SCHEMA_VERSION,
        case=case,
        title="",
        verdict=Verdict.FAIL,
        reasons=(CaseReason(text=f"the case left no record: {child_exit}"),),
        profile=profile,
        facts_digest=common_fields.facts_digest,
        substrate={},
        libraries=(),
        seed=common_fields.seed,
        evidence={"traceback": log_tail},
        numbers={},
        routes=(),
        duration_ms=0.0,
        started=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=common_fields.commit,
        version=common_fields.version,
        command=common_fields.command,
    )
