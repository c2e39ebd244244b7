"""How hot a file is: accesses that fade with time.

Level 4. The heat of a file is the number of its accesses, each worth half as much after every half-life. What is kept
is a *score*, the logarithm of the heat plus the time at which it was taken, in half-lives: it stays as it is while time
passes, so that nothing has to be written to let files cool, and files are ordered by it at any time.

Time never goes back: see :class:`gdrkit.gds.tiers.catalogue.Catalogue`, whose own clock stands still while the host's
is behind what it was.
"""

from __future__ import annotations

import math

__all__ = ["NEVER", "heat", "score_after", "score_least", "score_of"]

# The score of a file that nobody has used.
NEVER = -math.inf
# Beyond this the older part no longer shows in a double.
_BITS = 60.0


def score_of(heat_count: float, *, at: float) -> float:
    """The score of a file that has this heat now; `at` is now, in half-lives."""
    return math.log2(heat_count) + at if heat_count > 0 else NEVER


def heat(score: float, *, at: float) -> float:
    """The heat of a file now: how many fresh accesses its accesses are still worth."""
    return 2.0 ** min(score - at, 1000.0) if score != NEVER else 0.0


def score_after(score: float, *, accesses: int, at: float) -> float:
    """The score when a file was used so many times now."""
    before = score - at
    # Of two terms that differ by more than a double holds, the larger one is the sum.
    if before > _BITS:
        return score
    return math.log2(2.0**before + accesses) + at


def score_least(accesses_min: int, *, at: float, share: float = 1.0) -> float:
    """The least score of a file that is as hot as `accesses_min` fresh accesses, or a `share` of them.

    Accesses are counted in whole numbers, so the heat is rounded: the hundredth access of a file makes it as hot as a
    hundred, although the first has faded a little by then.
    """
    return score_of(accesses_min * share - 0.5, at=at) if accesses_min > 0 else NEVER
