"""Data model of mutation testing: mutants and their results. A mutant is gdrkit with one deliberate change."""

from __future__ import annotations

import enum
import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "EQUIVALENT_FILE",
    "CasesRun",
    "Mutant",
    "MutantOutcome",
    "MutantResult",
    "PatchMismatch",
    "find_changed_lines",
    "read_equivalent_reasons",
]

EQUIVALENT_FILE = Path(__file__).with_name("equivalent.toml")


class PatchMismatch(Exception):
    """The text that a patch replaces does not occur exactly once in the source."""


class MutantOutcome(enum.Enum):
    """The outcome of a mutant. A mutant with the outcome TIMEOUT counts as killed."""

    KILLED = "killed"  # A case failed.
    SURVIVED = "survived"  # All cases passed.
    TIMEOUT = "timeout"  # The cases did not end within the time limit.
    NOT_COMPILED = "not_compiled"
    EQUIVALENT = "equivalent"  # No case can detect the change, as equivalent.toml explains.


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    Attributes
    ----------
    module : str
        The key in ``modules.FILES_BY_MODULE``, or ``native``.
    file : str
        Path of the file below the root of the tree.
    line_number : int
        Number of the first line that differs.
    operator : str
        The mutation operator of mutmut, or ``patch NAME`` for a patch of patches.py.
    before, after : str
        The lines that differ, in the original and in the mutant, without the indentation of the first line.
    source : str
        The whole changed file.
    cases : tuple of str
        The arguments of pytest that choose the cases.
    """

    module: str
    file: str
    line_number: int
    operator: str
    before: str
    after: str
    source: str
    cases: tuple[str, ...]

    @property
    def identity_key(self) -> tuple[str, str, str, str]:
        """Key that identifies the mutant even if its lines have moved in the file: file, operator, before, after."""
        return self.file, self.operator, self.before, self.after

    @property
    def is_native(self) -> bool:
        """Whether the mutant must be compiled."""
        return self.file.startswith("native/")

    @property
    def name(self) -> str:
        """Short name: the name of the patch, or a hash of `identity_key`."""
        if self.operator.startswith("patch "):
            return self.operator.removeprefix("patch ")
        return f"{self.module}-{hashlib.sha256(repr(self.identity_key).encode()).hexdigest()[:10]}"


@dataclass(frozen=True, slots=True)
class CasesRun:
    """The result of one run of the cases. `first_failed_case` is empty if all passed."""

    passed: bool
    timed_out: bool
    first_failed_case: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class MutantResult:
    """The result of one mutant.

    Attributes
    ----------
    killed_by : str
        The case that failed in the run of all cases, and failed again when it ran alone.
    note : str
        Explanation of an unusual outcome, e.g. the reason why a mutant is equivalent.
    duration_s : float
        Time for the mutant, with builds and repeated runs.
    baseline_s : float
        Time of the same cases without a mutant.
    limit_s : float
        Time limit of one run with the mutant.
    """

    mutant: Mutant
    outcome: MutantOutcome
    killed_by: str = ""
    note: str = ""
    duration_s: float = 0.0
    baseline_s: float = 0.0
    limit_s: float = 0.0


def find_changed_lines(before: str, after: str) -> tuple[int, str, str]:
    """Return the number of the first line that differs, and the lines that differ in both texts."""
    before_lines, after_lines = before.splitlines(), after.splitlines()
    common_head_count = _count_common_lines(before_lines, after_lines)
    common_tail_count = _count_common_lines(
        before_lines[common_head_count:][::-1], after_lines[common_head_count:][::-1]
    )
    return (
        common_head_count + 1,
        "\n".join(before_lines[common_head_count : len(before_lines) - common_tail_count]).strip(),
        "\n".join(after_lines[common_head_count : len(after_lines) - common_tail_count]).strip(),
    )


def _count_common_lines(lines_of_one_text: Sequence[str], lines_of_other_text: Sequence[str]) -> int:
    """Return the number of equal lines at the beginning of both texts, before the first difference."""
    numbered_line_pairs = enumerate(zip(lines_of_one_text, lines_of_other_text, strict=False))
    return next(
        (index for index, (line, other_line) in numbered_line_pairs if line != other_line),
        min(len(lines_of_one_text), len(lines_of_other_text)),
    )


def read_equivalent_reasons(path: Path = EQUIVALENT_FILE) -> dict[tuple[str, str, str, str], str]:
    """Return why each mutant in equivalent.toml is equivalent. The key is `Mutant.identity_key`."""
    entries = tomllib.loads(path.read_text()).get("mutant", [])
    return {(entry["file"], entry["operator"], entry["before"], entry["after"]): entry["reason"] for entry in entries}
