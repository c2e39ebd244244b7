"""Which file belongs into which tier.

Level 4. Files take their places in turn: first those that must stay or go where somebody said, then from the hottest to
the coldest. Each gets the tier of its heat, or the next slower one that has room. One pass over rows in order, so that
a million files need the memory of a few; nothing here touches a disk.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gdrkit.gds.tiers.heat import score_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Decision", "Place", "Row", "Why", "decide"]


class Why(enum.Enum):
    """What makes a file move: its heat, somebody's will, or that the tier it should be in is full."""

    HEAT = "heat"
    PINNED = "pinned"
    ROOM = "room"


@dataclass(frozen=True, slots=True)
class Place:
    """A tier as placement sees it: fastest first, and what may lie in it."""

    name: str
    accesses_min: int
    limit_bytes: int


class Row(NamedTuple):
    """A file: those that may not move first, then those that are pinned, then by falling score."""

    id: int
    tier: str
    allocated_bytes: int
    score: float
    pinned: str | None
    links: int


class Decision(NamedTuple):
    """A file that should be elsewhere: how many tiers it goes down (or up, negative)."""

    id: int
    allocated_bytes: int
    destination: str
    down: int
    why: Why


def decide(rows: Iterable[Row], places: Sequence[Place], *, at: float, hysteresis: float) -> Iterator[Decision]:
    """The files that should move.

    Parameters
    ----------
    rows : iterable of Row
        In the order that :class:`Row` states.
    places : sequence of Place
        Fastest first.
    at : float
        Now, in half-lives.
    hysteresis : float
        How much cooler than its tier asks for a file may become before it has to leave.

    Yields
    ------
    Decision
        In the order of the rows; files that stay are left out.
    """
    order = {place.name: index for index, place in enumerate(places)}
    free = [place.limit_bytes for place in places]
    enters = [score_least(place.accesses_min, at=at) for place in places]
    leaves = [score_least(place.accesses_min, at=at, share=1 - hysteresis) for place in places]
    for row in rows:
        here = order.get(row.tier)
        if here is None:
            continue  # A tier that is no longer configured; `check` speaks of it.
        if row.links > 1:
            # Its other names would go on with the old bytes.
            free[here] -= row.allocated_bytes
            continue
        if row.pinned is not None:
            there, why = _pinned(row, here, order, free), Why.PINNED
        else:
            wanted = _wanted(row.score, here, enters, leaves)
            there = _first_with_room(wanted, row.allocated_bytes, free, otherwise=here)
            why = Why.HEAT if there == wanted else Why.ROOM
        free[there] -= row.allocated_bytes
        if there != here:
            yield Decision(row.id, row.allocated_bytes, places[there].name, there - here, why)


def _pinned(row: Row, here: int, order: Mapping[str, int], free: Sequence[int]) -> int:
    there = order.get(row.pinned or "", here)
    return there if free[there] >= row.allocated_bytes else here


def _wanted(score: float, here: int, enters: Sequence[float], leaves: Sequence[float]) -> int:
    """The fastest tier for which it is hot enough, or its own, which it may keep a little longer."""
    for index, least in enumerate(enters):
        if score >= (leaves[index] if index == here else least):
            return index
    return len(enters) - 1


def _first_with_room(wanted: int, allocated_bytes: int, free: Sequence[int], *, otherwise: int) -> int:
    for index in range(wanted, len(free)):
        if free[index] >= allocated_bytes:
            return index
    return otherwise
