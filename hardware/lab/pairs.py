"""Comparison of two runs of the same cases: one on the software twins, one on a kernel's RDMA stack.

A case about device memory passes on the twin, and the kernel must refuse the memory with the error that the profile
states. Any other case that ran in both runs must pass in both. The verdict unproven counts as passed here. If the
outcomes differ, either the twin or the kernel violates the man page, or the case requires more than the man page
states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report import Record, Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gdrkit.inventory import Profile

__all__ = ["REFUSED", "Pair", "compare", "find_missing_refusals", "find_wrong_substrates", "format_table"]

_NO_RECORD = "absent"
# With either verdict, the data of the case is right. A case that claims something about hardware is unproven on a twin.
_RIGHT_VERDICTS = frozenset({Verdict.PASS.value, Verdict.UNPROVEN.value})
# An outcome that exists only in this comparison: the record of the case is not_run and has the error that the profile
# requires.
REFUSED = "refused"


@dataclass(frozen=True)
class Pair:
    """A case with its outcomes on twin and kernel: a verdict, ``refused``, or ``absent`` without a record."""

    case: str
    twin: str
    kernel: str

    @property
    def ran_on_both(self) -> bool:
        """Whether neither record is ``not_run``. A case without a record counts as run, so that it differs."""
        return Verdict.NOT_RUN.value not in {self.twin, self.kernel}

    @property
    def agrees(self) -> bool:
        """Whether the data of the case was right in both runs."""
        return {self.twin, self.kernel} <= _RIGHT_VERDICTS

    @property
    def refused(self) -> bool:
        """Whether the data was right on the twin, and the kernel refused the case as expected."""
        return self.twin in _RIGHT_VERDICTS and self.kernel == REFUSED

    @property
    def differs(self) -> bool:
        """Whether the case ran in both runs with an outcome that is not allowed."""
        return self.ran_on_both and not self.agrees and not self.refused


def compare(twin_file: Path, kernel_file: Path) -> tuple[Pair, ...]:
    """Return each case of two records files with its outcomes.

    The cases of the first file come first, in its order.
    """
    outcomes_by_file = {
        path: {record.case: _decide_outcome(record) for record in read_records(path)}
        for path in (twin_file, kernel_file)
    }
    cases = dict.fromkeys((*outcomes_by_file[twin_file], *outcomes_by_file[kernel_file]))
    return tuple(
        Pair(
            case, outcomes_by_file[twin_file].get(case, _NO_RECORD), outcomes_by_file[kernel_file].get(case, _NO_RECORD)
        )
        for case in cases
    )


def find_missing_refusals(records: Iterable[Record], profile: Profile) -> tuple[str, ...]:
    """Return a sentence for each case that did not run, although the profile requires its refusal by the kernel."""
    return tuple(
        f"{record.case} had to be refused but did not run"
        for record in records
        if record.verdict is Verdict.NOT_RUN
        and not record.is_expected_refusal
        and record.reasons
        and all(reason.need and profile.refusal(reason.need) for reason in record.reasons)
    )


def _decide_outcome(record: Record) -> str:
    return REFUSED if record.is_expected_refusal else record.verdict.value


def find_wrong_substrates(records: Iterable[Record], allowed_substrates: frozenset[str]) -> tuple[str, ...]:
    """Return a sentence for each case that used verbs on a substrate that is not in `allowed_substrates`."""
    return tuple(
        f"{record.case} ran verbs on {record.substrate['verbs']}"
        for record in records
        if record.substrate.get("verbs", "") not in {"", *allowed_substrates}
    )


def format_table(pairs: Iterable[Pair]) -> str:
    """Return a table with the case, its outcome in both runs, and a mark if the outcomes differ."""
    rows = [("case", "twin", "rxe", "")]  # rxe: the kernel's RDMA devices (Soft-RoCE).
    mark_by_pair = {pair: "DIFFERS" if pair.differs else "" for pair in pairs}
    rows += [(pair.case, pair.twin, pair.kernel, mark) for pair, mark in mark_by_pair.items()]
    # The last column, the mark, gets no padding.
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        " | ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip(" |")
        for row in rows
    )
