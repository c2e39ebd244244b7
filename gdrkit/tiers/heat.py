"""The heat of a file: its accesses, weighted by age.

The heat of a file is the number of its accesses, where each access loses half of its weight per half-life. The
catalogue stores a *score*: the logarithm of the heat plus the time at which it was computed, in half-lives. The score
does not change while time passes. So nothing has to be written to let files cool, and the order of the scores is always
the order of the heat.

Time never goes backwards: the clock of :class:`gdrkit.tiers.catalogue.Catalogue` does not follow backward steps of
the host's clock.
"""

from __future__ import annotations

import math

__all__ = ["NEVER", "heat", "score_after", "score_least", "score_of"]

# The score of a file that was never used.
NEVER = -math.inf
# Beyond this difference the smaller term is lost in the precision of a double.
_BITS = 60.0


def score_of(heat_count: float, *, at: float) -> float:
    """Return the score of a file that has this heat now; `at` is the current time in half-lives."""
    return math.log2(heat_count) + at if heat_count > 0 else NEVER


def heat(score: float, *, at: float) -> float:
    """Return the current heat of a file, in fresh accesses."""
    return 2.0 ** min(score - at, 1000.0) if score != NEVER else 0.0


def score_after(score: float, *, accesses: int, at: float) -> float:
    """Return the score after so many accesses now."""
    before = score - at
    # If two terms differ by more than the precision of a double, the larger one is the sum.
    if before > _BITS:
        return score
    return math.log2(2.0**before + accesses) + at


def score_least(accesses_min: int, *, at: float, share: float = 1.0) -> float:
    """Return the least score of a file that is as hot as `accesses_min` fresh accesses, or a `share` of them.

    Accesses are whole numbers, so the heat is rounded: the hundredth access makes a file as hot as a hundred accesses,
    although the first one has faded a little by then.
    """
    return score_of(accesses_min * share - 0.5, at=at) if accesses_min > 0 else NEVER
