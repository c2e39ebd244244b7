"""The catalogue of the tiers: an index in SQLite with the tier, the size, the heat and the pin of each file.

The disks are authoritative for the location of a file, so a lost or damaged catalogue is rebuilt from the disks. The
heat of a file is the sum of its accesses, weighted by age (:mod:`gdrkit.tiers.heat`). A pin keeps a file in one tier.
Several processes may use the catalogue at the same time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit.cufile import RouteState
from gdrkit.errors import Api, ApiError, Reason
from gdrkit.tiers.database import Database
from gdrkit.tiers.heat import NEVER_ACCESSED, add_accesses_to_score
from gdrkit.tiers.names import printable
from gdrkit.tiers.routes import TierRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["Catalogue", "Entry", "TierTotals"]

# Bytes per block of st_blocks; see stat(2).
_STAT_BLOCK_BYTES = 512
_ENTRY_COLUMNS = "name, tier, size_bytes, allocated_bytes, links, score, accesses, pinned"


@dataclass(frozen=True, slots=True)
class Entry:
    """The row of one file in the catalogue.

    Attributes
    ----------
    name, tier : str
        Logical name of the file and name of its tier.
    size_bytes, allocated_bytes : int
        Size of the file and the space that it takes on its disk, in bytes.
    links : int
        Number of hard links.
    score : float
        The heat of the file, as a score that does not change while time passes; see :mod:`gdrkit.tiers.heat`.
    accesses : int
        Number of accesses since the entry was created.
    pinned : str or None
        Tier to which the file is pinned, or None.
    """

    name: str
    tier: str
    size_bytes: int
    allocated_bytes: int
    links: int = 1
    score: float = NEVER_ACCESSED
    accesses: int = 0
    pinned: str | None = None

    @classmethod
    def from_stat(cls, name: str, tier: str, file_status: os.stat_result, *, score: float = NEVER_ACCESSED) -> Entry:
        """Return the entry of a file with this stat result."""
        return cls(
            name, tier, file_status.st_size, file_status.st_blocks * _STAT_BLOCK_BYTES, file_status.st_nlink, score
        )

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Entry:
        """Return the entry for a row of the database."""
        return cls(os.fsdecode(row[0]), *row[1:])


@dataclass(frozen=True, slots=True)
class TierTotals:
    """Totals of one tier.

    Attributes
    ----------
    files : int
        Number of files.
    size_bytes, allocated_bytes : int
        Sum of the file sizes and of the space that the files take, in bytes.
    coming_bytes : int
        Space that migrations in progress have reserved in this tier, in bytes.
    """

    files: int = 0
    size_bytes: int = 0
    allocated_bytes: int = 0
    coming_bytes: int = 0


class Catalogue(Database):
    """The catalogue of a set of tiers. The owner closes the catalogue when no other object uses it any more.

    Parameters
    ----------
    folder, half_life_s, timeout_ms, clock
        See :class:`~gdrkit.tiers.database.Database`.
    fill : callable
        Function that fills a new catalogue with the files on disk, by :meth:`put`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        half_life_s: float,
        timeout_ms: int,
        clock: Callable[[], float] = time.time,
        fill: Callable[[Catalogue], None],
    ) -> None:
        self._fill = fill
        super().__init__(folder, half_life_s=half_life_s, timeout_ms=timeout_ms, clock=clock)

    def fill(self) -> None:
        """Fill the new, empty database with the constructor's function `fill`."""
        self._fill(self)

    def find(self, name: str) -> Entry | None:
        """Return the entry of a file, or None if the catalogue has none."""
        with self.locked_connection("find file", name=printable(name)) as connection:
            row = connection.execute(
                f"SELECT {_ENTRY_COLUMNS} FROM files WHERE name = ?",  # noqa: S608 - constant columns.
                (_encode_name(name),),
            ).fetchone()
        return None if row is None else Entry.from_row(row)

    def totals(self) -> dict[str, TierTotals]:
        """Return the totals of each tier that has or had a file, or in which a migration has reserved space."""
        with self.locked_connection("read totals") as connection:
            # Each inner SELECT has at most one row per tier, with 0 in the columns of the other SELECT. So max() joins
            # the two rows of a tier.
            rows = connection.execute(
                "SELECT tier, max(files), max(size_bytes), max(allocated_bytes), max(coming) FROM ("
                "SELECT tier, files, size_bytes, allocated_bytes, 0 AS coming FROM totals UNION ALL "
                "SELECT destination, 0, 0, 0, sum(allocated_bytes) FROM moves GROUP BY destination) GROUP BY tier"
            ).fetchall()
        return {row[0]: TierTotals(*row[1:]) for row in rows}

    def pins(self) -> dict[str, str]:
        """Return the tier of each pinned file, by name of the file."""
        with self.locked_connection("read pins") as connection:
            rows = connection.execute("SELECT name, pinned FROM files WHERE pinned IS NOT NULL").fetchall()
        return {os.fsdecode(row[0]): row[1] for row in rows}

    def put(self, entry: Entry) -> None:
        """Write the entry of a file. Unlike :meth:`record_file`, replace all columns of an existing entry."""
        placeholders = ", ".join("?" * 8)
        values = (_encode_name(entry.name), *(getattr(entry, column) for column in _ENTRY_COLUMNS.split(", ")[1:]))
        with self.write_transaction("write entry", name=printable(entry.name)) as connection:
            # INSERT OR REPLACE would delete the old row without firing the trigger `file_went`, so the totals would be
            # wrong.
            connection.execute(
                f"INSERT INTO files ({_ENTRY_COLUMNS}) VALUES ({placeholders}) ON CONFLICT (name) DO UPDATE SET "  # noqa: S608 - constant columns.
                + ", ".join(f"{column} = excluded.{column}" for column in _ENTRY_COLUMNS.split(", ")[1:]),
                values,
            )

    def record_file(self, name: str, tier: str, file_status: os.stat_result) -> None:
        """Write the tier, the sizes and the hard links of a file. An existing entry keeps its heat and its pin."""
        values = (
            _encode_name(name),
            tier,
            file_status.st_size,
            file_status.st_blocks * _STAT_BLOCK_BYTES,
            file_status.st_nlink,
            NEVER_ACCESSED,
        )
        with self.write_transaction("record file", name=printable(name)) as connection:
            connection.execute(
                "INSERT INTO files (name, tier, size_bytes, allocated_bytes, links, score, accesses) "
                "VALUES (?, ?, ?, ?, ?, ?, 0) ON CONFLICT (name) DO UPDATE SET tier = excluded.tier, "
                "size_bytes = excluded.size_bytes, allocated_bytes = excluded.allocated_bytes, links = excluded.links",
                values,
            )

    def remove(self, name: str) -> None:
        """Remove the row of a file."""
        with self.write_transaction("forget file", name=printable(name)) as connection:
            connection.execute("DELETE FROM files WHERE name = ?", (_encode_name(name),))

    def pin(self, name: str, tier: str | None) -> bool:
        """Pin a file to a tier, or unpin it if `tier` is None. Return whether the catalogue has the file."""
        with self.write_transaction("pin", name=printable(name)) as connection:
            cursor = connection.execute("UPDATE files SET pinned = ? WHERE name = ?", (tier, _encode_name(name)))
            return bool(cursor.rowcount)

    def add_accesses(self, counts: Mapping[str, int]) -> list[str]:
        """Add accesses to files. Return the names that the catalogue does not have.

        `counts` has the number of accesses to each file, by name of the file.
        """
        unknown_names = []
        with self.write_transaction("count accesses") as connection:
            now_half_lives = self.read_clock_half_lives(connection, store=True)
            for name, count in counts.items():
                row = connection.execute("SELECT id, score FROM files WHERE name = ?", (_encode_name(name),)).fetchone()
                if row is None:
                    unknown_names.append(name)
                    continue
                connection.execute(
                    "UPDATE files SET score = ?, accesses = accesses + ? WHERE id = ?",
                    (add_accesses_to_score(row[1], access_count=count, at_half_lives=now_half_lives), count, row[0]),
                )
        return unknown_names

    def reserve_space(self, move: tuple[str, str, str, str, int], *, limit_bytes: int) -> None:
        """Reserve space in the destination of a migration.

        Parameters
        ----------
        move : tuple
            ID of the migration, name of the file, source tier, destination tier, and the space in bytes that the file
            takes on its disk.
        limit_bytes : int
            Space that gdrkit may use in the destination in total, in bytes.

        Raises
        ------
        ApiError
            ``NO_SPACE``: the destination does not have enough space.
        """
        move_id, name, source, destination, allocated_bytes = move
        with self.write_transaction("reserve space", name=printable(name)) as connection:
            totals = self.totals().get(destination, TierTotals())
            if totals.allocated_bytes + totals.coming_bytes + allocated_bytes > limit_bytes:
                raise ApiError(
                    api=Api.NONE,
                    operation="migrate",
                    status=None,
                    status_name="NO_SPACE",
                    arguments={
                        "name": printable(name),
                        "tier": destination,
                        "bytes": allocated_bytes,
                        "limit_bytes": limit_bytes,
                    },
                    reason=Reason.NO_SPACE,
                    what_to_do="free space in that tier, or configure a larger capacity for it",
                )
            row = (move_id, _encode_name(name), source, destination, allocated_bytes)
            connection.execute("INSERT INTO moves VALUES (?, ?, ?, ?, ?)", row)

    def release_reservation(self, move_id: str) -> None:
        """Remove the reservation of a migration that has ended."""
        with self.write_transaction("release reservation", id=move_id) as connection:
            connection.execute("DELETE FROM moves WHERE id = ?", (move_id,))

    def reserved_move_ids(self) -> list[str]:
        """Return the IDs of the migrations that have a reservation."""
        with self.locked_connection("read moves") as connection:
            return [row[0] for row in connection.execute("SELECT id FROM moves ORDER BY id")]

    def routes(self) -> dict[str, TierRoute]:
        """Return the route that the last transfer between each tier and device memory took, by name of the tier."""
        with self.locked_connection("read routes") as connection:
            rows = connection.execute("SELECT tier, state, route, why FROM routes").fetchall()
        return {row[0]: TierRoute(RouteState(row[1]), row[2], row[3]) for row in rows}

    def record_route(self, tier: str, route: TierRoute) -> None:
        """Store the route that the last transfer between a tier and device memory took."""
        with self.write_transaction("record route", tier=tier) as connection:
            row = (tier, route.state.value, route.route, route.why, time.time())
            connection.execute("INSERT OR REPLACE INTO routes VALUES (?, ?, ?, ?, ?)", row)

    def identities(self) -> dict[str, str]:
        """Return the identity in the ``tier.json`` of each tier when gdrkit last used the tier, by name of the tier."""
        with self.locked_connection("read identities") as connection:
            return dict(connection.execute("SELECT tier, identity FROM tiers").fetchall())

    def record_identity(self, tier: str, identity: str) -> None:
        """Store the identity that ``tier.json`` states for the folder of a tier."""
        with self.write_transaction("record identity", tier=tier) as connection:
            connection.execute("INSERT OR REPLACE INTO tiers VALUES (?, ?)", (tier, identity))


def _encode_name(name: str) -> bytes:
    return os.fsencode(name)
