"""The list of failures in the report of a run, each with its cause and a remedy.

The text of a gdrkit error is a cause, optionally followed by ". To do: " and a remedy. If the error has no remedy, the
failure gets a general remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.inventory import rule_of
from gdrkit.report.record import Verdict
from gdrkit.report.routes import RouteOutcome, file_statuses, route_statuses
from gdrkit.text import single_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory import ApiFailure, Facts
    from gdrkit.report.record import Record
    from gdrkit.report.routes import FileStatus, RouteStatus

__all__ = ["Failure", "describe_failures", "failures", "split_remedy"]

_REMEDY_MARK = ". To do: "
_REMEDY_FOR_UNFORESEEN_ABSENCE = "install what is missing, or declare in the profile that its absence is foreseen"
# The code of the doctor rule whose remedy a cause without a remedy gets. The first pattern that the cause contains
# applies.
_RULE_CODE_BY_CAUSE_PATTERN = (
    (re.compile(r"ID_FS_USAGE|udev"), "udev-database"),
    (re.compile(r"nvidia.fs", re.IGNORECASE), "nvidia-fs-absent"),
    (re.compile(r"compat", re.IGNORECASE), "cufile-compat"),
    (re.compile(r"O_DIRECT|direct I/O"), "direct-io"),
    (re.compile(r"peermem|peer memory"), "no-registration-route"),
)
_REMEDY_FOR_FALLBACK = "remove the cause and run the case again, because its transfers were not direct"
_REMEDY_FOR_UNKNOWN_CAUSE = (
    "read the traceback of the case in the report, then run the case alone: gdrkit qualify -k {name} --seed {seed}"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One cause of failure, and the cases, routes or APIs that failed for it.

    Attributes
    ----------
    cause : str
        The cause as text, without the remedy.
    remedy : str
        What to do, as text.
    affected : tuple of str
        The cases, routes or APIs that have this failure.
    cases : tuple of str
        For each item of ``affected`` the id of the case that detected the failure. Empty for an API.
    """

    cause: str
    remedy: str
    affected: tuple[str, ...]
    cases: tuple[str, ...]


def failures(
    facts: Facts, records: Sequence[Record], routes: Sequence[RouteStatus], files: Sequence[FileStatus]
) -> tuple[Failure, ...]:
    """Return the failures of a run: failed cases, routes that fell back, and APIs that could not be used.

    Failures with the same cause and remedy are merged.
    """
    # Each entry is (cause, remedy, affected case, route or API, id of the case that detected it).
    failure_entries = [_make_case_entry(record) for record in records if record.is_failure]
    statuses: list[RouteStatus | FileStatus] = [*routes, *files]
    for status in statuses:
        if status.state is RouteOutcome.FELL_BACK:
            cause, remedy = split_remedy(status.cause.removesuffix(f" ({status.fallback_case})"))
            failure_entries.append((cause, remedy or _find_fallback_remedy(cause), status.name, status.fallback_case))
    failure_entries += _make_api_entries(facts.failures)
    affected_by_cause_and_remedy: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for cause, remedy, affected, case in failure_entries:
        affected_by_cause_and_remedy.setdefault((cause, remedy), []).append((affected, case))
    seed = records[0].seed if records else 0
    return tuple(
        Failure(
            cause,
            remedy.format(name=_parse_filter_name(affected_and_cases[0][1]), seed=seed)
            if remedy == _REMEDY_FOR_UNKNOWN_CAUSE
            else remedy,
            tuple(affected for affected, _ in affected_and_cases),
            tuple(case for _, case in affected_and_cases),
        )
        for (cause, remedy), affected_and_cases in affected_by_cause_and_remedy.items()
    )


def describe_failures(facts: Facts, records: Sequence[Record]) -> tuple[str, ...]:
    """Return one line for each cause of failure: the cause, what it affects, and what to do."""
    lines = []
    for failure in failures(facts, records, route_statuses(facts, records), file_statuses(facts, records)):
        others_text = f" and {len(failure.affected) - 1} more" if len(failure.affected) > 1 else ""
        lines.append(single_line(f"FAIL {failure.cause} ({failure.affected[0]}{others_text}). To do: {failure.remedy}"))
    return tuple(lines)


def split_remedy(text: str) -> tuple[str, str]:
    """Split the text of a gdrkit error into the cause and the remedy. The remedy is empty if the text has none."""
    cause, _, remedy = text.partition(_REMEDY_MARK)
    return cause, remedy


def _find_fallback_remedy(cause: str) -> str:
    """Return the remedy of the doctor's rule about this cause, or a general one."""
    code = next((code for pattern, code in _RULE_CODE_BY_CAUSE_PATTERN if pattern.search(cause)), None)
    return _REMEDY_FOR_FALLBACK if code is None else f"{rule_of(code).remedy} (gdrkit explain {code})"


def _make_case_entry(record: Record) -> tuple[str, str, str, str]:
    causes_and_remedies = [split_remedy(reason.text) for reason in record.reasons]
    cause = "; ".join(dict.fromkeys(cause for cause, _ in causes_and_remedies)) or "no reason was recorded"
    remedies = dict.fromkeys(remedy for _, remedy in causes_and_remedies if remedy)
    default_remedy = _REMEDY_FOR_UNFORESEEN_ABSENCE if record.verdict is Verdict.NOT_RUN else _REMEDY_FOR_UNKNOWN_CAUSE
    return cause, "; ".join(remedies) or default_remedy, record.case, record.case


def _parse_filter_name(case: str) -> str:
    """Return the name of the test function in a case id, as an argument for ``gdrkit qualify -k``."""
    return case.partition("::")[2].partition("[")[0] or case


def _make_api_entries(api_failures: Sequence[ApiFailure]) -> Iterator[tuple[str, str, str, str]]:
    for failure in api_failures:
        remedy = failure.what_to_do or "run `gdrkit facts` to see what the API reports"
        yield failure.message, remedy, f"{failure.api}: {failure.operation}", ""
