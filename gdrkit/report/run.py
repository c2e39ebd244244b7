"""A run of a qualification, and the folder with its files.

The folder contains the data of the run (facts, plan, run, records) and the documents that are made from them
(report.json, junit.xml, summary.md, metrics.prom, index.html).
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.errors import Api, Reason, SetupMissing, UsageError, errno_name
from gdrkit.exit_code import ExitCode
from gdrkit.report.validation import check_exit_code, check_started, check_substrate

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "SCHEMA_VERSION",
    "Run",
    "RunFolder",
    "RunState",
    "banner",
    "file_error",
    "is_file",
    "make_folder",
    "read_bytes",
    "write_atomically",
]

SCHEMA_VERSION = 1


class RunState(enum.Enum):
    """The result of a run for its machine, as text in the fleet page, fleet.json, report.json and metrics.prom."""

    QUALIFIED = "qualified"
    SOFTWARE_ONLY = "software only"
    PARTIAL = "partial"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    WRONG_USAGE = "wrong usage"
    SETUP_MISSING = "set-up is missing"
    NOTHING_PROVEN = "nothing proven"


_BY_CODE: Mapping[int, RunState] = {
    ExitCode.PROVEN: RunState.QUALIFIED,
    ExitCode.FAILED: RunState.FAILED,
    ExitCode.WRONG_USAGE: RunState.WRONG_USAGE,
    ExitCode.SETUP_MISSING: RunState.SETUP_MISSING,
    ExitCode.NOTHING_PROVEN: RunState.NOTHING_PROVEN,
}
# These options of gdrkit qualify select a part of its own cases. The pattern finds them in a command line.
_SELECTING = re.compile(r"""(?:^|\s)['"]?(?:-k|--suites)""")


@dataclass(frozen=True, slots=True)
class Run:
    """The properties of a whole run.

    Attributes
    ----------
    substrate : mapping
        The substrate of each API when its facts were collected.
    software_asked : bool
        Whether the caller requested twins for every API.
    exit_code : int
        Exit code of the command.
    verdict : str
        The result in one sentence.
    causes : tuple of str
        Why the exit code is not 0, one sentence each.
    to_do : tuple of str
        What the reader can do about the causes.
    required : tuple of str
        The required routes of the profile that were not proven.
    host : str
        Host name of the machine; empty if it was not kept.
    host_id : str or None
        A digest that distinguishes machines with the same name, and reveals nothing else about them.
    is_interrupted : bool
        Whether the run has not ended. At the beginning of the run, run.json is written with this flag.
    selection : str
        The options that selected a part of the cases, e.g. ``-k write``; empty if all cases were selected.
    """

    schema_version: int
    started: str
    duration_s: float
    command: str
    profile: str
    profile_about: str
    substrate: dict[str, str]
    software_asked: bool
    seed: int
    commit: str | None
    version: str
    exit_code: int
    verdict: str
    causes: tuple[str, ...]
    to_do: tuple[str, ...]
    required: tuple[str, ...]
    host: str = ""
    host_id: str | None = None
    is_interrupted: bool = False
    selection: str = ""

    @property
    def state(self) -> RunState:
        """The result of the run for its machine.

        Only a whole run on hardware that ended with 0 is ``QUALIFIED``.
        """
        if self.is_interrupted:
            return RunState.INTERRUPTED
        by_code = _BY_CODE.get(self.exit_code, RunState.FAILED)
        if by_code not in {RunState.QUALIFIED, RunState.NOTHING_PROVEN}:
            return by_code
        # gdrkit 0.1.0 did not keep the selection, but it kept the command line.
        if self.selection or _SELECTING.search(self.command):
            return RunState.PARTIAL
        is_software = self.software_asked or "hardware" not in self.substrate.values()
        return RunState.SOFTWARE_ONLY if by_code is RunState.QUALIFIED and is_software else by_code

    @property
    def banner(self) -> str:
        """See :func:`banner`."""
        return banner(self.substrate)


def banner(substrate: Mapping[str, str]) -> str:
    """Return the heading of a report: which APIs ran on a twin. It is empty if none did."""
    twins = sorted(api for api, name in substrate.items() if name == "twin")
    if twins and len(twins) == len(substrate):
        return "software twins: this proves the code, not this machine"
    if twins:
        real = " and ".join(sorted(api for api in substrate if api not in twins))
        return (
            f"{' and '.join(twins)} ran on software twins and {real} on the libraries of this machine: "
            "this run proves no direct route of this machine"
        )
    return ""


class RunFolder:
    """The files of one run.

    Parameters
    ----------
    path : path
        The folder. It need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.facts = self.path / "facts.json"
        self.plan = self.path / "plan.json"
        self.run = self.path / "run.json"
        self.records = self.path / "records.jsonl"
        self.report = self.path / "report.json"
        self.junit = self.path / "junit.xml"
        self.summary = self.path / "summary.md"
        self.metrics = self.path / "metrics.prom"
        self.index = self.path / "index.html"
        # The folder has the facts of each rank of a job with several ranks: rank-N.json.
        self.hosts = self.path / "hosts"

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that a run writes."""
        data = (self.facts, self.plan, self.run, self.records)
        return (*data, self.report, self.junit, self.summary, self.metrics, self.index)

    def make_empty(self) -> None:
        """Make the folder, and remove the files of an earlier run, because records are appended to existing files.

        Raises
        ------
        SetupMissing
            The kernel refuses it: no permission, no space, or a file with the name of the folder.
        """
        make_folder(self.path)
        for file in (*self.files, *self.hosts.glob("rank-*.json")):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise file_error("unlink", file, error) from error

    def write_run(self, run: Run) -> None:
        """Write run.json."""
        write_atomically(self.run, json.dumps(serialization.to_json_data(run), indent=2, ensure_ascii=False) + "\n")

    def read_run(self) -> Run:
        """Read what :meth:`write_run` wrote.

        Raises
        ------
        UsageError
            ``MALFORMED``: the version is another one, or a field is invalid.
        SetupMissing
            The kernel refuses to read the file.
        """
        data = serialization.parse_json(read_bytes(self.run), where=str(self.run))
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            message = f"{self.run}: expected schema_version {SCHEMA_VERSION}, found {version!r}"
            raise UsageError(message, reason=Reason.MALFORMED, what_to_do="read it with the gdrkit that wrote it")
        run = serialization.from_json_data(Run, data, where=str(self.run))
        check_started(run.started, f"{self.run}.started")
        check_substrate(run.substrate, f"{self.run}.substrate")
        check_exit_code(run.exit_code, f"{self.run}.exit_code")
        return run


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless they exist.

    Raises
    ------
    SetupMissing
        The kernel refuses it: no permission, no space, or a file with the name of the folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error("mkdir", path, error) from error


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write a file completely or not at all. The new file replaces the previous one when it is complete.

    Raises
    ------
    SetupMissing
        The kernel refuses to write the file.
    """
    data = text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise file_error("write", path, error) from error
    finally:
        with contextlib.suppress(OSError):  # The file was renamed, or the error that prevented it is already raised.
            temporary.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Return whether a regular file exists. Unlike :meth:`pathlib.Path.is_file`, raise other errors than absence.

    Raises
    ------
    OSError
        The kernel cannot determine it, for example without permission for the folder.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file.

    Raises
    ------
    SetupMissing
        The kernel refuses to read the file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise file_error("read", path, error) from error


def file_error(operation: str, path: Path, error: OSError) -> SetupMissing:
    """Return the error for a failed operation on a file of a run."""
    number = error.errno
    return SetupMissing(
        api=Api.KERNEL,
        operation=operation,
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments={"path": str(path)},
        reason=Reason.NO_PERMISSION if isinstance(error, PermissionError) else Reason.OTHER,
        what_to_do="run the command as a user who can read it"
        if operation == "read"
        else "name a folder that can be written: --output",
        detail=error.strerror or "",
    )
