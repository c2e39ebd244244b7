"""The table of measured numbers in the report page: each quantity with its unit, its limit and the source of the limit.

A quantity that was measured at several sizes or depths has one row, with the best value and where it was reached. The
plots of the page show the other values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.figure import format_three_digits
from gdrkit.report.limits import link_limit
from gdrkit.report.sweep import describes_hardware, parse_depth, parse_number_name, parse_parameters
from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record

__all__ = ["Bound", "Measurement", "case_title", "measurements", "number_words", "to_words"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A value with which a measurement is compared.

    Attributes
    ----------
    relation : str
        ``at least`` or ``at most``.
    value : str
        The bound with three significant digits, in the unit of the measurement.
    source : str
        Where the bound comes from, in words.
    is_met : bool
        Whether the measurement is within the bound.
    used_share : float
        The part of the bound that the measurement uses: 1 exactly at the bound, more if the bound is not met.
    """

    relation: str
    value: str
    source: str
    is_met: bool
    used_share: float


def _make_bound(relation: str, bound: float, source: str, measured_value: float, *, is_met: bool) -> Bound:
    part, whole = (measured_value, bound) if relation == "at most" else (bound, measured_value)
    used_share = part / whole if whole > 0 else float(not is_met)
    return Bound(relation, format_three_digits(bound), source, is_met, used_share)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the table.

    Attributes
    ----------
    group : str
        What the case does, in words.
    quantity : str
        The quantity, and the size or depth at which the value was reached, in words. Empty if the case has only one
        number.
    value, unit : str
        The value with three significant digits, and its unit.
    range_text : str
        The lowest and the highest round. Empty if the record does not have them.
    bounds : tuple of Bound
        The bounds with which the case compared the value. If there are none, the limit of the links, if it is known.
    case : str
        The case that measured the value.
    """

    group: str
    quantity: str
    value: str
    unit: str
    range_text: str
    bounds: tuple[Bound, ...]
    case: str


# Words that people write in capitals, and O_DIRECT with its underscore.
_CAPITALIZED_WORDS = re.compile(r"\b(?:cpu|dram|gpu|iops|nic|numa|o direct|rdma)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A measured value that a row may show. ``size_or_depth`` is in words, such as ``at depth 16``."""

    value: float
    size_or_depth: str
    number_name: str
    record: Record


def measurements(records: Iterable[Record], facts: Facts) -> tuple[Measurement, ...]:
    """Return a row for each quantity that was measured on hardware and for which more, or less, is better.

    The rows are in three parts: rows that miss a bound, rows that meet their bounds, and rows without a bound. Within a
    part, the rows of a group are adjacent, and the group that is nearest to a bound comes first.
    """
    best_candidates: dict[tuple[str, str, str], _Candidate] = {}
    for record in records:
        for group, quantity, candidate in _list_candidates(record) if describes_hardware(record) else ():
            name_parts = parse_number_name(candidate.number_name)
            best_candidate = best_candidates.get((group, quantity, name_parts.unit))
            if best_candidate is None or (candidate.value - best_candidate.value) * name_parts.better_sign > 0:
                best_candidates[group, quantity, name_parts.unit] = candidate
    rows = [
        _make_measurement(group, quantity, candidate, facts)
        for (group, quantity, _), candidate in best_candidates.items()
    ]
    share_by_group: dict[tuple[int, str], float] = {}
    for row in rows:
        rank_and_group = (_rank_by_bounds(row), row.group)
        share_by_group[rank_and_group] = max(share_by_group.get(rank_and_group, 0.0), _find_largest_used_share(row))
    # The sort is stable: groups with the same share remain in the order of the records.
    sorted_groups = sorted(
        share_by_group, key=lambda rank_and_group: (rank_and_group[0], -share_by_group[rank_and_group])
    )
    position_by_group = {rank_and_group: index for index, rank_and_group in enumerate(sorted_groups)}
    return tuple(
        sorted(
            rows, key=lambda row: (position_by_group[_rank_by_bounds(row), row.group], -_find_largest_used_share(row))
        )
    )


def _rank_by_bounds(row: Measurement) -> int:
    """Return 0 for a row with a bound that is not met, 1 for one whose bounds are met, and 2 for one without bounds."""
    return int(all(bound.is_met for bound in row.bounds)) + int(not row.bounds)


