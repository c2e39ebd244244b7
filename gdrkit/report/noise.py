"""How far two numbers must be apart before one of them is believed to be worse.

Level 5, pure. What a case keeps beside a median (its rounds, their spread or their least and most) says how exact that
median is; the band is three standard errors of the difference, and never less than what the caller calls noise.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.sweep import split_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Sample", "band_percent", "change_percent", "sample"]

_ERRORS = 3.0
# Of a normal distribution: quartiles are this many standard deviations apart, and a median is this much less exact than
# a mean.
_QUARTILES = 1.349
_MEDIAN = 1.2533
_ROUNDS_MIN = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of one side of a comparison.

    Attributes
    ----------
    value : float
        The median over the records that have it.
    error_percent : float
        Its standard error beside it; 0 where nothing says how exact it is.
    """

    value: float
    error_percent: float


def sample(name: str, numbers: Sequence[Mapping[str, float]]) -> Sample:
    """What the numbers of one or more records of a case say of the number `name`.

    Several records are runs of their own, so their scatter counts beside that of the rounds of each.
    """
    values = [found[name] for found in numbers if name in found]
    value = statistics.median(values)
    inner = statistics.median(_error_of_rounds(name, found) for found in numbers if name in found)
    if len(values) < _ROUNDS_MIN or value == 0:
        return Sample(value, inner)
    scatter = statistics.stdev(values) / abs(value) * 100 * _MEDIAN / math.sqrt(len(values))
    return Sample(value, max(scatter, inner / math.sqrt(len(values))))


def change_percent(before: float, after: float) -> float:
    """From one value to the other; infinite from 0 to anything."""
    if before == after:
        return 0.0
    return math.inf if before == 0 else (after - before) / abs(before) * 100


def band_percent(before: Sample, after: Sample, *, noise_percent: float) -> float:
    """How large a change is no change."""
    return max(noise_percent, _ERRORS * math.hypot(before.error_percent, after.error_percent))


def _error_of_rounds(name: str, numbers: Mapping[str, float]) -> float:
    """The standard error of a median, from what stands beside it: ``rate_gb_per_s_median`` has
    ``rate_spread_percent`` (between the quartiles) and ``rounds_count``.
    """
    number = split_number(name)
    spread = numbers.get("_".join(filter(None, (number.base, "spread_percent"))))
    rounds = numbers.get("rounds_count", 1.0)
    if spread is None or rounds < _ROUNDS_MIN:
        return 0.0
    return _MEDIAN * spread / _QUARTILES / math.sqrt(rounds)
