"""The migrations that the policy requires at one moment, in an order in which they can be done.

The planned migrations are stored in temporary tables of a separate connection. So even a million migrations need little
memory, and other processes can use the catalogue at the same time.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit.tiers._sqlite import convert_sqlite_errors
from gdrkit.tiers.policy import FileRow, MoveReason, decide

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.policy import Decision, TierLimits

__all__ = ["MigrationPlan", "PlannedMove"]

# Number of rows that are read or inserted at a time.
_BATCH_ROWS = 1000


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One migration that the policy requires.

    Attributes
    ----------
    name, source, destination : str
        Name of the file, its tier and the tier that it should move to.
    allocated_bytes : int
        Space that the file takes, in bytes.
    why : MoveReason
        Reason of the move.
    """

    name: str
    source: str
    destination: str
    allocated_bytes: int
    why: MoveReason


class MigrationPlan:
    """The migrations that the policy requires now; a context manager.

    Parameters
    ----------
    catalogue : Catalogue
        The catalogue, whose table of files is read once.
    tiers : sequence of TierLimits
        The tiers with their limits, fastest first.
    hysteresis : float
        See :func:`~gdrkit.tiers.policy.decide`.

    Attributes
    ----------
    count, allocated_bytes : int
        Number of files to move, and the space that they take, in bytes.
    considered_count : int
        Number of all files that the policy examined.
    """

    def __init__(self, catalogue: Catalogue, tiers: Sequence[TierLimits], *, hysteresis: float) -> None:
        self.considered_count = self.count = self.allocated_bytes = 0
        now_half_lives = catalogue.now_half_lives()
        self._connection = catalogue.new_connection()
        self._index_by_tier = {tier.name: index for index, tier in enumerate(tiers)}
        # Moves are grouped by direction (slower or faster) and destination, with one table per group. The moves of a
        # group are executed in the order of the decisions, so rows are only appended.
        self._group_numbers = range(2 * len(tiers))
        try:
            with convert_sqlite_errors("plan"):
                for group_number in self._group_numbers:
                    self._connection.execute(f"CREATE TEMP TABLE plan_{group_number} (file, destination, why)")
                decisions = decide(
                    self._list_file_rows(tiers), tiers, now_half_lives=now_half_lives, hysteresis=hysteresis
                )
                while batch := list(itertools.islice(decisions, _BATCH_ROWS)):
                    self._insert_decisions(batch)
        except BaseException:
            self._connection.close()
            raise

    def moves(self) -> Iterator[PlannedMove]:
        """Yield the moves to slower tiers, which free space, and then the moves to faster tiers.

        Moves to the slowest tier come first, because they make space in the next faster tier, to which files move next.
        """
        for group_number in self._group_numbers:
            last_row_id = 0
            # The rows are read in batches. With a single query, a run of several hours would hold a read snapshot, and
            # the write-ahead log of the catalogue would grow.
            while rows := self._read_batch(group_number, last_row_id):
                last_row_id = rows[-1][0]
                for _, name, source, destination, allocated_bytes, why in rows:
                    yield PlannedMove(os.fsdecode(name), source, destination, allocated_bytes, MoveReason(why))

    def _read_batch(self, group_number: int, last_row_id: int) -> list[Any]:
        with convert_sqlite_errors("plan"):
            return self._connection.execute(
                "SELECT plan.rowid, name, tier, plan.destination, allocated_bytes, why "  # noqa: S608 - the number comes from this module.
                f"FROM plan_{group_number} AS plan JOIN files ON files.id = plan.file "
                "WHERE plan.rowid > ? ORDER BY plan.rowid LIMIT ?",
                (last_row_id, _BATCH_ROWS),
            ).fetchall()

    def _insert_decisions(self, batch: list[Decision]) -> None:
        rows_by_group: dict[int, list[tuple[int, str, str]]] = {}
        for decision in batch:
            rows_by_group.setdefault(self._find_group_number(decision), []).append(
                (decision.id, decision.destination, decision.why.value)
            )
            self.allocated_bytes += decision.allocated_bytes
        self.count += len(batch)
        for group_number, rows in rows_by_group.items():
            self._connection.executemany(f"INSERT INTO plan_{group_number} VALUES (?, ?, ?)", rows)  # noqa: S608 - the number comes from this module.

    def close(self) -> None:
        """Close the connection, which drops the tables."""
        self._connection.close()

    def _find_group_number(self, decision: Decision) -> int:
        """Return the number of the group of a move. The groups are executed in ascending order; see :meth:`moves`."""
        destination_index, tier_count = self._index_by_tier[decision.destination], len(self._index_by_tier)
        return tier_count - 1 - destination_index if decision.tiers_down > 0 else tier_count + destination_index

    def _list_file_rows(self, tiers: Sequence[TierLimits]) -> Iterator[FileRow]:
        # The policy requires the order by hard links, pin and score (see FileRow). If two files are equally hot, the
        # file in the faster tier comes first, so that it stays there.
        tier_order_sql = " ".join(f"WHEN ? THEN {index}" for index in range(len(tiers)))
        rows = self._connection.execute(
            "SELECT id, tier, allocated_bytes, score, pinned, links FROM files ORDER BY "  # noqa: S608 - the numbers come from this module.
            f"links < 2, pinned IS NULL, score DESC, CASE tier {tier_order_sql} ELSE {len(tiers)} END",
            [tier.name for tier in tiers],
        )
        for row in rows:
            self.considered_count += 1
            yield FileRow(*row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