def _find_largest_used_share(row: Measurement) -> float:
    return max((bound.used_share for bound in row.bounds), default=0.0)


def _list_candidates(record: Record) -> Iterator[tuple[str, str, _Candidate]]:
    """Yield each number of a record that a row can show, with the group and the quantity of that row."""
    for number_name, value in record.numbers.items():
        name_parts = parse_number_name(number_name)
        if name_parts.statistic not in ("", "median", "p50") or not name_parts.better_sign or name_parts.is_bound:
            continue
        quantity, size_or_depth = number_words(record.case, number_name)
        yield case_title(record.case), quantity, _Candidate(value, size_or_depth, number_name, record)


def number_words(case: str, number_name: str) -> tuple[str, str]:
    """Return the quantity of a number, and the size or depth at which it was measured, as words. Both may be empty."""
    size_bytes, parameters = parse_parameters(case)
    base, depth = parse_depth(parse_number_name(number_name).base)
    size_or_depth = f"at depth {depth}" if depth else f"at {format_bytes(size_bytes)}" if size_bytes else ""
    # The word "rate" is left out, because the unit already shows that the number is a rate.
    text_parts = (*map(to_words, parameters), "" if base == "rate" else to_words(base))
    return ", ".join(filter(None, text_parts)), size_or_depth


def _make_measurement(group: str, quantity: str, candidate: _Candidate, facts: Facts) -> Measurement:
    numbers, number_name = candidate.record.numbers, candidate.number_name
    base_name = number_name.removesuffix(f"_{parse_number_name(number_name).statistic}")
    lowest, highest = numbers.get(f"{base_name}_min"), numbers.get(f"{base_name}_max")
    range_text = ""
    if lowest is not None and highest is not None:
        range_text = f"{format_three_digits(lowest)} to {format_three_digits(highest)}"
    return Measurement(
        group=group,
        quantity=f"{quantity} {candidate.size_or_depth}".strip(),
        value=format_three_digits(candidate.value),
        unit=parse_number_name(number_name).unit_words,
        range_text=range_text,
        bounds=tuple(_list_bounds(candidate, facts)),
        case=candidate.record.case,
    )


def _list_bounds(candidate: _Candidate, facts: Facts) -> Iterator[Bound]:
    """Yield the bounds with which the case compared the number, or else the limit of the links in the facts."""
    # The evidence "judged" is the list of the comparisons of a number with a bound.
    comparisons = candidate.record.evidence.get("judged")
    has_comparisons = False
    for comparison in comparisons if isinstance(comparisons, list) else ():
        if not isinstance(comparison, dict) or comparison.get("number") != candidate.number_name:
            continue
        bound, text = comparison.get("bound"), comparison.get("text")
        if isinstance(bound, int | float) and not isinstance(bound, bool) and isinstance(text, str):
            has_comparisons, is_met = True, comparison.get("verdict") != "fail"
            # A comparison does not say whether its bound is a minimum. A bound that is met is a minimum if the value is
            # above it.
            relation = "at least" if (bound <= candidate.value) is is_met else "at most"
            source = text.partition("; ")[2] or text
            yield _make_bound(relation, bound, source, candidate.value, is_met=is_met)
    limit = None if has_comparisons else link_limit(candidate.record, facts)
    if limit is not None and parse_number_name(candidate.number_name).unit == "gb_per_s":
        is_met = candidate.value <= limit.gb_per_s
        yield _make_bound("at most", limit.gb_per_s, limit.source, candidate.value, is_met=is_met)


def case_title(case: str) -> str:
    """Return the name of the test function of a case as words, without the parameters: ``Pinned copy``."""
    text = to_words(case.rpartition("::")[2].partition("[")[0].removeprefix("test_"))
    return text[:1].upper() + text[1:]


def to_words(identifier: str) -> str:
    """Return an identifier, or a parameter such as ``Direction.WRITE``, as words."""
    enumeration, dot, member = identifier.partition(".")
    text = member.lower() if dot and enumeration[:1].isupper() and member.isupper() else identifier
    words = text.replace("_", " ").strip()
    return _CAPITALIZED_WORDS.sub(lambda match: match[0].upper().replace(" ", "_"), words)
