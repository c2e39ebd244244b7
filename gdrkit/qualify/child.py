"""The pytest processes of a run, and what they leave behind.

Level 6. A case may end its process (a fault, an abort of a twin) or never come back from a library. Then the record of
that case says so, and another process goes on with the rest.
"""

from __future__ import annotations

import datetime as dt
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError, UsageError
from gdrkit.house import house
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
_SHOWN_CHARACTERS = 3000
_PYTEST_USAGE, _PYTEST_NOTHING = 4, 5


@dataclass(frozen=True, slots=True)
class Common:
    """What the records of cases that left none of their own have in common."""

    profile: str
    facts_digest: str
    seed: int
    commit: str | None
    version: str
    command: str


class Suites:
    """Collects and runs the cases of a qualification.

    Parameters
    ----------
    folder : RunFolder
        Where facts are and records go.
    environment : mapping
        Of the children; it decides the substrate.
    options : list of str
        For pytest: profile, seed, selection.
    suites : Path or None
        The folder of the cases; gdrkit's own when None.
    """

    def __init__(
        self, folder: RunFolder, environment: Mapping[str, str], options: list[str], *, suites: Path | None = None
    ) -> None:
        self._folder = folder
        self._environment = dict(environment)
        settings = house().suites / "pytest.ini"
        suites = (suites or house().suites).resolve()
        self._command = [
            *(sys.executable, "-m", "pytest", str(suites), f"--ignore={suites / 'meta'}"),
            *("-c", str(settings), "--rootdir", str(suites), "-p", "gdrkit.harness.plugin"),
            *("-m", "qualify", "--color=no", f"--facts={folder.facts}", *options),
        ]
        self._log = folder.path / "pytest.log"

    def plan(self) -> Plan:
        """Collect the cases without running them.

        Raises
        ------
        UsageError
            pytest does not accept the options, or the profile does not fit.
        GdrkitError
            A file of the suites cannot be collected; the log says why.
        """
        command = [*self._command, "--collect-only", "-q", f"--plan={self._folder.plan}"]
        ended = subprocess.run(
            command, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        self._log.write_text(ended.stdout + ended.stderr, encoding="utf-8")
        if ended.returncode == _PYTEST_USAGE:
            lines = [line.removeprefix("ERROR: ") for line in ended.stderr.splitlines() if line.startswith("ERROR: ")]
            raise UsageError(" ".join(lines) or ended.stderr.strip())
        if ended.returncode not in (0, _PYTEST_NOTHING):
            tail = (ended.stdout + ended.stderr).strip()[-_SHOWN_CHARACTERS:]
            message = f"the suites cannot be collected (pytest ended with {ended.returncode}):\n{tail}"
            raise GdrkitError(message, what_to_do=f"read {self._log}")
        return read_plan(self._folder.plan)

    def run(self, plan: Plan, common: Common, done: Callable[[Record], None]) -> tuple[Record, ...]:
        """Run the cases of a plan; `done` is called after each.

        Raises
        ------
        GdrkitError
            A child ended without having run a case.
        """
        reader = _Reader(self._folder.records, done)
        remaining = [case.case for case in plan.cases]
        list_file = self._folder.path / "cases.txt"
        while remaining:
            list_file.write_text("\n".join(remaining) + "\n", encoding="utf-8")
            how = self._run_child(list_file, reader)
            seen = {record.case for record in reader.records}
            left = [case for case in remaining if case not in seen]
            if left:
                # Records come in the order of the plan, so the first that is missing is the one that was running.
                append_record(self._folder.records, _lost(left.pop(0), how, self._log_tail(), common))
                reader.read()
            remaining = left
        list_file.unlink(missing_ok=True)
        return tuple(reader.records)

    def _run_child(self, list_file: Path, reader: _Reader) -> str:
        command = [*self._command, f"--cases={list_file}", f"--records={self._folder.records}"]
        with (
            self._log.open("ab") as log,
            subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            ) as child,
        ):
            moved = time.monotonic()
            try:
                while True:
                    try:
                        code = child.wait(_LOOK_S)
                    except subprocess.TimeoutExpired:
                        code = None
                    if reader.read():
                        moved = time.monotonic()
                    if code is not None:
                        return _how_it_ended(code)
                    if time.monotonic() - moved > _STALLED_S:
                        child.kill()
                        return f"it did not end within {_STALLED_S:g} s, and was killed"
            except BaseException:
                child.kill()
                raise

    def _log_tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="backslashreplace")[-_SHOWN_CHARACTERS:]


class _Reader:
    """Reads records as they are appended."""

    def __init__(self, path: Path, done: Callable[[Record], None]) -> None:
        self._path = path
        self._done = done
        self._offset_bytes = 0
        self.records: list[Record] = []

    def read(self) -> bool:
        """Read what is new; whether there was any."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        new = parse_records(whole.decode("utf-8").splitlines(), name=str(self._path))
        for record in new:
            self.records.append(record)
            self._done(record)
        return bool(new)


def _lost(case: str, how: str, log: str, common: Common) -> Record:
    return Record(
        schema_version=SCHEMA_VERSION,
        case=case,
        title="",
        verdict=Verdict.FAIL,
        reasons=(CaseReason(text=f"the case left no record: {how}"),),
        profile=common.profile,
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


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with {code}"
