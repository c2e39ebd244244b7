"""The record of one test case, and the file that has one record per line (records.jsonl).

A record contains the case, its verdict, the substrate of each API and what the case observed. The pytest plugin
(:mod:`gdrkit.harness`) writes records, and all reports are made from them. The format is
``reports/schema/record-1.json``. A line in another format is refused.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.evidence import ElfNote, LoadedLibrary  # noqa: TC001 - types of fields are read at run time.
from gdrkit.install_paths import install_paths
from gdrkit.report.validation import check_started, check_substrate
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "COUNTERS_NOT_READ",
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
    "read_record_lines",
    "read_records",
]

SCHEMA_VERSION = 1

# ``evidence`` has this key if the case ran with an unmet need and failed with the error that the profile expects.
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class CaseReason:
    """A reason why a verdict is not ``pass``.

    Attributes
    ----------
    text : str
        The reason in one sentence.
    need : str or None
        The name of the unmet need if the verdict is ``not_run``.
    foreseen : bool or None
        Whether the profile foresees this unmet need if the verdict is ``not_run``.
    """

    text: str
    need: str | None = None
    foreseen: bool | None = None


@dataclass(frozen=True, slots=True)
class SeenLibrary:
    """A library that one process of a case had loaded.

    Attributes
    ----------
    process : str
        The process: ``case``, ``peer0``, ``peer1`` ...
    path : str
        Path of the library, without folders that are specific to the machine; see
        :meth:`gdrkit.install_paths.InstallPaths.portable`.
    soname, build_id : str or None
        SONAME and build id of the library, if it has them.
    notes : tuple of ElfNote
        The ELF notes of the library, except the notes that the linker wrote.
    error : str or None
        Why the file of the library could not be read.
    """

    process: str
    path: str
    soname: str | None
    build_id: str | None
    notes: tuple[ElfNote, ...]
    error: str | None

    @classmethod
    def of(cls, process: str, library: LoadedLibrary) -> SeenLibrary:
        """Describe `library`, which `process` had loaded."""
        return cls(
            process=process,
            path=install_paths().portable(library.path),
            soname=library.soname,
            build_id=library.build_id,
            # The notes of owner GNU come from the linker. The report needs only the build id, which has its own field.
            notes=tuple(note for note in library.notes if note.owner != "GNU"),
            error=library.error,
        )


# The value of ClaimedRoute.unproven if the case did not read the port counters.
COUNTERS_NOT_READ = "counters_not_read"


@dataclass(frozen=True, slots=True)
class ClaimedRoute:
    """A route between a GPU and a NIC that a case requested, and whether the case observed it.

    Attributes
    ----------
    device_index : int
        Index of the GPU.
    nic : str
        Name of the NIC.
    way : str
        The method of registration: ``dmabuf`` or ``peer_memory``.
    fell_back : str or None
        Why the bytes took another route. None if the bytes took this route.
    path : str or None
        ``loopback``: both ends were one NIC. ``wire``: the ends were two NICs, of one host or of two. None if unknown.
    peer_nic : str or None
        Name of the NIC at the other end. None if unknown.
    unproven : str or None
        Why the port counters do not prove that the bytes took this route; see :attr:`gdrkit.registration.Reach.reason`.
        ``counters_not_read``: the case did not read the counters. None: the counters of both ends grew by at least the
        transferred bytes.
    """

    device_index: int
    nic: str
    way: str
    fell_back: str | None = None
    path: str | None = None
    peer_nic: str | None = None
    unproven: str | None = COUNTERS_NOT_READ


@dataclass(frozen=True, slots=True)
class ClaimedFile:
    """A route that the bytes of a case took between a GPU and the files of a mount, as the case observed it.

    Attributes
    ----------
    device_index : int
        Index of the GPU.
    mount : str
        Mount point of the file system.
    way : str
        The route of the bytes: ``p2p`` or ``nvfs``, which are direct, or ``posix`` or ``engine``.
    fell_back : str or None
        Why the bytes took this route although the case requested a direct one. None if the case requested this route.
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
        The name of the profile of the run, and the digest of the facts about the machine.
    substrate : mapping
        The substrate of each loaded API: the weakest one among the processes of the case.
    libraries : tuple of SeenLibrary
        The libraries that were loaded in the processes of the case.
    seed : int
        The seed of the run. The same seed gives the same payloads, memory keys and delays.
    evidence : mapping
        Texts and values that the case recorded for the reader of the report, such as a traceback.
    numbers : mapping
        Measurements. Each name contains the unit. Reports contain them only if the substrate is hardware.
    routes : tuple of ClaimedRoute
        The routes between GPUs and NICs that the case tested.
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
        The routes between GPUs and files that the case tested.
    uses : tuple of str
        The loaded APIs that the case declared to need. Its numbers describe these APIs only: an earlier case may have
        loaded other APIs into the same process.
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
    def is_expected_refusal(self) -> bool:
        """Whether the case ran with an unmet need and failed with exactly the error that the profile expects.

        ``evidence`` then has the causes of the error.
        """
        return self.verdict is Verdict.NOT_RUN and REFUSED in self.evidence

    @property
    def is_failure(self) -> bool:
        """Whether the case makes the run fail.

        A case makes the run fail if the case failed, or did not run for a reason that the profile does not foresee.
        """
        if self.verdict is Verdict.NOT_RUN:
            return any(reason.foreseen is not True for reason in self.reasons) or not self.reasons
        return self.verdict is Verdict.FAIL


def append_record(path: str | os.PathLike[str], record: Record) -> None:
    """Append a record to a records file as one line. The folder and the file are created if they do not exist.

    The line is written with one system call, so that a reader never sees a part of it. Only after a short write, such
    as on a full disk, the function writes the rest with a second call.
    """
    line = json.dumps(serialization.to_json_data(record), ensure_ascii=False, allow_nan=False) + "\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        unwritten_bytes = line.encode("utf-8", "backslashreplace")
        while unwritten_bytes:
            unwritten_bytes = unwritten_bytes[os.write(descriptor, unwritten_bytes) :]
    finally:
        os.close(descriptor)


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Read a records file.

    Raises
    ------
    UsageError
        ``MALFORMED``: a line is not a record. The message names the line.
    """
    return parse_records(read_record_lines(path), name=str(path))


def read_record_lines(path: str | os.PathLike[str]) -> list[bytes]:
    """Return the lines of a records file.

    The last item is the text after the last line end, empty in a complete file.
    """
    # Only b"\n" ends a line. A text in a record may contain other characters at which splitlines would split.
    return Path(path).read_bytes().split(b"\n")


def parse_records(lines: Iterable[str | bytes], *, name: str = "records") -> tuple[Record, ...]:
    """Parse the lines of a records file; see :func:`read_records`. An error message begins with `name` and the line."""
    return tuple(
        parse_record(line, f"{name}:{line_number}") for line_number, line in enumerate(lines, start=1) if line.strip()
    )


def parse_record(line: str | bytes, where: str) -> Record:
    """Parse one line of a records file; see :func:`read_records`. An error message begins with `where`."""
    record = serialization.parse_versioned(Record, line, version=SCHEMA_VERSION, where=where)
    check_started(record.started, f"{where}.started")
    check_substrate(record.substrate, f"{where}.substrate")
    return record
