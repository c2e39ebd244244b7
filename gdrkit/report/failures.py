"""The failures of a run, with cause and remedy.

The text of a gdrkit error ends with what to do. A failure without such an ending gets a general remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.routes import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory import ApiFailure, Facts
    from gdrkit.report.record import Record
    from gdrkit.report.routes import FileStatus, RouteStatus

__all__ = ["Failure", "failures", "split_remedy"]

_MARK = ". To do: "
_UNFORESEEN = "install what is missing, or add the absence to the profile (foreseen)"
_FELL_BACK = "remove the cause and run the case again, because its transfers were not direct"
_UNKNOWN = "read the traceback below, then run the case alone: gdrkit qualify -k {name} --seed {seed}"


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure and the cases, routes or APIs that have it.

    Attributes
    ----------
    cause : str
        The cause.
    remedy : str
        What to do.
    affected : tuple of str
        The cases, routes or APIs that have this failure.
    cases : tuple of str
        For each of ``affected`` the id of the case that detected the failure; empty for an API.
    """

    cause: str
    remedy: str
    affected: tuple[str, ...]
    cases: tuple[str, ...]


def failures(
    facts: Facts, records: Sequence[Record], routes: Sequence[RouteStatus], files: Sequence[FileStatus]
) -> tuple[Failure, ...]:
    """Return the failures of a run: failed cases, routes that fell back, failed APIs. Equal causes are merged."""
    entries = [_case_failure(record) for record in records if record.is_failure]
    statuses: list[RouteStatus | FileStatus] = [*routes, *files]
    for status in statuses:
        if status.state is RouteOutcome.FELL_BACK:
            cause, remedy = split_remedy(status.cause.removesuffix(f" ({status.fallback_case})"))
            entries.append((cause, remedy or _FELL_BACK, status.name, status.fallback_case))
    entries += _api_failures(facts.failures)
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for cause, remedy, affected, case in entries:
        grouped.setdefault((cause, remedy), []).append((affected, case))
    seed = records[0].seed if records else 0
    return tuple(
        Failure(
            cause,
            remedy.format(name=_name(members[0][1]), seed=seed) if remedy == _UNKNOWN else remedy,
            tuple(affected for affected, _ in members),
            tuple(case for _, case in members),
        )
        for (cause, remedy), members in grouped.items()
    )


def split_remedy(text: str) -> tuple[str, str]:
    """Return the two parts of the text of a gdrkit error: what happened, and what to do about it."""
    cause, _, remedy = text.partition(_MARK)
    return cause, remedy


def _case_failure(record: Record) -> tuple[str, str, str, str]:
    parts = [split_remedy(reason.text) for reason in record.reasons]
    cause = "; ".join(dict.fromkeys(cause for cause, _ in parts)) or "no reason was recorded"
    remedies = dict.fromkeys(remedy for _, remedy in parts if remedy)
    default = _UNFORESEEN if record.verdict is Verdict.NOT_RUN else _UNKNOWN
    return cause, "; ".join(remedies) or default, record.case, record.case


def _name(case: str) -> str:
    """Return the name by which ``-k`` finds a case."""
    return case.partition("::")[2].partition("[")[0] or case


def _api_failures(failures: Sequence[ApiFailure]) -> Iterator[tuple[str, str, str, str]]:
    for failure in failures:
        remedy = failure.what_to_do or "run `gdrkit facts` to see what the API reports"
        yield failure.message, remedy, f"{failure.api}: {failure.operation}", ""
