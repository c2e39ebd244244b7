"""The policy: which file belongs in which tier.

Files are placed in turn: first the files that may not move or are pinned, then the others from the hottest to the
coldest. Each file gets the tier of its heat, or the next slower one that has space. The policy makes one pass over
sorted rows, so a million files need little memory. It does no I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gdrkit.tiers.heat import score_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Decision", "Place", "Row", "Why", "decide"]


class Why(enum.Enum):
    """The reason of a move: the heat of the file, a pin, or a lack of space in the tier of its heat."""

    HEAT = "heat"
    PINNED = "pinned"
    ROOM = "room"


@dataclass(frozen=True, slots=True)
class Place:
    """A tier with its threshold and its space."""

    name: str
    accesses_min: int
    limit_bytes: int


class Row(NamedTuple):
    """A file. The rows must be sorted: files that may not move first, then pinned files, then by falling score."""

    id: int
    tier: str
    allocated_bytes: int
    score: float
    pinned: str | None
    links: int


class Decision(NamedTuple):
    """A file that should move. `down` is the number of tiers it goes down (negative: up)."""

    id: int
    allocated_bytes: int
    destination: str
    down: int
    why: Why


def decide(rows: Iterable[Row], places: Sequence[Place], *, at: float, hysteresis: float) -> Iterator[Decision]:
    """Yield the files that should move.

    Parameters
    ----------
    rows : iterable of Row
        Files in the order that :class:`Row` requires.
    places : sequence of Place
        The tiers, fastest first.
    at : float
        Current time in half-lives.
    hysteresis : float
        Share of its tier's required heat that a file may lose before it must leave.

    Yields
    ------
    Decision
        Moves in the order of the rows. Files that stay are omitted.
    """
    order = {place.name: index for index, place in enumerate(places)}
    free = [place.limit_bytes for place in places]
    enters = [score_least(place.accesses_min, at=at) for place in places]
    leaves = [score_least(place.accesses_min, at=at, share=1 - hysteresis) for place in places]
    for row in rows:
        here = order.get(row.tier)
        if here is None:
            continue  # The tier is no longer configured; `check` reports it.
        if row.links > 1:
            # The other hard links would keep the old bytes.
            free[here] -= row.allocated_bytes
            continue
        if row.pinned is not None:
            there, why = _pinned(row.pinned, row.allocated_bytes, here, order, free), Why.PINNED
        else:
            wanted = _wanted(row.score, here, enters, leaves)
            there = _first_with_room(wanted, row.allocated_bytes, free, otherwise=here)
            why = Why.HEAT if there == wanted else Why.ROOM
        free[there] -= row.allocated_bytes
        if there != here:
            yield Decision(row.id, row.allocated_bytes, places[there].name, there - here, why)


def _pinned(pin: str, allocated_bytes: int, here: int, order: Mapping[str, int], free: Sequence[int]) -> int:
    there = order.get(pin, here)
    return there if free[there] >= allocated_bytes else here


def _wanted(score: float, here: int, enters: Sequence[float], leaves: Sequence[float]) -> int:
    """Return the fastest tier for which the file is hot enough, or its own tier within the hysteresis."""
    for index, least in enumerate(enters):
        if score >= (leaves[index] if index == here else least):
            return index
    return len(enters) - 1


def _first_with_room(wanted: int, allocated_bytes: int, free: Sequence[int], *, otherwise: int) -> int:
    for index in range(wanted, len(free)):
        if free[index] >= allocated_bytes:
            return index
    return otherwise
