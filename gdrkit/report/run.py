"""The result of one run of ``gdrkit qualify`` (run.json), and the folder with all files of the run.

The folder contains the data of the run (facts.json, topology.json, doctor.json, plan.json, run.json, records.jsonl) and
the documents that are made from this data (report.json, junit.xml, summary.md, metrics.prom, index.html).
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
from gdrkit.errors import Api, Reason, SetupMissing, errno_name
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
    "is_file",
    "make_file_error",
    "make_folder",
    "read_bytes",
    "write_atomically",
]

SCHEMA_VERSION = 1


class RunState(enum.Enum):
    """The result of a run for its machine. The values are texts in report.json, metrics.prom and the fleet report."""

    QUALIFIED = "qualified"
    SOFTWARE_ONLY = "software only"
    PARTIAL = "partial"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    WRONG_USAGE = "wrong usage"
    SETUP_MISSING = "set-up is missing"
    NOTHING_PROVEN = "nothing proven"


_STATE_BY_EXIT_CODE: Mapping[int, RunState] = {
    ExitCode.PROVEN: RunState.QUALIFIED,
    ExitCode.FAILED: RunState.FAILED,
    ExitCode.WRONG_USAGE: RunState.WRONG_USAGE,
    ExitCode.SETUP_MISSING: RunState.SETUP_MISSING,
    ExitCode.NOTHING_PROVEN: RunState.NOTHING_PROVEN,
}
# Matches the options of gdrkit qualify that select some of the cases, in a command line.
_SELECTION_OPTION = re.compile(r"""(?:^|\s)['"]?(?:-k|--suites)""")


@dataclass(frozen=True, slots=True)
class Run:
    """The contents of run.json: the properties of a run that its records do not have.

    Attributes
    ----------
    substrate : mapping
        The substrate of each API at the time when the facts about the machine were collected.
    software_asked : bool
        Whether the user requested software twins (libraries that emulate the hardware) for every API (``--software``).
    exit_code : int
        Exit code of the command.
    verdict : str
        The result in one sentence.
    causes : tuple of str
        The reasons why the exit code is not 0, one sentence each.
    to_do : tuple of str
        What the user can do about the causes.
    required : tuple of str
        The routes that the profile requires and that were not proven, one sentence each.
    host : str
        Host name of the machine; empty if it was not recorded.
    host_id : str or None
        A digest that distinguishes machines with the same name, and reveals nothing else about them.
    is_interrupted : bool
        Whether the run has not ended. run.json has True from the beginning of the run, and False from its end.
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

        Only a run of all cases on hardware that ended with exit code 0 is ``QUALIFIED``.
        """
        if self.is_interrupted:
            return RunState.INTERRUPTED
        exit_code_state = _STATE_BY_EXIT_CODE.get(self.exit_code, RunState.FAILED)
        if exit_code_state not in {RunState.QUALIFIED, RunState.NOTHING_PROVEN}:
            return exit_code_state
        # run.json of gdrkit 0.1.0 has no selection, but it has the command line.
        if self.selection or _SELECTION_OPTION.search(self.command):
            return RunState.PARTIAL
        is_software = self.software_asked or "hardware" not in self.substrate.values()
        return RunState.SOFTWARE_ONLY if exit_code_state is RunState.QUALIFIED and is_software else exit_code_state

    @property
    def banner(self) -> str:
        """The heading of a report of the run; see :func:`banner`."""
        return banner(self.substrate)


def banner(substrate: Mapping[str, str]) -> str:
    """Return the heading of a report, which names the APIs that ran on a software twin. It is empty if none did."""
    twin_apis = sorted(api for api, substrate_name in substrate.items() if substrate_name == "twin")
    if twin_apis and len(twin_apis) == len(substrate):
        return "software twins: this proves the code, not this machine"
    if twin_apis:
        real_apis = " and ".join(sorted(api for api in substrate if api not in twin_apis))
        return (
            f"{' and '.join(twin_apis)} ran on software twins and {real_apis} on the libraries of this machine: "
            "this run proves no direct route of this machine"
        )
    return ""


class RunFolder:
    """The paths of the files of one run.

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
        self.topology = self.path / "topology.json"
        self.diagnosis = self.path / "doctor.json"
        self.records = self.path / "records.jsonl"
        self.report = self.path / "report.json"
        self.junit = self.path / "junit.xml"
        self.summary = self.path / "summary.md"
        self.metrics = self.path / "metrics.prom"
        self.index = self.path / "index.html"
        # Only a job with several ranks has this folder. It has the facts of each rank: rank-N.json.
        self.hosts = self.path / "hosts"

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that a run writes."""
        data_files = (self.facts, self.topology, self.diagnosis, self.plan, self.run, self.records)
        return (*data_files, self.report, self.junit, self.summary, self.metrics, self.index)

    def make_empty(self) -> None:
        """Create the folder if it does not exist, and remove the files of an earlier run.

        Otherwise the records of this run would be appended to the records of the earlier run.

        Raises
        ------
        SetupMissing
            A system call failed, such as for a missing permission, a full disk or a file with the name of the folder.
        """
        make_folder(self.path)
        for file in (*self.files, *self.hosts.glob("rank-*.json")):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise make_file_error("unlink", file, error) from error

    def write_run(self, run: Run) -> None:
        """Write run.json. An existing file is replaced atomically."""
        write_atomically(self.run, json.dumps(serialization.to_json_data(run), indent=2, ensure_ascii=False) + "\n")

    def read_run(self) -> Run:
        """Read run.json.

        Raises
        ------
        UsageError
            ``MALFORMED``: the file has another schema version, or a field is invalid.
        SetupMissing
            The kernel refuses to read the file.
        """
        run = serialization.parse_versioned(Run, read_bytes(self.run), version=SCHEMA_VERSION, where=str(self.run))
        check_started(run.started, f"{self.run}.started")
        check_substrate(run.substrate, f"{self.run}.substrate")
        check_exit_code(run.exit_code, f"{self.run}.exit_code")
        return run


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist.

    Raises
    ------
    SetupMissing
        mkdir(2) failed, such as for a missing permission, a full disk or a file with the name of the folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise make_file_error("mkdir", path, error) from error


def write_atomically(path: Path, contents: str | bytes) -> None:
    """Write a file completely or not at all. The new file is complete before it replaces an existing one.

    Raises
    ------
    SetupMissing
        The kernel refuses to write the file.
    """
    data = contents.encode("utf-8", "backslashreplace") if isinstance(contents, str) else contents
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary_path.write_bytes(data)
        temporary_path.replace(path)
    except OSError as error:
        raise make_file_error("write", path, error) from error
    finally:
        with contextlib.suppress(OSError):  # The error of a write or rename that failed is already being raised.
            temporary_path.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Return whether `path` is an existing regular file.

    Unlike :meth:`pathlib.Path.is_file`, this function raises an error if the kernel cannot tell.

    Raises
    ------
    OSError
        stat(2) failed for another reason than a missing file, such as a missing permission for the folder.
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
        raise make_file_error("read", path, error) from error


def make_file_error(operation: str, path: Path, error: OSError) -> SetupMissing:
    """Return the error to raise after the system call `operation` failed on a file of a run."""
    errno_value = error.errno
    return SetupMissing(
        api=Api.KERNEL,
        operation=operation,
        status=errno_value,
        status_name=errno_name(errno_value),
        errno=errno_value,
        arguments={"path": str(path)},
        reason=Reason.NO_PERMISSION if isinstance(error, PermissionError) else Reason.OTHER,
        what_to_do="run the command as a user who can read this path"
        if operation == "read"
        else "name a folder that can be written: --output",
        detail=error.strerror or "",
    )
