"""Comparison of two runs: numbers, verdicts and routes that became worse.

Numbers are compared case by case, and only if both runs had the same substrate. The duration of a software twin says
something about the code, and cannot be compared with a number of hardware. For numbers that are not those of hardware
only the change is shown, never the value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.report.figure import format_number
from gdrkit.report.noise import judge, sample
from gdrkit.report.record import Record, Verdict
from gdrkit.report.routes import RouteState, file_statuses, route_statuses
from gdrkit.report.sweep import is_shown, measured_apis, split_number
from gdrkit.text import escape_controls

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gdrkit.report.contents import Contents
    from gdrkit.report.routes import FileStatus, RouteStatus

__all__ = ["Change", "Comparison", "compare", "describe_comparison"]

SCHEMA_VERSION = 1

# The verdicts are ordered from good to bad. A case that did not run showed nothing, which is better than a failure.
_VERDICTS = (Verdict.PASS, Verdict.UNPROVEN, Verdict.NOT_RUN, Verdict.FAIL)
_STATES = (RouteState.PROVEN, RouteState.UNPROVEN, RouteState.NOT_POSSIBLE, RouteState.FELL_BACK)
_SHOWN_MAX = 40


@dataclass(frozen=True, slots=True)
class Change:
    """One number, verdict or route that both runs have, and how it changed.

    Attributes
    ----------
    kind : str
        Type of the change: ``number``, ``verdict`` or ``route``.
    name : str
        The case and the number, the case, or the route.
    outcome : str
        ``worse``, ``better``, ``same`` (within the noise), ``changed`` (neither direction is better), ``gone`` or
        ``not_comparable``.
    before, after : str
        The values, as text that may be shown.
    change_percent, band_percent : float or None
        The relative change of a number, and the relative change that counts as noise.
    origins : tuple of str
        The records of both runs.
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
    """The result of the comparison of two runs."""

    schema_version: int
    noise_percent: float
    same_machine: bool
    changes: tuple[Change, ...]

    @property
    def is_worse(self) -> bool:
        """Whether anything is worse or gone."""
        return any(change.outcome in ("worse", "gone") for change in self.changes)

    def to_json(self) -> str:
        """Return indented JSON in ASCII, as names from other machines may contain terminal control characters."""
        data = serialization.to_json_data(self)
        document = dict(data) if isinstance(data, dict) else {}
        document["is_worse"] = self.is_worse
        return json.dumps(document, indent=2) + "\n"


def compare(before: Contents, after: Contents, *, noise_percent: float) -> Comparison:
    """Compare two runs.

    Parameters
    ----------
    before, after : Contents
        The runs.
    noise_percent : float
        A change up to this percentage counts as none, however exact the numbers seem to be.
    """
    one, other = _by_case(before), _by_case(after)
    changes = [*_verdicts(one, other), *_numbers(one, other, noise_percent), *_routes(before, after)]
    return Comparison(
        schema_version=SCHEMA_VERSION,
        noise_percent=noise_percent,
        same_machine=_machine(before) == _machine(after),
        changes=tuple(changes),
    )


def describe_comparison(found: Comparison) -> str:
    """Return the comparison as text for a terminal, with what is worse first."""
    lines = [] if found.same_machine else ["the two runs are of different machines, or of different set-ups of one", ""]
    for outcome in ("worse", "gone", "not_comparable", "changed", "better"):
        members = [change for change in found.changes if change.outcome == outcome]
        if members:
            lines.append(f"{outcome.replace('_', ' ')} ({len(members)})")
            lines += [f"  {escape_controls(_line(change))}" for change in members[:_SHOWN_MAX]]
            if len(members) > _SHOWN_MAX:
                lines.append(f"  and {len(members) - _SHOWN_MAX} more: --json has all")
    numbers = [change for change in found.changes if change.kind == "number"]
    within = sum(change.outcome == "same" for change in numbers)
    lines.append(f"{within} of {len(numbers)} numbers are within their noise (at least {found.noise_percent:g} %)")
    lines.append("something became worse" if found.is_worse else "nothing became worse")
    return "\n".join(lines)


def _line(change: Change) -> str:
    moved = (
        "" if change.change_percent is None else f" {change.change_percent:+.1f} % (noise {change.band_percent:.1f} %)"
    )
    values = f" {change.before} -> {change.after}" if change.before or change.after else ""
    return f"{change.name}:{values}{moved}" + (f"  [{', '.join(change.origins)}]" if change.origins else "")


