"""Decision whether two numbers differ by more than their noise.

The module is pure. The numbers that a case keeps beside a median (its rounds, their spread or their minimum and
maximum) give the standard error of that median. The noise band is three standard errors of the difference, and at
least the noise that the caller states. All comparisons of runs and of hosts in a fleet use this module.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.sweep import split_number
from gdrkit.verdict import NOISE_PERCENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["NumberChange", "Sample", "compare_samples", "make_sample", "median_sample"]

_BAND_ERRORS = 3.0
# For a normal distribution, the quartiles are 1.349 standard deviations apart, and the standard error of a median is
# 1.2533 times that of a mean.
_QUARTILES = 1.349
_MEDIAN = 1.2533
_ROUNDS_MIN = 2
_PERCENT_MAX = 1e9


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of one side of a comparison.

    Attributes
    ----------
    value : float
        The median over the records that have the number.
    error_percent : float
        The standard error of that median, in percent of it; 0 if nothing shows how exact it is.
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
        The relative change; 10**9 for a larger one, and for a change from 0.
    band_percent : float
        The relative change that counts as noise; 10**9 at most.
    """

    outcome: str
    change_percent: float
    band_percent: float


def compare_samples(name: str, before: Sample, after: Sample, *, noise_percent: float = NOISE_PERCENT) -> NumberChange:
    """Compare the number `name` of `after` with that of `before`.

    A change up to `noise_percent` counts as noise, also if both numbers scatter less.
    """
    change = _change_percent(before.value, after.value)
    band = max(noise_percent, _bounded(_BAND_ERRORS * math.hypot(before.error_percent, after.error_percent)))
    better = split_number(name).better
    if abs(change) <= band:
        outcome = "same"
    elif not better:
        outcome = "changed"
    else:
        outcome = "better" if change * better > 0 else "worse"
    return NumberChange(outcome, change, band)


def median_sample(samples: Sequence[Sample]) -> Sample:
    """Return the median of several machines, with the standard error that their rounds give.

    The difference between the machines is what the comparison looks for, so it does not widen the band.
    """
    error = statistics.median(sample.error_percent for sample in samples) / math.sqrt(len(samples))
    return Sample(statistics.median(sample.value for sample in samples), error)


def make_sample(name: str, numbers: Sequence[Mapping[str, float]]) -> Sample:
    """Return the number `name` of one or more records of a case, with its standard error.

    Several records are independent runs. The error is the larger one of their scatter and that of their rounds.
    """
    with_name = [each for each in numbers if name in each]
    values = [each[name] for each in with_name]
    value = statistics.median(values)
    rounds_error = statistics.median(_error_of_rounds(name, each) for each in with_name)
    if len(values) < _ROUNDS_MIN or value == 0:
        return Sample(value, rounds_error)
    try:
        scatter = statistics.stdev(values) / abs(value) * 100 * _MEDIAN / math.sqrt(len(values))
    except OverflowError:
        scatter = math.inf
    return Sample(value, max(scatter, rounds_error / math.sqrt(len(values))))


def _change_percent(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return _PERCENT_MAX if before == 0 else _bounded((after - before) / abs(before) * 100)


def _bounded(percent: float) -> float:
    """Limit a percentage to the range that JSON can represent."""
    return max(-_PERCENT_MAX, min(_PERCENT_MAX, percent))


def _error_of_rounds(name: str, numbers: Mapping[str, float]) -> float:
    """Return the standard error of a median, from the numbers beside it.

    ``rate_gb_per_s_median`` has ``rate_spread_percent`` (between the quartiles) and ``rounds_count``.
    """
    number = split_number(name)
    spread = numbers.get("_".join(filter(None, (number.base, "spread_percent"))))
    rounds = numbers.get("rounds_count", 1.0)
    if spread is None or rounds < _ROUNDS_MIN:
        return 0.0
    return _MEDIAN * spread / _QUARTILES / math.sqrt(rounds)
