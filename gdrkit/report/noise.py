"""How far two numbers must be apart before one of them is believed to be worse.

Level 5, pure. What a case keeps beside a median (its rounds, their spread or their least and most) says how exact that
median is; the band is three standard errors of the difference, and never less than what the caller calls noise. Two
runs and the hosts of a fleet are judged here, and nowhere else.
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

__all__ = ["Moved", "Sample", "judge", "sample", "usual"]

_ERRORS = 3.0
# Of a normal distribution: quartiles are this many standard deviations apart, and a median is this much less exact than
# a mean.
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
        The median over the records that have it.
    error_percent : float
        Its standard error beside it; 0 where nothing says how exact it is.
    """

    value: float
    error_percent: float


@dataclass(frozen=True, slots=True)
class Moved:
    """How a number of one side is beside that of another.

    Attributes
    ----------
    outcome : str
        ``worse``, ``better``, ``same`` (within the noise) or ``changed`` (neither direction is better).
    change_percent : float
        How far it moved; 10**9 for more than that, and from 0 to anything.
    band_percent : float
        How far it may move without a meaning; 10**9 at most.
    """

    outcome: str
    change_percent: float
    band_percent: float


def judge(name: str, before: Sample, after: Sample, *, noise_percent: float = NOISE_PERCENT) -> Moved:
    """Judge the number `name` of `after` beside that of `before`; a change up to `noise_percent` is none, however exact
    both seem to be.
    """
    moved = _change_percent(before.value, after.value)
    band = max(noise_percent, _bounded(_ERRORS * math.hypot(before.error_percent, after.error_percent)))
    better = split_number(name).better
    outcome = "same" if abs(moved) <= band else "changed" if not better else "better" if moved * better > 0 else "worse"
    return Moved(outcome, moved, band)


def usual(samples: Sequence[Sample]) -> Sample:
    """What most of several machines have: their median, as exact as their rounds make it.

    How far the machines are apart is what is looked for, and does not widen the band.
    """
    error = statistics.median(one.error_percent for one in samples) / math.sqrt(len(samples))
    return Sample(statistics.median(one.value for one in samples), error)


def sample(name: str, numbers: Sequence[Mapping[str, float]]) -> Sample:
    """What the numbers of one or more records of a case say of the number `name`.

    Several records are runs of their own, so their scatter counts beside that of the rounds of each.
    """
    values = [found[name] for found in numbers if name in found]
    value = statistics.median(values)
    inner = statistics.median(_error_of_rounds(name, found) for found in numbers if name in found)
    if len(values) < _ROUNDS_MIN or value == 0:
        return Sample(value, inner)
    try:
        scatter = statistics.stdev(values) / abs(value) * 100 * _MEDIAN / math.sqrt(len(values))
    except OverflowError:
        scatter = math.inf
    return Sample(value, max(scatter, inner / math.sqrt(len(values))))


def _change_percent(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return _PERCENT_MAX if before == 0 else _bounded((after - before) / abs(before) * 100)


def _bounded(percent: float) -> float:
    """What JSON has a form for."""
    return max(-_PERCENT_MAX, min(_PERCENT_MAX, percent))


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