def _by_case(contents: Contents) -> dict[str, list[tuple[Record, str]]]:
    found: dict[str, list[tuple[Record, str]]] = {}
    for record, origin in zip(contents.records, contents.origins, strict=True):
        found.setdefault(record.case, []).append((record, origin))
    return found


def _verdicts(one: dict[str, list[tuple[Record, str]]], other: dict[str, list[tuple[Record, str]]]) -> Iterator[Change]:
    for case, members in one.items():
        was = _worst(record.verdict for record, _ in members)
        origins = tuple(origin for _, origin in members)
        if case not in other:
            # A case that did not run in the first run is not reported as gone.
            if was is not Verdict.NOT_RUN:
                yield Change("verdict", case, "gone", was.value, "", origins=origins)
            continue
        now = _worst(record.verdict for record, _ in other[case])
        if was is not now:
            outcome = "worse" if _VERDICTS.index(now) > _VERDICTS.index(was) else "better"
            origins += tuple(origin for _, origin in other[case])
            yield Change("verdict", case, outcome, was.value, now.value, origins=origins)


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_VERDICTS.index)


def _numbers(
    one: dict[str, list[tuple[Record, str]]], other: dict[str, list[tuple[Record, str]]], noise_percent: float
) -> Iterator[Change]:
    for case in [case for case in one if case in other]:
        before, after = one[case], other[case]
        names = dict.fromkeys(name for record, _ in before for name in record.numbers)
        for name in names:
            number = split_number(name)
            if number.statistic not in ("", "median") or number.is_bound or _is_aside(name):
                continue
            if any(name in record.numbers for record, _ in after):
                yield _number(case, name, before, after, noise_percent)


def _is_aside(name: str) -> bool:
    """Return whether a number describes how another number was measured, and is not a measurement itself."""
    return name == "rounds_count" or name.endswith("spread_percent")


def _number(
    case: str,
    name: str,
    before: Sequence[tuple[Record, str]],
    after: Sequence[tuple[Record, str]],
    noise_percent: float,
) -> Change:
    label = f"{case} {name}"
    origins = tuple(origin for _, origin in (*before, *after))
    beneath = [{_beneath(record) for record, _ in members} for members in (before, after)]
    if beneath[0] != beneath[1] or len(beneath[0]) > 1:
        said = [" and ".join(sorted(" ".join(it) or "nothing" for it in members)) for members in beneath]
        return Change("number", label, "not_comparable", f"on {said[0]}", f"on {said[1]}", origins=origins)
    was, now = (sample(name, [record.numbers for record, _ in members]) for members in (before, after))
    found = judge(name, was, now, noise_percent=noise_percent)
    is_hardware = all(is_shown(record) for record, _ in (*before, *after))
    shown = [format_number(value) for value in (was.value, now.value)] if is_hardware else ["", ""]
    moved, band = round(found.change_percent, 3), round(found.band_percent, 3)
    return Change("number", label, found.outcome, shown[0], shown[1], moved, band, origins)


def _beneath(record: Record) -> tuple[str, ...]:
    apis = measured_apis(record)
    return tuple(f"{api}={record.substrate.get(api, 'unknown')}" for api in sorted(apis))


def _routes(before: Contents, after: Contents) -> Iterator[Change]:
    def states(contents: Contents) -> dict[str, RouteState]:
        found: list[RouteStatus | FileStatus] = [*route_statuses(contents.facts, contents.records)]
        found += file_statuses(contents.facts, contents.records)
        return {it.name: it.state for it in found}

    one, other = states(before), states(after)
    for name, was in one.items():
        now = other.get(name)
        if now is None:
            if was is RouteState.PROVEN:
                yield Change("route", name, "gone", was.value, "")
        elif now is not was:
            outcome = "worse" if _STATES.index(now) > _STATES.index(was) else "better"
            yield Change("route", name, outcome, was.value, now.value)


def _machine(contents: Contents) -> tuple[str | None, str, tuple[str, ...]]:
    devices = contents.facts.cuda.devices if contents.facts.cuda else ()
    run = contents.run
    return run.host_id, run.profile, tuple(device.name for device in devices)
