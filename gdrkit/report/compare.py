"""Comparison of two runs (``gdrkit compare``): the numbers, verdicts and routes that became worse or better.

A number is compared only if both runs measured it on the same substrate: on hardware, on software in the kernel, or on
a software twin (a library that emulates the hardware below an API). For numbers of software, the result has only the
change in percent, because their values say nothing about a machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.report.figure import format_number
from gdrkit.report.noise import compare_samples, make_sample
from gdrkit.report.record import Record, Verdict
from gdrkit.report.routes import RouteOutcome, file_statuses, route_statuses
from gdrkit.report.sweep import describes_hardware, measured_apis, parse_number_name
from gdrkit.text import escape_controls, format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gdrkit.report.contents import RunContents
    from gdrkit.report.routes import FileStatus, RouteStatus

__all__ = ["Change", "Comparison", "compare", "describe_comparison"]

SCHEMA_VERSION = 1

# A case that did not run is ranked above a failed one, because it did not show a defect.
_VERDICTS_BEST_FIRST = (Verdict.PASS, Verdict.UNPROVEN, Verdict.NOT_RUN, Verdict.FAIL)
_ROUTE_OUTCOMES_BEST_FIRST = (
    RouteOutcome.PROVEN,
    RouteOutcome.UNPROVEN,
    RouteOutcome.NOT_POSSIBLE,
    RouteOutcome.FELL_BACK,
)
_LINES_PER_OUTCOME_MAX = 40


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one number, verdict or route from the first run to the second.

    Attributes
    ----------
    kind : str
        The compared item: ``number``, ``verdict`` or ``route``.
    name : str
        For a number, the case and the name of the number. For a verdict, the case. For a route, its name.
    outcome : str
        ``worse``, ``better``, ``same`` (within the noise), ``changed`` (by more than the noise, but neither a higher
        nor a lower value is better), ``gone`` (only the first run has this verdict or this proven route) or
        ``not_comparable``.
    before, after : str
        The values of both runs as text. For ``not_comparable`` they name the substrates, for numbers of software they
        are empty, and for ``gone``, `after` is empty.
    change_percent, band_percent : float or None
        The relative change of a number, and the largest relative change that counts as noise.
    origins : tuple of str
        File and line of the records from both runs.
    """

    kind: str
    name: str
    outcome: str
    before: str
    after: str
    change_percent: float | None = None
    band_percent: float | None = None
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of the comparison of two runs. A change of at most ``noise_percent`` always counts as noise."""

    schema_version: int
    noise_percent: float
    same_machine: bool
    changes: tuple[Change, ...]

    @property
    def is_worse(self) -> bool:
        """Whether anything is worse or gone."""
        return any(change.outcome in ("worse", "gone") for change in self.changes)

    def to_json(self) -> str:
        """Return indented JSON in ASCII. Other characters are escaped: names may contain Unicode control characters."""
        data = serialization.to_json_data(self)
        document = dict(data) if isinstance(data, dict) else {}
        document["is_worse"] = self.is_worse
        return json.dumps(document, indent=2) + "\n"


def compare(before: RunContents, after: RunContents, *, noise_percent: float) -> Comparison:
    """Compare two runs.

    Parameters
    ----------
    before, after : RunContents
        The earlier and the later run.
    noise_percent : float
        A change of a number by at most this many percent counts as noise. The limit is larger for a number whose rounds
        scatter more.
    """
    earlier_records_by_case, later_records_by_case = _group_by_case(before), _group_by_case(after)
    changes = [
        *_compare_verdicts(earlier_records_by_case, later_records_by_case),
        *_compare_numbers(earlier_records_by_case, later_records_by_case, noise_percent),
        *_compare_routes(before, after),
    ]
    return Comparison(
        schema_version=SCHEMA_VERSION,
        noise_percent=noise_percent,
        same_machine=_identify_machine(before) == _identify_machine(after),
        changes=tuple(changes),
    )


def describe_comparison(comparison: Comparison) -> str:
    """Return the comparison as text for a terminal, with the worse items first."""
    lines = []
    if not comparison.same_machine:
        lines += ["the two runs are from different machines, or from different configurations of one machine", ""]
    for outcome in ("worse", "gone", "not_comparable", "changed", "better"):
        changes = [change for change in comparison.changes if change.outcome == outcome]
        if changes:
            lines.append(f"{outcome.replace('_', ' ')} ({len(changes)})")
            lines += [f"  {escape_controls(_describe_change(change))}" for change in changes[:_LINES_PER_OUTCOME_MAX]]
            if len(changes) > _LINES_PER_OUTCOME_MAX:
                lines.append(f"  and {len(changes) - _LINES_PER_OUTCOME_MAX} more: --json lists all")
    number_changes = [change for change in comparison.changes if change.kind == "number"]
    unchanged_count = sum(change.outcome == "same" for change in number_changes)
    noise_text = f"{comparison.noise_percent:g} %"
    lines.append(
        f"{unchanged_count} of {format_count(len(number_changes), 'number')} changed by no more than the noise "
        f"(the noise of a number is at least {noise_text})"
    )
    lines.append("something became worse" if comparison.is_worse else "nothing became worse")
    return "\n".join(lines)


def _describe_change(change: Change) -> str:
    percent_text = (
        "" if change.change_percent is None else f" {change.change_percent:+.1f} % (noise {change.band_percent:.1f} %)"
    )
    values_text = f" {change.before} -> {change.after}" if change.before or change.after else ""
    return f"{change.name}:{values_text}{percent_text}" + (f"  [{', '.join(change.origins)}]" if change.origins else "")


def _group_by_case(contents: RunContents) -> dict[str, list[tuple[Record, str]]]:
    """Return the records of each case, each with its file and line."""
    records_by_case: dict[str, list[tuple[Record, str]]] = {}
    for record, origin in zip(contents.records, contents.origins, strict=True):
        records_by_case.setdefault(record.case, []).append((record, origin))
    return records_by_case


def _compare_verdicts(
    earlier_records_by_case: dict[str, list[tuple[Record, str]]],
    later_records_by_case: dict[str, list[tuple[Record, str]]],
) -> Iterator[Change]:
    for case, records_before in earlier_records_by_case.items():
        verdict_before = _find_worst_verdict(record.verdict for record, _ in records_before)
        origins = tuple(origin for _, origin in records_before)
        if case not in later_records_by_case:
            # A case that did not run before has no result that could be gone.
            if verdict_before is not Verdict.NOT_RUN:
                yield Change("verdict", case, "gone", verdict_before.value, "", origins=origins)
            continue
        verdict_after = _find_worst_verdict(record.verdict for record, _ in later_records_by_case[case])
        if verdict_before is not verdict_after:
            outcome = (
                "worse"
                if _VERDICTS_BEST_FIRST.index(verdict_after) > _VERDICTS_BEST_FIRST.index(verdict_before)
                else "better"
            )
            origins += tuple(origin for _, origin in later_records_by_case[case])
            yield Change("verdict", case, outcome, verdict_before.value, verdict_after.value, origins=origins)


def _find_worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_VERDICTS_BEST_FIRST.index)


def _compare_numbers(
    earlier_records_by_case: dict[str, list[tuple[Record, str]]],
    later_records_by_case: dict[str, list[tuple[Record, str]]],
    noise_percent: float,
) -> Iterator[Change]:
    for case in [case for case in earlier_records_by_case if case in later_records_by_case]:
        records_before, records_after = earlier_records_by_case[case], later_records_by_case[case]
        number_names = dict.fromkeys(number_name for record, _ in records_before for number_name in record.numbers)
        for number_name in number_names:
            name_parts = parse_number_name(number_name)
            if name_parts.statistic not in ("", "median") or name_parts.is_bound or _is_metadata(number_name):
                continue
            if any(number_name in record.numbers for record, _ in records_after):
                yield _compare_number(case, number_name, records_before, records_after, noise_percent)


def _is_metadata(number_name: str) -> bool:
    """Return whether a number describes how another number was measured, and is not a measurement itself."""
    return number_name == "rounds_count" or number_name.endswith("spread_percent")


def _compare_number(
    case: str,
    number_name: str,
    records_before: Sequence[tuple[Record, str]],
    records_after: Sequence[tuple[Record, str]],
    noise_percent: float,
) -> Change:
    change_name = f"{case} {number_name}"
    origins = tuple(origin for _, origin in (*records_before, *records_after))
    substrates_of_runs = [
        {_describe_substrates(record) for record, _ in records_of_run}
        for records_of_run in (records_before, records_after)
    ]
    # Several records of a case in one run may be from different substrates. Then their numbers cannot be combined.
    if substrates_of_runs[0] != substrates_of_runs[1] or len(substrates_of_runs[0]) > 1:
        substrate_texts = [
            " and ".join(sorted(" ".join(api_texts) or "nothing" for api_texts in substrates_of_run))
            for substrates_of_run in substrates_of_runs
        ]
        return Change(
            "number",
            change_name,
            "not_comparable",
            f"on {substrate_texts[0]}",
            f"on {substrate_texts[1]}",
            origins=origins,
        )
    earlier_sample, later_sample = (
        make_sample(number_name, [record.numbers for record, _ in records_of_run])
        for records_of_run in (records_before, records_after)
    )
    number_change = compare_samples(number_name, earlier_sample, later_sample, noise_percent=noise_percent)
    is_hardware = all(describes_hardware(record) for record, _ in (*records_before, *records_after))
    value_texts = (
        [format_number(sample.value) for sample in (earlier_sample, later_sample)] if is_hardware else ["", ""]
    )
    percent, band_percent = round(number_change.change_percent, 3), round(number_change.band_percent, 3)
    return Change(
        "number", change_name, number_change.outcome, value_texts[0], value_texts[1], percent, band_percent, origins
    )


def _describe_substrates(record: Record) -> tuple[str, ...]:
    apis = measured_apis(record)
    return tuple(f"{api}={record.substrate.get(api, 'unknown')}" for api in sorted(apis))


def _compare_routes(before: RunContents, after: RunContents) -> Iterator[Change]:
    def find_state_by_name(contents: RunContents) -> dict[str, RouteOutcome]:
        statuses: list[RouteStatus | FileStatus] = [*route_statuses(contents.facts, contents.records)]
        statuses += file_statuses(contents.facts, contents.records)
        return {status.name: status.state for status in statuses}

    later_state_by_name = find_state_by_name(after)
    for name, earlier_state in find_state_by_name(before).items():
        later_state = later_state_by_name.get(name)
        if later_state is None:
            if earlier_state is RouteOutcome.PROVEN:
                yield Change("route", name, "gone", earlier_state.value, "")
        elif later_state is not earlier_state:
            earlier_rank, later_rank = map(_ROUTE_OUTCOMES_BEST_FIRST.index, (earlier_state, later_state))
            outcome = "worse" if later_rank > earlier_rank else "better"
            yield Change("route", name, outcome, earlier_state.value, later_state.value)


def _identify_machine(contents: RunContents) -> tuple[str | None, str, tuple[str, ...]]:
    devices = contents.facts.cuda.devices if contents.facts.cuda else ()
    run = contents.run
    return run.host_id, run.profile, tuple(device.name for device in devices)
