"""The record of a case as a JSON object: the case, its substrate and its observations.

The format is ``reports/schema/record-1.json``. A record in another format is refused and not repaired.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError
from gdrkit.evidence import ElfNote, LoadedLibrary  # noqa: TC001 - types of fields are read at run time.
from gdrkit.install_paths import install_paths
from gdrkit.report.validation import check_started, check_substrate
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "REFUSED",
    "SCHEMA_VERSION",
    "CaseReason",
    "ClaimedFile",
    "ClaimedRoute",
    "Record",
    "SeenLibrary",
    "Verdict",
    "append_record",
    "parse_record",
    "parse_records",
    "read_records",
    "record_lines",
]

SCHEMA_VERSION = 1

# The key of the evidence for a refusal that the profile expects.
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class CaseReason:
    """A reason why a verdict is not ``pass``.

    Attributes
    ----------
    text : str
        One sentence.
    need : str or None
        The need that was not met, for ``not_run``.
    foreseen : bool or None
        Whether the profile foresees the unmet need, for ``not_run``.
    """

    text: str
    need: str | None = None
    foreseen: bool | None = None


@dataclass(frozen=True, slots=True)
class SeenLibrary:
    """A library in one of the processes of a case (``case``, ``peer0`` ...).

    The path is in the form of :meth:`gdrkit.install_paths.InstallPaths.portable`: relative in the checkout,
    ``{python}/...`` in the environment of Python, ``{site}/...``, ``{library_path}/...`` and ``{home}/...`` in local
    folders of the machine.
    """

    process: str
    path: str
    soname: str | None
    build_id: str | None
    notes: tuple[ElfNote, ...]
    error: str | None

    @classmethod
    def of(cls, process: str, library: LoadedLibrary) -> SeenLibrary:
        """Return the description of `library`, which `process` had loaded."""
        return cls(
            process=process,
            path=install_paths().portable(library.path),
            soname=library.soname,
            build_id=library.build_id,
            # The GNU notes of the linker add nothing to the build id.
            notes=tuple(note for note in library.notes if note.owner != "GNU"),
            error=library.error,
        )


@dataclass(frozen=True, slots=True)
class ClaimedRoute:
    """A route that the bytes of a case took, or should have taken, according to the case.

    Attributes
    ----------
    device_index : int
        Number of the device.
    nic : str
        Name of the NIC.
    way : str
        ``dmabuf`` or ``peer_memory``.
    fell_back : str or None
        Why the bytes took another route although this one was requested; None if they took this one.
    """

    device_index: int
    nic: str
    way: str
    fell_back: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimedFile:
    """A route between a device and the files of a mount that the bytes of a case took, according to the case.

    Attributes
    ----------
    device_index : int
        Number of the device.
    mount : str
        Mount point of the file system.
    way : str
        ``p2p`` or ``nvfs``, which are direct, or ``posix`` or ``engine``.
    fell_back : str or None
        Why the bytes took this route although a direct one was requested; None if this one was requested.
    """

    device_index: int
    mount: str
    way: str
    fell_back: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one case of one run.

    Attributes
    ----------
    case : str
        The pytest node id of the case.
    title : str
        The first line of the docstring of the case.
    verdict : Verdict
        The result of the case.
    reasons : tuple of CaseReason
        The reasons for the verdict, unless it is ``pass``.
    profile, facts_digest : str
        The profile and the digest of the facts of the run.
    substrate : mapping
        The substrate of each loaded API, over all processes of the case.
    libraries : tuple of SeenLibrary
        The libraries that were loaded in those processes.
    seed : int
        The seed of the run. The same seed gives the same payloads, keys and delays.
    evidence : mapping
        The evidence that the case kept for the reader.
    numbers : mapping
        Measurements with the unit in each name. Reports contain them only if the substrate is hardware.
    routes : tuple of ClaimedRoute
        The routes that the case is about.
    duration_ms : float
        The time from the beginning of the set-up to the end of the tear-down, in ms.
    started : str
        Start time in UTC, ISO 8601.
    commit : str or None
        Commit of the checkout; None outside of a checkout.
    version : str
        Version of gdrkit.
    command : str
        The command line of the run.
    files : tuple of ClaimedFile
        The routes between devices and files that the case is about.
    uses : tuple of str
        The loaded APIs that the case declared to need. Its numbers are about these. Other APIs may be loaded in the
        same process because of an earlier case.
    """

    schema_version: int
    case: str
    title: str
    verdict: Verdict
    reasons: tuple[CaseReason, ...]
    profile: str
    facts_digest: str
    substrate: dict[str, str]
    libraries: tuple[SeenLibrary, ...]
    seed: int
    evidence: dict[str, object]
    numbers: dict[str, float]
    routes: tuple[ClaimedRoute, ...]
    duration_ms: float
    started: str
    commit: str | None
    version: str
    command: str = field(default="")
    files: tuple[ClaimedFile, ...] = ()
    uses: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the case ran although a need is unmet, and ended with exactly the refusal that the profile states.

        The evidence has every cause.
        """
        return self.verdict is Verdict.NOT_RUN and REFUSED in self.evidence

    @property
    def is_failure(self) -> bool:
        """Whether the case fails a run: it failed, or it did not run for a reason that the profile does not foresee."""
        if self.verdict is Verdict.NOT_RUN:
            return any(reason.foreseen is not True for reason in self.reasons) or not self.reasons
        return self.verdict is Verdict.FAIL


def append_record(path: str | os.PathLike[str], record: Record) -> None:
    """Append one line in one write, so that no reader gets half of it. The folder is made if it does not exist."""
    line = json.dumps(serialization.to_json_data(record), ensure_ascii=False, allow_nan=False) + "\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        data = line.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Read a records file.

    Raises
    ------
    UsageError
        ``MALFORMED``: a line is not a record; the error has its number.
    """
    return parse_records(record_lines(path), name=str(path))


def record_lines(path: str | os.PathLike[str]) -> list[bytes]:
    """Return the lines of a records file.

    The last item is the text after the last line end, empty in a complete file.
    """
    # Only this byte ends a line. Texts may contain other characters that Python treats as line ends.
    return Path(path).read_bytes().split(b"\n")


def parse_records(lines: Iterable[str | bytes], *, name: str = "records") -> tuple[Record, ...]:
    """Parse the lines of a records file; see :func:`read_records`."""
    return tuple(parse_record(line, f"{name}:{number}") for number, line in enumerate(lines, start=1) if line.strip())


def parse_record(line: str | bytes, where: str) -> Record:
    """Parse one line; see :func:`read_records`. Errors name the line `where`."""
    data = serialization.parse_json(line, where=where)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        message = f"{where}: expected schema_version {SCHEMA_VERSION}, found {version!r}"
        raise UsageError(message, reason=Reason.MALFORMED)
    record = serialization.from_json_data(Record, data, where=where)
    check_started(record.started, f"{where}.started")
    check_substrate(record.substrate, f"{where}.substrate")
    return record
