"""The failures of a run, with cause and remedy.

An error of gdrkit ends with what to do. For a failure without such an ending, a general remedy is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.routes import RouteState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory import ApiFailure, Facts
    from gdrkit.report.record import Record
    from gdrkit.report.routes import FileStatus, RouteStatus

__all__ = ["Failure", "failures", "split_remedy"]

_MARK = ". To do: "
_UNFORESEEN = "give the machine what is missing, or let its profile foresee that it is not there"
_FELL_BACK = "remove the cause, and run the case again: its transfers were not direct"
_UNKNOWN = "read its traceback below, then run it alone: gdrkit qualify -k {name} --seed {seed}"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure and the cases, routes or APIs that have it.

    Attributes
    ----------
    cause : str
        The cause.
    remedy : str
        What to do.
    whats : tuple of str
        The cases, routes or APIs that have this failure.
    cases : tuple of str
        For each of ``whats`` the id of the case that showed it; empty for an API.
    """

    cause: str
    remedy: str
    whats: tuple[str, ...]
    cases: tuple[str, ...]


def failures(
    facts: Facts, records: Sequence[Record], routes: Sequence[RouteStatus], files: Sequence[FileStatus]
) -> tuple[Failure, ...]:
    """Return the failures of a run: cases, routes that fell back, APIs without a reply. Equal causes are merged."""
    found = [_of_case(record) for record in records if record.is_failure]
    statuses: list[RouteStatus | FileStatus] = [*routes, *files]
    for status in statuses:
        if status.state is RouteState.FELL_BACK:
            cause, remedy = split_remedy(status.cause.removesuffix(f" ({status.shown_by})"))
            found.append((cause, remedy or _FELL_BACK, status.name, status.shown_by))
    found += _of_apis(facts.failures)
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for cause, remedy, what, case in found:
        grouped.setdefault((cause, remedy), []).append((what, case))
    seed = records[0].seed if records else 0
    return tuple(
        Failure(
            cause,
            remedy.format(name=_name(members[0][1]), seed=seed) if remedy == _UNKNOWN else remedy,
            tuple(what for what, _ in members),
            tuple(case for _, case in members),
        )
        for (cause, remedy), members in grouped.items()
    )


def split_remedy(text: str) -> tuple[str, str]:
    """Return the two parts of the text of a gdrkit error: what happened, and what to do about it."""
    what, _, remedy = text.partition(_MARK)
    return what, remedy


def _of_case(record: Record) -> tuple[str, str, str, str]:
    parts = [split_remedy(reason.text) for reason in record.reasons]
    cause = "; ".join(dict.fromkeys(what for what, _ in parts)) or "it left no reason"
    remedies = dict.fromkeys(remedy for _, remedy in parts if remedy)
    usual = _UNFORESEEN if record.verdict is Verdict.NOT_RUN else _UNKNOWN
    return cause, "; ".join(remedies) or usual, record.case, record.case


def _name(case: str) -> str:
    """Return the name by which ``-k`` finds a case."""
    return case.partition("::")[2].partition("[")[0] or case


def _of_apis(silent: Sequence[ApiFailure]) -> Iterator[tuple[str, str, str, str]]:
    for failure in silent:
        remedy = failure.what_to_do or "see what this API answers: gdrkit facts"
        yield failure.message, remedy, f"{failure.api}: {failure.operation}", ""
