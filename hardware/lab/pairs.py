"""Two runs of the same cases, compared: one on twins, one on a kernel's RDMA stack.

Where they differ, one of them does not do what the man page says, or the case asks for more than the man page does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report import Record, Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Pair", "compared", "strangers", "table"]

_ABSENT = "absent"


@dataclass(frozen=True)
class Pair:
    """One case in both runs; a verdict as its record has it, or ``absent``."""

    case: str
    twin: str
    kernel: str

    @property
    def counts(self) -> bool:
        """Whether both ran it."""
        return Verdict.NOT_RUN.value not in {self.twin, self.kernel}

    @property
    def agrees(self) -> bool:
        """Whether both ran it, with one verdict."""
        return self.counts and self.twin == self.kernel


def compared(twin: Path, kernel: Path) -> tuple[Pair, ...]:
    """The cases of two files of records, in the order of the first."""
    there = {name: {record.case: record.verdict.value for record in read_records(name)} for name in (twin, kernel)}
    cases = dict.fromkeys((*there[twin], *there[kernel]))
    return tuple(Pair(case, there[twin].get(case, _ABSENT), there[kernel].get(case, _ABSENT)) for case in cases)


def strangers(records: Iterable[Record], wanted: frozenset[str]) -> tuple[str, ...]:
    """The cases in which verbs was used and ran on something else than `wanted`."""
    return tuple(
        f"{record.case} ran verbs on {record.substrate['verbs']}"
        for record in records
        if record.substrate.get("verbs", "") not in {"", *wanted}
    )


def table(pairs: Iterable[Pair]) -> str:
    """Case, twin, kernel; a case that both ran with another outcome is marked."""
    rows = [("case", "twin", "rxe", "")]
    marks = {pair: "DIFFERS" if pair.counts and not pair.agrees else "" for pair in pairs}
    rows += [(pair.case, pair.twin, pair.kernel, mark) for pair, mark in marks.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        " | ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip(" |")
        for row in rows
    )
