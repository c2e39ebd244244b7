"""The policy, which decides which file belongs in which tier.

The policy first places the files that may not move (because they have several hard links), then the pinned files, then
all others from the hottest to the coldest. Each of the others gets the tier of its heat, or the next slower tier that
has space. The policy makes one pass over sorted rows, so even a million files need little memory. It does no I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gdrkit.tiers.heat import least_score

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Decision", "FileRow", "MoveReason", "TierLimits", "decide"]


class MoveReason(enum.Enum):
    """The reason of a move: the heat of the file, a pin, or a lack of space in the tier of its heat."""

    HEAT = "heat"
    PINNED = "pinned"
    # The value is part of the JSON output, so it cannot be renamed.
    NO_SPACE = "room"


@dataclass(frozen=True, slots=True)
class TierLimits:
    """A tier with its limits.

    Attributes
    ----------
    name : str
        Name of the tier.
    accesses_min : int
        Lowest heat of a file that belongs in the tier, in accesses.
    limit_bytes : int
        Space that gdrkit may use in the tier in total, in bytes.
    """

    name: str
    accesses_min: int
    limit_bytes: int


class FileRow(NamedTuple):
    """A file. The rows must be sorted: files that may not move first, then pinned files, then by descending score.

    Attributes
    ----------
    id : int
        ID of the file in the catalogue.
    tier : str
        Tier of the file.
    allocated_bytes : int
        Space that the file takes, in bytes.
    score : float
        Score of the file; see :mod:`gdrkit.tiers.heat`.
    pinned : str or None
        Tier to which the file is pinned, or None.
    links : int
        Number of hard links. A file with more than one may not move.
    """

    id: int
    tier: str
    allocated_bytes: int
    score: float
    pinned: str | None
    links: int


class Decision(NamedTuple):
    """A file that should move to another tier.

    `tiers_down` is the number of tiers from its tier down to the destination. It is negative for a faster destination.
    """

    id: int
    allocated_bytes: int
    destination: str
    tiers_down: int
    why: MoveReason


def decide(
    rows: Iterable[FileRow], tiers: Sequence[TierLimits], *, now_half_lives: float, hysteresis: float
) -> Iterator[Decision]:
    """Yield the files that should move.

    Parameters
    ----------
    rows : iterable of FileRow
        Files in the order that :class:`FileRow` requires.
    tiers : sequence of TierLimits
        The tiers, fastest first.
    now_half_lives : float
        Current time in half-lives since 1970.
    hysteresis : float
        Fraction by which the heat of a file may fall below `accesses_min` of its tier before the file leaves the tier,
        from 0 to less than 1.

    Yields
    ------
    Decision
        Moves in the order of the rows. Files that stay are omitted.
    """
    index_by_tier = {tier.name: index for index, tier in enumerate(tiers)}
    # Free space by tier index. At first all tiers count as empty. Each file takes its space when it is placed, even if
    # it stays in its tier.
    free_bytes = [tier.limit_bytes for tier in tiers]
    # For each tier, the least score with which a file may enter it, and the least with which a file may stay in it.
    entry_scores = [least_score(tier.accesses_min, at_half_lives=now_half_lives) for tier in tiers]
    stay_scores = [
        least_score(tier.accesses_min, at_half_lives=now_half_lives, threshold_factor=1 - hysteresis) for tier in tiers
    ]
    for row in rows:
        current_index = index_by_tier.get(row.tier)
        if current_index is None:
            continue  # The tier is no longer configured; ``gdrkit tiers check`` reports its files.
        if row.links > 1:
            # The other hard links would keep the old bytes, so the file stays.
            free_bytes[current_index] -= row.allocated_bytes
            continue
        if row.pinned is not None:
            destination_index, why = _find_pinned_tier(row, current_index, index_by_tier, free_bytes), MoveReason.PINNED
        else:
            heat_index = _find_tier_by_heat(row.score, current_index, entry_scores, stay_scores)
            destination_index = _find_first_with_space(
                heat_index, row.allocated_bytes, free_bytes, fallback_index=current_index
            )
            why = MoveReason.HEAT if destination_index == heat_index else MoveReason.NO_SPACE
        free_bytes[destination_index] -= row.allocated_bytes
        if destination_index != current_index:
            yield Decision(
                row.id, row.allocated_bytes, tiers[destination_index].name, destination_index - current_index, why
            )


def _find_pinned_tier(
    row: FileRow, current_index: int, index_by_tier: Mapping[str, int], free_bytes: Sequence[int]
) -> int:
    """Return the index of the tier to which the file is pinned, or of its current tier if it cannot move there.

    The file cannot move if the other tier is full or not configured.
    """
    pinned_index = index_by_tier.get(row.pinned or "", current_index)
    return pinned_index if free_bytes[pinned_index] >= row.allocated_bytes else current_index


def _find_tier_by_heat(
    score: float, current_index: int, entry_scores: Sequence[float], stay_scores: Sequence[float]
) -> int:
    """Return the index of the fastest tier for which the file is hot enough, or of the slowest tier if there is none.

    The current tier of the file has a lower threshold, because of the hysteresis.
    """
    for index, entry_score in enumerate(entry_scores):
        if score >= (stay_scores[index] if index == current_index else entry_score):
            return index
    return len(entry_scores) - 1


def _find_first_with_space(
    first_index: int, allocated_bytes: int, free_bytes: Sequence[int], *, fallback_index: int
) -> int:
    """Return the index of the fastest tier with space, from `first_index` on, or `fallback_index` if none has space."""
    for index in range(first_index, len(free_bytes)):
        if free_bytes[index] >= allocated_bytes:
            return index
    return fallback_index
