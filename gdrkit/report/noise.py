"""Decision whether two measured numbers differ by more than their noise, for comparisons of runs and of hosts.

A case measures a number in several rounds and records the median, the number of rounds and their spread. The number of
rounds and the spread give the standard error of the median. A difference is noise if it is at most three standard
errors of the difference, or at most the limit that the caller passes. The larger of these two limits is called the
noise band.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.sweep import parse_number_name
from gdrkit.verdict import NOISE_PERCENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NumberChange", "Sample", "compare_samples", "make_sample", "median_sample"]

# Width of the noise band in standard errors of the difference.
_BAND_STANDARD_ERRORS = 3.0
# For a normal distribution, the quartiles are 1.349 standard deviations apart. The standard error of a median is 1.2533
# times the standard error of a mean.
_QUARTILE_DISTANCE = 1.349
_MEDIAN_ERROR_FACTOR = 1.2533
# One round, or one record, shows no spread.
_ROUNDS_MIN = 2
# Largest percentage in a result. A division by a small number gives more, up to infinity, which JSON cannot represent.
_PERCENT_MAX = 1e9


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of one side of a comparison.

    Attributes
    ----------
    value : float
        The median over the records that have the number.
    error_percent : float
        The standard error of ``value``, in percent of ``value``. It is 0 if the error is unknown.
    """

    value: float
    error_percent: float


@dataclass(frozen=True, slots=True)
class NumberChange:
    """The change of a number from one side of a comparison to the other.

    Attributes
    ----------
    outcome : str
        ``worse``, ``better``, ``same`` (within the noise) or ``changed`` (neither direction is better).
    change_percent : float
        The relative change, at most 10**9. It is 10**9 for a change from 0.
    band_percent : float
        The largest relative change that counts as noise, at most 10**9.
    """

    outcome: str
    change_percent: float
    band_percent: float


def compare_samples(
    number_name: str, before: Sample, after: Sample, *, noise_percent: float = NOISE_PERCENT
) -> NumberChange:
    """Compare a number before and after a change. The unit in its name shows whether more or less is better.

    A change up to `noise_percent` always counts as noise.
    """
    change_percent = _compute_change_percent(before.value, after.value)
    band_percent = max(
        noise_percent, _clamp_percent(_BAND_STANDARD_ERRORS * math.hypot(before.error_percent, after.error_percent))
    )
    better_sign = parse_number_name(number_name).better_sign
    if abs(change_percent) <= band_percent:
        outcome = "same"
    elif not better_sign:
        outcome = "changed"
    else:
        outcome = "better" if change_percent * better_sign > 0 else "worse"
    return NumberChange(outcome, change_percent, band_percent)


def median_sample(samples: Sequence[Sample]) -> Sample:
    """Return the median of the samples of several machines, with a standard error from the rounds on each machine.

    Differences between machines do not increase this error, because the comparison looks for such differences.
    """
    error_percent = statistics.median(sample.error_percent for sample in samples) / math.sqrt(len(samples))
    return Sample(statistics.median(sample.value for sample in samples), error_percent)


def make_sample(number_name: str, numbers_of_records: Sequence[Mapping[str, float]]) -> Sample:
    """Return the number `number_name` from one or more records of a case, with its standard error.

    Several records are independent runs. The error is then the larger of two: the error from the differences between
    the runs, and the error from the rounds in each run.
    """
    matching_numbers = [record_numbers for record_numbers in numbers_of_records if number_name in record_numbers]
    values = [record_numbers[number_name] for record_numbers in matching_numbers]
    value = statistics.median(values)
    rounds_error_percent = statistics.median(
        _compute_standard_error(number_name, record_numbers) for record_numbers in matching_numbers
    )
    if len(values) < _ROUNDS_MIN or value == 0:
        return Sample(value, rounds_error_percent)
    try:
        records_error_percent = (
            statistics.stdev(values) / abs(value) * 100 * _MEDIAN_ERROR_FACTOR / math.sqrt(len(values))
        )
    except OverflowError:
        records_error_percent = math.inf
    return Sample(value, max(records_error_percent, rounds_error_percent / math.sqrt(len(values))))


def _compute_change_percent(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return _PERCENT_MAX if before == 0 else _clamp_percent((after - before) / abs(before) * 100)


def _clamp_percent(percent: float) -> float:
    """Limit a percentage to the range that JSON can represent."""
    return max(-_PERCENT_MAX, min(_PERCENT_MAX, percent))


def _compute_standard_error(number_name: str, numbers: Mapping[str, float]) -> float:
    """Return the standard error of the median `number_name` in percent, from other numbers of the same record.

    For ``rate_gb_per_s_median`` these are ``rate_spread_percent``, the distance between the quartiles, and
    ``rounds_count``.
    """
    name_parts = parse_number_name(number_name)
    spread_percent = numbers.get("_".join(filter(None, (name_parts.base, "spread_percent"))))
    round_count = numbers.get("rounds_count", 1.0)
    if spread_percent is None or round_count < _ROUNDS_MIN:
        return 0.0
    return _MEDIAN_ERROR_FACTOR * spread_percent / _QUARTILE_DISTANCE / math.sqrt(round_count)
