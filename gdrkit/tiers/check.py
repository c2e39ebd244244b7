"""Comparison of the catalogue with the disks, and repair of the catalogue.

The files on the disks are listed in a temporary table, so that the comparison of a million files needs little memory.
Other processes may continue meanwhile, so each difference is checked again before it is reported.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from gdrkit.tiers._sqlite import translated
from gdrkit.tiers.catalogue import Entry
from gdrkit.tiers.finding import Finding, Kind
from gdrkit.tiers.heat import score_of
from gdrkit.tiers.record import recorded
from gdrkit.tiers.refusal import told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.tiers._sqlite import Connection
    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.configuration import Configuration
    from gdrkit.tiers.folder import TierFolder

__all__ = ["compare", "fill", "kept"]

_BATCH = 1000
_TABLE = """
CREATE TEMP TABLE seen (
    name BLOB NOT NULL, tier TEXT NOT NULL, size_bytes INTEGER NOT NULL, links INTEGER NOT NULL,
    PRIMARY KEY (name, tier)
) WITHOUT ROWID
"""


def fill(catalogue: Catalogue, configuration: Configuration, folders: Mapping[str, TierFolder]) -> None:
    """Fill an empty catalogue with the files on disk.

    The heat of the files was lost with the old catalogue. Each file gets the heat that its tier asks for, so that it
    stays there until it has cooled. If two tiers have a file of the same name, the one in the faster tier is entered.
    """
    at = catalogue.now()
    for tier in configuration.tiers:
        folder = folders.get(tier.name)
        if folder is None:
            continue
        if folder.identity is not None:
            catalogue.identify(tier.name, folder.identity)
        with told("scan", tier=tier.name):
            for name, info in folder.walk():
                if stat.S_ISREG(info.st_mode) and catalogue.find(name) is None:
                    catalogue.put(Entry.of(name, tier.name, info, score=score_of(tier.accesses_min, at=at)))


def kept(folders: Mapping[str, TierFolder]) -> Iterator[Finding]:
    """Yield a finding for each file that a recovery moved to the ``kept`` folder."""
    for folder in folders.values():
        for name in folder.names_of("kept"):
            text = f"somebody wrote to both sides of a migration; see {folder.directory}/.gdrkit-tiers/kept"
            yield Finding(Kind.KEPT, f"kept/{name}", folder.name, text)


def compare(catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool) -> Iterator[Finding]:
    """Yield the differences between catalogue and disks; with `repair`, also update the catalogue.

    Files are never changed.
    """
    connection = catalogue.connect_again()
    try:
        with translated("check"):
            connection.execute(_TABLE)
        for folder in folders.values():
            yield from _look(folder, connection)
        with translated("check"):
            names = _differing(connection)
        for name in names:
            yield from _difference(os.fsdecode(name), catalogue, folders, repair=repair)
    finally:
        connection.close()


def _look(folder: TierFolder, connection: Connection) -> Iterator[Finding]:
    rows: list[tuple[bytes, str, int, int]] = []
    with told("scan", tier=folder.name):
        for name, info in folder.walk():
            if not stat.S_ISREG(info.st_mode):
                yield Finding(Kind.FOREIGN, name, folder.name, "no regular file: it is left alone")
                continue
            rows.append((os.fsencode(name), folder.name, info.st_size, info.st_nlink))
            if len(rows) == _BATCH:
                _keep(connection, rows)
                rows.clear()
    _keep(connection, rows)


def _keep(connection: Connection, rows: list[tuple[bytes, str, int, int]]) -> None:
    with translated("check"):
        connection.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", rows)


def _differing(connection: Connection) -> list[bytes]:
    """Return the names with a possible difference, each once."""
    rows = connection.execute(
        "SELECT name FROM files WHERE NOT EXISTS (SELECT 1 FROM seen WHERE seen.name = files.name "
        "AND seen.tier = files.tier AND seen.size_bytes = files.size_bytes AND seen.links = files.links) "
        "UNION SELECT name FROM seen WHERE name NOT IN (SELECT name FROM files) "
        "UNION SELECT name FROM seen GROUP BY name HAVING count(*) > 1 ORDER BY 1"
    )
    return [row[0] for row in rows]


def _difference(
    name: str, catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool
) -> Iterator[Finding]:
    """Compare one file again, with its current state on disk."""
    entry = catalogue.find(name)
    found = {tier: info for tier, folder in folders.items() if (info := _regular(folder, name)) is not None}
    if len(found) > 1 and not _is_moving(folders):
        where = entry.tier if entry is not None and entry.tier in found else next(iter(found))
        yield Finding(Kind.TWICE, name, where, f"also in {', '.join(tier for tier in found if tier != where)}")
    if entry is None:
        if found:
            tier, info = next(iter(found.items()))
            yield Finding(Kind.UNKNOWN, name, tier, "the catalogue did not have it", mended=repair)
            _learn(catalogue, name, tier, info, repair=repair)
    elif not found:
        yield _missing(entry, catalogue, folders, repair=repair)
    elif entry.tier not in found:
        tier, info = next(iter(found.items()))
        yield Finding(Kind.ELSEWHERE, name, tier, f"the catalogue had it in {entry.tier}", mended=repair)
        _learn(catalogue, name, tier, info, repair=repair)
    elif (found[entry.tier].st_size, found[entry.tier].st_nlink) != (entry.size_bytes, entry.links):
        info = found[entry.tier]
        text = f"{info.st_size} bytes, {info.st_nlink} names; catalogued {entry.size_bytes} and {entry.links}"
        yield Finding(Kind.CHANGED, name, entry.tier, text, mended=repair)
        _learn(catalogue, name, entry.tier, info, repair=repair)


def _learn(catalogue: Catalogue, name: str, tier: str, info: os.stat_result, *, repair: bool) -> None:
    if repair:
        catalogue.see(name, tier, info)


def _missing(entry: Entry, catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool) -> Finding:
    if entry.tier not in folders:
        return Finding(Kind.ABSENT, entry.name, entry.tier, "its tier is not there")
    if repair:
        catalogue.forget(entry.name)
    return Finding(Kind.MISSING, entry.name, entry.tier, "no tier has it: somebody removed it", mended=repair)


def _regular(folder: TierFolder, name: str) -> os.stat_result | None:
    info = folder.stat(name)
    return info if info is not None and stat.S_ISREG(info.st_mode) else None


def _is_moving(folders: Mapping[str, TierFolder]) -> bool:
    """Return whether a migration is in progress, during which a file may briefly have its name in two tiers."""
    return any(recorded(folder) for folder in folders.values())
