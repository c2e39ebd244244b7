"""One run of a qualification, and the folder that holds it.

Level 5. The folder is the unit that people keep, send and render again: what the run wrote (facts, plan, run, records)
and what was made of it (junit.xml, summary.md, index.html).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import plain
from gdrkit.errors import Reason, UsageError
from gdrkit.inventory import Facts
from gdrkit.report.record import read_records

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from gdrkit.report.record import Record

__all__ = ["Run", "RunFolder", "banner"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """What is true of a whole run.

    Attributes
    ----------
    substrate : mapping
        What each API ran on, by what the APIs were found to be when they were asked.
    software_asked : bool
        Whether the caller wanted twins everywhere.
    exit_code : int
        That of the command.
    verdict : str
        One sentence: what was shown.
    causes : tuple of str
        Why the exit code is not 0, one sentence each.
    to_do : tuple of str
        What the reader can do about it.
    required : tuple of str
        What the profile requires and was not proven.
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

    @property
    def banner(self) -> str:
        """See :func:`banner`."""
        return banner(self.substrate)


def banner(substrate: Mapping[str, str]) -> str:
    """What a report says first: which APIs were software; empty when none was."""
    twins = sorted(api for api, name in substrate.items() if name == "twin")
    if twins and len(twins) == len(substrate):
        return "software twins: this proves the code, not this machine"
    if twins:
        real = " and ".join(sorted(api for api in substrate if api not in twins))
        return (
            f"software twin of {' and '.join(twins)}, {real} as the machine has it: "
            "this proves no direct route of this machine"
        )
    return ""


class RunFolder:
    """The files of one run.

    Parameters
    ----------
    path : path
        The folder; it need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.facts = self.path / "facts.json"
        self.plan = self.path / "plan.json"
        self.run = self.path / "run.json"
        self.records = self.path / "records.jsonl"
        self.junit = self.path / "junit.xml"
        self.summary = self.path / "summary.md"
        self.index = self.path / "index.html"

    def write_run(self, run: Run) -> None:
        """Write run.json."""
        self.run.write_text(json.dumps(plain.to_plain(run), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def read(self) -> tuple[Run, Facts, tuple[Record, ...]]:
        """Read back what the run wrote.

        Raises
        ------
        UsageError
            It is no folder of a run, or a file in it is malformed.
        """
        for file in (self.run, self.facts):
            if not file.is_file():
                message = f"{self.path} is no folder of a run: {file.name} is not there"
                raise UsageError(message, what_to_do="name a folder that gdrkit qualify has written")
        try:
            data = json.loads(self.run.read_bytes())
        except ValueError as error:
            message = f"{self.run}: no JSON: {error}"
            raise UsageError(message, reason=Reason.MALFORMED) from error
        run = plain.from_plain(Run, data, where=str(self.run))
        records = read_records(self.records) if self.records.is_file() else ()
        return run, Facts.from_json(self.facts.read_bytes()), records
