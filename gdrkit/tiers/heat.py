"""The heat of a file: its accesses, weighted by age.

The heat of a file is the number of its accesses, where each access loses half of its weight per half-life. The
catalogue stores a *score*: the logarithm of the heat plus the time at which it was computed, in half-lives. The score
does not change while time passes. So nothing has to be written to let files cool, and the order of the scores is always
the order of the heat.

All times are in half-lives since 1970, by the clock of :class:`gdrkit.tiers.catalogue.Catalogue`, which does not follow
backward steps of the host's clock.
"""

from __future__ import annotations

import math

__all__ = ["NEVER", "heat", "score_after", "score_least", "score_of"]

# The score of a file without accesses.
NEVER = -math.inf
# If two terms differ by more than this power of two, their sum as a double is the larger term.
_PRECISION_BITS = 60.0
# The largest power of two that `heat` computes, below the overflow of a double.
_EXPONENT_MAX = 1000.0


def score_of(heat_count: float, *, at: float) -> float:
    """Return the score of a file that has this heat, in fresh accesses, at the time `at`."""
    return math.log2(heat_count) + at if heat_count > 0 else NEVER


def heat(score: float, *, at: float) -> float:
    """Return the heat of a file at the time `at`, in fresh accesses."""
    return 2.0 ** min(score - at, _EXPONENT_MAX) if score != NEVER else 0.0


def score_after(score: float, *, accesses: int, at: float) -> float:
    """Return the score of a file after that many more accesses at the time `at`."""
    exponent = score - at
    if exponent > _PRECISION_BITS:
        return score
    return math.log2(2.0**exponent + accesses) + at


def score_least(accesses_min: int, *, at: float, share: float = 1.0) -> float:
    """Return the least score of a file that is as hot as `accesses_min` fresh accesses, or as a `share` of them.

    Accesses are whole numbers, so the threshold is half an access lower: the hundredth access makes a file as hot as a
    hundred accesses, although the first one has lost a little weight by then.
    """
    return score_of(accesses_min * share - 0.5, at=at) if accesses_min > 0 else NEVER
