"""The migrations that the policy asks for at one moment, in an order in which they can be done.

They are stored in a temporary table of a separate connection. So a million migrations need no more memory than a
hundred, and other processes can use the catalogue meanwhile.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit.tiers._sqlite import translated
from gdrkit.tiers.policy import Row, Why, decide

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.policy import Decision, Place

__all__ = ["Plan", "PlannedMove"]

_BATCH = 1000


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One migration that the policy asks for."""

    name: str
    source: str
    destination: str
    allocated_bytes: int
    why: Why


class Plan:
    """The migrations that the policy asks for now; a context manager.

    Parameters
    ----------
    catalogue : Catalogue
        The catalogue. Its files are read once.
    places : sequence of Place
        The tiers with their limits, fastest first.
    hysteresis : float
        See :func:`decide`.

    Attributes
    ----------
    count, allocated_bytes : int
        Number of files to move, and the space that they take, in bytes.
    considered : int
        Number of all files.
    """

    def __init__(self, catalogue: Catalogue, places: Sequence[Place], *, hysteresis: float) -> None:
        self.considered = self.count = self.allocated_bytes = 0
        at = catalogue.now()
        self._connection = catalogue.connect_again()
        self._order = {place.name: index for index, place in enumerate(places)}
        # One table per turn. Decisions come in order, so rows are only appended.
        self._turns = range(2 * len(places))
        try:
            with translated("plan"):
                for turn in self._turns:
                    self._connection.execute(f"CREATE TEMP TABLE plan_{turn} (file, destination, why)")
                decisions = decide(self._rows(places), places, at=at, hysteresis=hysteresis)
                while batch := list(itertools.islice(decisions, _BATCH)):
                    self._keep(batch)
        except BaseException:
            self._connection.close()
            raise

    def moves(self) -> Iterator[PlannedMove]:
        """Yield first the moves down, to the slowest tier first, to make space, and then the moves up."""
        for turn in self._turns:
            last = 0
            # The rows are read in batches. Otherwise a migration that takes hours would hold a read snapshot, and the
            # log of the catalogue would grow.
            while rows := self._part(turn, last):
                last = rows[-1][0]
                for _, name, source, destination, size, why in rows:
                    yield PlannedMove(os.fsdecode(name), source, destination, size, Why(why))

    def _part(self, turn: int, last: int) -> list[Any]:
        with translated("plan"):
            return self._connection.execute(
                "SELECT plan.rowid, name, tier, plan.destination, allocated_bytes, why "  # noqa: S608 - the number comes from this module.
                f"FROM plan_{turn} AS plan JOIN files ON files.id = plan.file "
                "WHERE plan.rowid > ? ORDER BY plan.rowid LIMIT ?",
                (last, _BATCH),
            ).fetchall()

    def _keep(self, batch: list[Decision]) -> None:
        by_turn: dict[int, list[tuple[int, str, str]]] = {}
        for each in batch:
            by_turn.setdefault(self._turn(each), []).append((each.id, each.destination, each.why.value))
            self.allocated_bytes += each.allocated_bytes
        self.count += len(batch)
        for turn, rows in by_turn.items():
            self._connection.executemany(f"INSERT INTO plan_{turn} VALUES (?, ?, ?)", rows)  # noqa: S608 - the number comes from this module.

    def close(self) -> None:
        """Close the connection, which drops the tables."""
        self._connection.close()

    def _turn(self, decision: Decision) -> int:
        """Return the turn of a move. Moves down come first, to the slowest tier first, then moves up."""
        to, tiers = self._order[decision.destination], len(self._order)
        return tiers - 1 - to if decision.down > 0 else tiers + to

    def _rows(self, places: Sequence[Place]) -> Iterator[Row]:
        # If two files are equally hot, the one in the faster tier stays there.
        rank = " ".join(f"WHEN ? THEN {index}" for index in range(len(places)))
        found = self._connection.execute(
            "SELECT id, tier, allocated_bytes, score, pinned, links FROM files ORDER BY "  # noqa: S608 - the numbers come from this module.
            f"links < 2, pinned IS NULL, score DESC, CASE tier {rank} ELSE {len(places)} END",
            [place.name for place in places],
        )
        for row in found:
            self.considered += 1
            yield Row(*row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
