"""Comparison of two runs of the same cases: one on twins, one on a kernel's RDMA stack.

A case about device memory passes on the twin, and the kernel refuses it with both causes. That is the only outcome that
it may have there. Any other case that both ran must pass on both. If they differ, one of them violates the man page, or
the case requires more than the man page states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report import Record, Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gdrkit.inventory import Profile

__all__ = ["REFUSED", "Pair", "compared", "strangers", "table", "unrefused"]

_ABSENT = "absent"
_PASS = Verdict.PASS.value
# This verdict exists in this table only. It is a record that is not_run and has the refusal that its profile states.
REFUSED = "refused"


@dataclass(frozen=True)
class Pair:
    """A case in both runs. A verdict is that of its record, ``refused`` or ``absent``."""

    case: str
    twin: str
    kernel: str

    @property
    def counts(self) -> bool:
        """Whether the case ran in both runs."""
        return Verdict.NOT_RUN.value not in {self.twin, self.kernel}

    @property
    def agrees(self) -> bool:
        """Whether the case passed in both runs."""
        return self.twin == self.kernel == _PASS

    @property
    def refused(self) -> bool:
        """Whether the case passed on the twin, and the kernel refused it as expected."""
        return (self.twin, self.kernel) == (_PASS, REFUSED)

    @property
    def differs(self) -> bool:
        """Whether the case ran in both runs with an outcome that is not allowed."""
        return self.counts and not self.agrees and not self.refused


def compared(twin: Path, kernel: Path) -> tuple[Pair, ...]:
    """Return the cases of two records files, in the order of the first file."""
    there = {name: {record.case: _verdict(record) for record in read_records(name)} for name in (twin, kernel)}
    cases = dict.fromkeys((*there[twin], *there[kernel]))
    return tuple(Pair(case, there[twin].get(case, _ABSENT), there[kernel].get(case, _ABSENT)) for case in cases)


def unrefused(records: Iterable[Record], profile: Profile) -> tuple[str, ...]:
    """Return the cases whose only unmet needs are expected refusals, and that were not even tried."""
    return tuple(
        f"{record.case} was to be refused and did not run"
        for record in records
        if record.verdict is Verdict.NOT_RUN
        and not record.refused
        and record.reasons
        and all(reason.need and profile.refusal(reason.need) for reason in record.reasons)
    )


def _verdict(record: Record) -> str:
    return REFUSED if record.refused else record.verdict.value


def strangers(records: Iterable[Record], wanted: frozenset[str]) -> tuple[str, ...]:
    """Return the cases that used verbs on another substrate than `wanted`."""
    return tuple(
        f"{record.case} ran verbs on {record.substrate['verbs']}"
        for record in records
        if record.substrate.get("verbs", "") not in {"", *wanted}
    )


def table(pairs: Iterable[Pair]) -> str:
    """Return a table of case, twin and kernel, with a mark for each outcome that is not allowed."""
    rows = [("case", "twin", "rxe", "")]
    marks = {pair: "DIFFERS" if pair.differs else "" for pair in pairs}
    rows += [(pair.case, pair.twin, pair.kernel, mark) for pair, mark in marks.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        " | ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip(" |")
        for row in rows
    )
