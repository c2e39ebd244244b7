"""The heat of a file: its accesses, weighted by age.

The heat of a file is the sum of the weights of its accesses. A new access has the weight 1, and an access loses half of
its weight per half-life. The catalogue stores a *score* instead of the heat: score = log2(heat) + time, with the time
in half-lives. While time passes, the heat falls and the score stays the same. So the catalogue changes only when a file
is accessed, and the order of the scores is always the order of the heat.

All times are in half-lives since 1970, by the clock of :mod:`gdrkit.tiers.database`, which does not follow backward
steps of the host's clock.
"""

from __future__ import annotations

import math

__all__ = ["NEVER_ACCESSED", "add_accesses_to_score", "heat", "least_score", "score_from_heat"]

# The score of a file without accesses.
NEVER_ACCESSED = -math.inf
# A double has 53 significant bits, so the addition of a few accesses would not change a heat above 2**60.
_LOG2_HEAT_MAX = 60.0
# Largest exponent for which `heat` computes a power of two. 2.0**1024 would overflow.
_EXPONENT_MAX = 1000.0


def score_from_heat(heat_value: float, *, at_half_lives: float) -> float:
    """Return the score of a file that has this heat at the time `at_half_lives`."""
    return math.log2(heat_value) + at_half_lives if heat_value > 0 else NEVER_ACCESSED


def heat(score: float, *, at_half_lives: float) -> float:
    """Return the heat of a file at the time `at_half_lives`."""
    return 2.0 ** min(score - at_half_lives, _EXPONENT_MAX) if score != NEVER_ACCESSED else 0.0


def add_accesses_to_score(score: float, *, access_count: int, at_half_lives: float) -> float:
    """Return the score of a file after `access_count` more accesses at the time `at_half_lives`."""
    log2_heat = score - at_half_lives
    if log2_heat > _LOG2_HEAT_MAX:
        return score
    return math.log2(2.0**log2_heat + access_count) + at_half_lives


def least_score(accesses_min: int, *, at_half_lives: float, threshold_factor: float = 1.0) -> float:
    """Return the least score of a file whose heat at `at_half_lives` is at least `accesses_min` * `threshold_factor`.

    The first accesses of a file have already lost a little weight when the last one happens. Therefore half an access
    is subtracted: with `accesses_min` 100, a file gets this score at its 100th access.
    """
    return (
        score_from_heat(accesses_min * threshold_factor - 0.5, at_half_lives=at_half_lives)
        if accesses_min > 0
        else NEVER_ACCESSED
    )
