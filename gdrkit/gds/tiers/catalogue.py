"""What is known of every file: its tier, its size, how hot it is, whether it is pinned.

Level 4. An index, not the truth: where a file lies is said by the disks, and a catalogue that is lost or damaged is
made anew from them. Several processes may use it at once.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit.cufile import RouteState
from gdrkit.errors import Api, ApiError, Reason
from gdrkit.gds.tiers.database import Database
from gdrkit.gds.tiers.heat import NEVER, score_after
from gdrkit.gds.tiers.names import shown
from gdrkit.gds.tiers.routes import TierRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["Catalogue", "Entry", "Totals"]

_COLUMNS = "name, tier, size_bytes, allocated_bytes, links, score, accesses, pinned"


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one file; `pinned` names the tier where it has to be."""

    name: str
    tier: str
    size_bytes: int
    allocated_bytes: int
    links: int = 1
    score: float = NEVER
    accesses: int = 0
    pinned: str | None = None

    @classmethod
    def of(cls, name: str, tier: str, info: os.stat_result, *, score: float = NEVER) -> Entry:
        """Of a file as stat(2) sees it."""
        return cls(name, tier, info.st_size, info.st_blocks * 512, info.st_nlink, score)

    @classmethod
    def of_row(cls, row: tuple[Any, ...]) -> Entry:
        """Of a row of the catalogue."""
        return cls(os.fsdecode(row[0]), *row[1:])


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one tier; `coming_bytes` are those of migrations that are under way."""

    files: int = 0
    size_bytes: int = 0
    allocated_bytes: int = 0
    coming_bytes: int = 0


class Catalogue(Database):
    """The catalogue of a set of tiers; close it after all that use it.

    Parameters
    ----------
    folder, half_life_s, timeout_ms, clock
        As of :class:`Database`.
    fill : callable
        Puts what is on disk into a new catalogue, by :meth:`put`.
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
        """Put what is on disk into a new catalogue."""
        self._fill(self)

    def find(self, name: str) -> Entry | None:
        """What is known of a file; None when nothing is."""
        with self.used_by("find", name=shown(name)) as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM files WHERE name = ?", (_key(name),)).fetchone()  # noqa: S608 - our own columns.
        return None if row is None else Entry.of_row(row)

    def totals(self) -> dict[str, Totals]:
        """Of every tier that has, or gets, a file."""
        with self.used_by("add up") as connection:
            rows = connection.execute(
                "SELECT tier, max(files), max(size_bytes), max(allocated_bytes), max(coming) FROM ("
                "SELECT tier, files, size_bytes, allocated_bytes, 0 AS coming FROM totals UNION ALL "
                "SELECT destination, 0, 0, 0, sum(allocated_bytes) FROM moves GROUP BY destination) GROUP BY tier"
            ).fetchall()
        return {row[0]: Totals(*row[1:]) for row in rows}

    def pins(self) -> dict[str, str]:
        """The files that are pinned, and the tier of each."""
        with self.used_by("find pins") as connection:
            rows = connection.execute("SELECT name, pinned FROM files WHERE pinned IS NOT NULL").fetchall()
        return {os.fsdecode(row[0]): row[1] for row in rows}

    def put(self, entry: Entry) -> None:
        """Have exactly this known of a file."""
        marks = ", ".join("?" * 8)
        values = (_key(entry.name), *(getattr(entry, key) for key in _COLUMNS.split(", ")[1:]))
        with self.writing("put", name=shown(entry.name)) as connection:
            # Not REPLACE, which would take the old row away without its trigger.
            connection.execute(
                f"INSERT INTO files ({_COLUMNS}) VALUES ({marks}) ON CONFLICT (name) DO UPDATE SET "  # noqa: S608 - our own columns.
                + ", ".join(f"{key} = excluded.{key}" for key in _COLUMNS.split(", ")[1:]),
                values,
            )

    def see(self, name: str, tier: str, info: os.stat_result) -> None:
        """A file lies there with that size; what else is known of it stays."""
        values = (_key(name), tier, info.st_size, info.st_blocks * 512, info.st_nlink, NEVER)
        with self.writing("see", name=shown(name)) as connection:
            connection.execute(
                "INSERT INTO files (name, tier, size_bytes, allocated_bytes, links, score, accesses) "
                "VALUES (?, ?, ?, ?, ?, ?, 0) ON CONFLICT (name) DO UPDATE SET tier = excluded.tier, "
                "size_bytes = excluded.size_bytes, allocated_bytes = excluded.allocated_bytes, links = excluded.links",
                values,
            )

    def forget(self, name: str) -> None:
        """The file is no more."""
        with self.writing("forget", name=shown(name)) as connection:
            connection.execute("DELETE FROM files WHERE name = ?", (_key(name),))

    def pin(self, name: str, tier: str | None) -> bool:
        """Have a file stay in a tier, or go where it belongs again (None); whether it is known."""
        with self.writing("pin", name=shown(name)) as connection:
            done = connection.execute("UPDATE files SET pinned = ? WHERE name = ?", (tier, _key(name)))
            return bool(done.rowcount)

    def used(self, counts: Mapping[str, int]) -> None:
        """Files were used so many times; what nothing is known of is left out."""
        with self.writing("count accesses") as connection:
            at = self.clock_at(connection, keep=True)
            for name, count in counts.items():
                row = connection.execute("SELECT id, score FROM files WHERE name = ?", (_key(name),)).fetchone()
                if row is not None:
                    connection.execute(
                        "UPDATE files SET score = ?, accesses = accesses + ? WHERE id = ?",
                        (score_after(row[1], accesses=count, at=at), count, row[0]),
                    )

    def begin_move(self, move: tuple[str, str, str, str, int], *, limit_bytes: int) -> None:
        """Book room for (id, name, source, destination, bytes) in the destination.

        Raises
        ------
        ApiError
            ``NO_SPACE``: there is none.
        """
        identifier, name, source, destination, size = move
        with self.writing("begin move", name=shown(name)) as connection:
            found = self.totals().get(destination, Totals())
            if found.allocated_bytes + found.coming_bytes + size > limit_bytes:
                raise ApiError(
                    api=Api.NONE,
                    operation="migrate",
                    status=None,
                    status_name="no room",
                    arguments={"name": shown(name), "tier": destination, "bytes": size, "limit_bytes": limit_bytes},
                    reason=Reason.NO_SPACE,
                    what_to_do="make room in that tier, or give it a larger capacity",
                )
            row = (identifier, _key(name), source, destination, size)
            connection.execute("INSERT INTO moves VALUES (?, ?, ?, ?, ?)", row)

    def end_move(self, identifier: str) -> None:
        """The migration has ended, one way or the other."""
        with self.writing("end move", id=identifier) as connection:
            connection.execute("DELETE FROM moves WHERE id = ?", (identifier,))

    def moves(self) -> list[str]:
        """The migrations that are booked."""
        with self.used_by("find moves") as connection:
            return [row[0] for row in connection.execute("SELECT id FROM moves ORDER BY id")]

    def routes(self) -> dict[str, TierRoute]:
        """By tier, what the last transfer with device memory showed."""
        with self.used_by("find routes") as connection:
            rows = connection.execute("SELECT tier, state, route, why FROM routes").fetchall()
        return {row[0]: TierRoute(RouteState(row[1]), row[2], row[3]) for row in rows}

    def keep_route(self, tier: str, route: TierRoute) -> None:
        """A transfer showed this."""
        with self.writing("keep route", tier=tier) as connection:
            row = (tier, route.state.value, route.route, route.why, time.time())
            connection.execute("INSERT OR REPLACE INTO routes VALUES (?, ?, ?, ?, ?)", row)

    def identities(self) -> dict[str, str]:
        """By tier, the folder that it was when it was last seen."""
        with self.used_by("find tiers") as connection:
            return dict(connection.execute("SELECT tier, identity FROM tiers").fetchall())

    def identify(self, tier: str, identity: str) -> None:
        """Keep which folder the tier is."""
        with self.writing("identify", tier=tier) as connection:
            connection.execute("INSERT OR REPLACE INTO tiers VALUES (?, ?)", (tier, identity))


def _key(name: str) -> bytes:
    return os.fsencode(name)
