"""One JSON object per case: what ran, on what, what was seen.

Level 5. The form is that of ``reports/schema/record-1.json``; a record that is not of that form is refused, not
repaired.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import plain
from gdrkit.errors import Reason, UsageError
from gdrkit.house import house
from gdrkit.report.form import check_started, check_substrate
from gdrkit.verdict import Verdict
from gdrkit.witness import ElfNote, LoadedLibrary  # noqa: TC001 - types of fields are read at run time.

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

# The key of the evidence below which the harness keeps a refusal that the profile expects.
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class CaseReason:
    """Why a verdict is not ``pass``.

    Attributes
    ----------
    text : str
        One sentence.
    need : str or None
        The need that was not met, for ``not_run``.
    foreseen : bool or None
        Whether the profile foresees that, for ``not_run``.
    """

    text: str
    need: str | None = None
    foreseen: bool | None = None


@dataclass(frozen=True, slots=True)
class SeenLibrary:
    """A library in one of the processes of a case (``case``, ``peer0`` ...).

    Its path is as :meth:`gdrkit.house.House.portable` has it: relative in the checkout, ``{python}/...`` in the
    environment of Python, ``{site}/...``, ``{library_path}/...`` and ``{home}/...`` in folders of the machine's own.
    """

    process: str
    path: str
    soname: str | None
    build_id: str | None
    notes: tuple[ElfNote, ...]
    error: str | None

    @classmethod
    def of(cls, process: str, library: LoadedLibrary) -> SeenLibrary:
        """As `process` had it."""
        return cls(
            process=process,
            path=house().portable(library.path),
            soname=library.soname,
            build_id=library.build_id,
            # Those of the linker say nothing that the build id does not.
            notes=tuple(note for note in library.notes if note.owner != "GNU"),
            error=library.error,
        )


@dataclass(frozen=True, slots=True)
class ClaimedRoute:
    """A route that a case says its bytes took, or should have taken.

    Attributes
    ----------
    device_index : int
        Number of the device.
    nic : str
        Name of the NIC.
    way : str
        ``dmabuf`` or ``peer_memory``.
    fell_back : str or None
        Why the bytes took another way although this one was asked for; None when they took it.
    """

    device_index: int
    nic: str
    way: str
    fell_back: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimedFile:
    """A way between a device and the files of a mount that a case says its bytes took, or should have taken.

    Attributes
    ----------
    device_index : int
        Number of the device.
    mount : str
        Where the file system is mounted.
    way : str
        ``p2p`` or ``nvfs``, which are direct, or ``posix`` or ``engine``.
    fell_back : str or None
        Why the bytes took this way although a direct one was asked for; None when it was the one asked for.
    """

    device_index: int
    mount: str
    way: str
    fell_back: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One case of one run.

    Attributes
    ----------
    case : str
        Its id, as pytest names it.
    title : str
        The first line of its docstring.
    verdict : Verdict
        What it showed.
    reasons : tuple of CaseReason
        Why, unless it passed.
    profile, facts_digest : str
        Of the run.
    substrate : mapping
        What each API that was loaded ran on, over all processes of the case.
    libraries : tuple of SeenLibrary
        What was found in those processes.
    seed : int
        Of the run; the same seed gives the same payloads, keys and delays.
    evidence : mapping
        What the case kept for the reader.
    numbers : mapping
        Measurements, the unit in each name. Shown as performance only where the substrate is hardware.
    routes : tuple of ClaimedRoute
        The routes it was about.
    duration_ms : float
        From the beginning of its set-up to the end of its tear-down.
    started : str
        UTC, ISO 8601.
    commit : str or None
        Of the checkout; None outside of one.
    version : str
        Of gdrkit.
    command : str
        The command line of the run.
    files : tuple of ClaimedFile
        The ways between devices and files that it was about.
    uses : tuple of str
        The APIs that it declared to need, of those that were loaded: its numbers are about these. Another may be loaded
        in the same process because of an earlier case.
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
        """Whether it ran although a need is unmet, and ended with exactly the refusal that the profile states.

        The evidence has every cause.
        """
        return self.verdict is Verdict.NOT_RUN and REFUSED in self.evidence

    @property
    def is_failure(self) -> bool:
        """Whether it fails a run: it failed, or it did not run for a reason that nobody foresaw."""
        if self.verdict is Verdict.NOT_RUN:
            return any(reason.foreseen is not True for reason in self.reasons) or not self.reasons
        return self.verdict is Verdict.FAIL


def append_record(path: str | os.PathLike[str], record: Record) -> None:
    """Append one line, in one write, so that a reader never sees half of it; a folder that is not there is made."""
    line = json.dumps(plain.to_plain(record), ensure_ascii=False, allow_nan=False) + "\n"
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
        ``MALFORMED``: a line that is no record; its number is named.
    """
    return parse_records(record_lines(path), name=str(path))


def record_lines(path: str | os.PathLike[str]) -> list[bytes]:
    """The lines of a records file; the last is what follows the last line end, empty in a whole file."""
    # Only this byte ends a line: what else Python takes for a line end may be in a text.
    return Path(path).read_bytes().split(b"\n")


def parse_records(lines: Iterable[str | bytes], *, name: str = "records") -> tuple[Record, ...]:
    """Parse lines of a records file; see :func:`read_records`."""
    return tuple(parse_record(line, f"{name}:{number}") for number, line in enumerate(lines, start=1) if line.strip())


def parse_record(line: str | bytes, where: str) -> Record:
    """Parse one line, called `where` in errors; see :func:`read_records`."""
    data = plain.parse_json(line, where=where)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        message = f"{where}: expected schema_version {SCHEMA_VERSION}, found {version!r}"
        raise UsageError(message, reason=Reason.MALFORMED)
    record = plain.from_plain(Record, data, where=where)
    check_started(record.started, f"{where}.started")
    check_substrate(record.substrate, f"{where}.substrate")
    return record
