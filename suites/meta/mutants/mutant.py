"""A mutant is the product with one deliberate change; its result says whether the cases noticed the change."""

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
    "EQUIVALENT",
    "CasesRun",
    "Mutant",
    "MutantOutcome",
    "PatchMismatch",
    "Result",
    "changed_lines",
    "equivalents",
]

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


class PatchMismatch(Exception):
    """A committed patch or equivalence no longer fits the source."""


class MutantOutcome(enum.Enum):
    """The outcome of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMEOUT = "timeout"
    NOT_COMPILED = "not_compiled"
    EQUIVALENT = "equivalent"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    Attributes
    ----------
    module : str
        The module of the table, or ``native``.
    file : str
        Path of the file below the root of the tree.
    line : int
        Number of the first line that differs.
    operator : str
        The operator of mutmut, or ``patch NAME`` for a committed patch.
    before, after : str
        The lines that differ, without the indentation of the first.
    source : str
        The whole changed file.
    cases : tuple of str
        The arguments of pytest that choose the cases.
    """

    module: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    source: str
    cases: tuple[str, ...]

    @property
    def content(self) -> tuple[str, str, str, str]:
        """The key that identifies the mutant even if lines move: file, operator, before, after."""
        return self.file, self.operator, self.before, self.after

    @property
    def is_native(self) -> bool:
        """Whether it must be compiled."""
        return self.file.startswith("native/")

    @property
    def name(self) -> str:
        """A short name, made from the content."""
        if self.operator.startswith("patch "):
            return self.operator.removeprefix("patch ")
        return f"{self.module}-{hashlib.sha256(repr(self.content).encode()).hexdigest()[:10]}"


@dataclass(frozen=True, slots=True)
class CasesRun:
    """The result of one run of the cases: whether they passed, the first failed case, and the duration."""

    passed: bool
    timed_out: bool
    case: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a mutant.

    Attributes
    ----------
    killed_by : str
        The case that failed twice.
    note : str
        Why the outcome is not what a single run showed, or the reason of an equivalence.
    """

    mutant: Mutant
    outcome: MutantOutcome
    killed_by: str = ""
    note: str = ""
    duration_s: float = 0.0
    baseline_s: float = 0.0
    limit_s: float = 0.0


def changed_lines(before: str, after: str) -> tuple[int, str, str]:
    """Return the number of the first line that differs, and the lines that differ in both texts."""
    old, new = before.splitlines(), after.splitlines()
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    return head + 1, "\n".join(old[head : len(old) - tail]).strip(), "\n".join(new[head : len(new) - tail]).strip()


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many lines two texts have in common from their beginning."""
    pairs = zip(one, other, strict=False)
    return next((count for count, (line, another) in enumerate(pairs) if line != another), min(len(one), len(other)))


def equivalents(path: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """Return the reason of each committed equivalent mutant by its content."""
    entries = tomllib.loads(path.read_text()).get("mutant", [])
    return {(each["file"], each["operator"], each["before"], each["after"]): each["reason"] for each in entries}
