"""Comparison of the catalogue with the disks, and repair of the catalogue.

The files on the disks are listed in a temporary table, so that the comparison of a million files needs little memory.
Other processes may change files during the comparison, so each difference is checked again before it is reported.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from gdrkit.tiers._sqlite import convert_sqlite_errors
from gdrkit.tiers.catalogue import Entry
from gdrkit.tiers.finding import FindingKind, TierFinding
from gdrkit.tiers.heat import score_of
from gdrkit.tiers.kernel_errors import convert_os_errors
from gdrkit.tiers.record import recorded_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.tiers._sqlite import Connection
    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.configuration import Configuration
    from gdrkit.tiers.folder import TierFolder

__all__ = ["compare", "fill_catalogue", "kept_files"]

_BATCH_ROWS = 1000
_TABLE = """
CREATE TEMP TABLE on_disk (
    name BLOB NOT NULL, tier TEXT NOT NULL, size_bytes INTEGER NOT NULL, links INTEGER NOT NULL,
    PRIMARY KEY (name, tier)
) WITHOUT ROWID
"""


def fill_catalogue(catalogue: Catalogue, configuration: Configuration, folders: Mapping[str, TierFolder]) -> None:
    """Fill an empty catalogue with the files on disk.

    The heat of the files was lost with the old catalogue. Each file gets the heat that its tier requires, so that it
    stays there until it has cooled. If two tiers have a file of the same name, the one in the faster tier is entered.
    """
    at = catalogue.now()
    for tier in configuration.tiers:
        folder = folders.get(tier.name)
        if folder is None:
            continue
        if folder.identity is not None:
            catalogue.record_identity(tier.name, folder.identity)
        with convert_os_errors("scan", tier=tier.name):
            for name, info in folder.walk():
                if stat.S_ISREG(info.st_mode) and catalogue.find(name) is None:
                    catalogue.put(Entry.of(name, tier.name, info, score=score_of(tier.accesses_min, at=at)))


def kept_files(folders: Mapping[str, TierFolder]) -> Iterator[TierFinding]:
    """Yield a finding for each file that a recovery moved to the ``kept`` folder."""
    for folder in folders.values():
        for name in folder.list_own_folder("kept"):
            text = f"another program wrote to both files of a migration; see {folder.directory}/.gdrkit-tiers/kept"
            yield TierFinding(FindingKind.KEPT, f"kept/{name}", folder.name, text)


def compare(catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool) -> Iterator[TierFinding]:
    """Yield the differences between catalogue and disks; with `repair`, also update the catalogue.

    Files are never changed.
    """
    connection = catalogue.new_connection()
    try:
        with convert_sqlite_errors("check"):
            connection.execute(_TABLE)
        for folder in folders.values():
            yield from _list_files(folder, connection)
        with convert_sqlite_errors("check"):
            names = _differing_names(connection)
        for name in names:
            yield from _compare_file(os.fsdecode(name), catalogue, folders, repair=repair)
    finally:
        connection.close()


def _list_files(folder: TierFolder, connection: Connection) -> Iterator[TierFinding]:
    """Insert the regular files of a tier into the temporary table, and yield a finding for each other file."""
    rows: list[tuple[bytes, str, int, int]] = []
    with convert_os_errors("scan", tier=folder.name):
        for name, info in folder.walk():
            if not stat.S_ISREG(info.st_mode):
                yield TierFinding(
                    FindingKind.FOREIGN, name, folder.name, "not a regular file; gdrkit does not touch it"
                )
                continue
            rows.append((os.fsencode(name), folder.name, info.st_size, info.st_nlink))
            if len(rows) == _BATCH_ROWS:
                _insert_rows(connection, rows)
                rows.clear()
    _insert_rows(connection, rows)


def _insert_rows(connection: Connection, rows: list[tuple[bytes, str, int, int]]) -> None:
    with convert_sqlite_errors("check"):
        connection.executemany("INSERT OR REPLACE INTO on_disk VALUES (?, ?, ?, ?)", rows)


def _differing_names(connection: Connection) -> list[bytes]:
    """Return the names with a possible difference, each once."""
    rows = connection.execute(
        "SELECT name FROM files WHERE NOT EXISTS (SELECT 1 FROM on_disk WHERE on_disk.name = files.name "
        "AND on_disk.tier = files.tier AND on_disk.size_bytes = files.size_bytes AND on_disk.links = files.links) "
        "UNION SELECT name FROM on_disk WHERE name NOT IN (SELECT name FROM files) "
        "UNION SELECT name FROM on_disk GROUP BY name HAVING count(*) > 1 ORDER BY 1"
    )
    return [row[0] for row in rows]


def _compare_file(
    name: str, catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool
) -> Iterator[TierFinding]:
    """Compare one file again, with its current state on disk."""
    entry = catalogue.find(name)
    copies = {tier: info for tier, folder in folders.items() if (info := _stat_regular(folder, name)) is not None}
    if len(copies) > 1 and not _is_migration_in_progress(folders):
        first = entry.tier if entry is not None and entry.tier in copies else next(iter(copies))
        others = ", ".join(tier for tier in copies if tier != first)
        yield TierFinding(FindingKind.TWICE, name, first, f"also in {others}")
    if entry is None:
        if copies:
            tier, info = next(iter(copies.items()))
            yield TierFinding(FindingKind.UNKNOWN, name, tier, "the catalogue did not have it", mended=repair)
            _record_file(catalogue, name, tier, info, repair=repair)
    elif not copies:
        yield _missing_file(entry, catalogue, folders, repair=repair)
    elif entry.tier not in copies:
        tier, info = next(iter(copies.items()))
        yield TierFinding(FindingKind.ELSEWHERE, name, tier, f"the catalogue had it in {entry.tier}", mended=repair)
        _record_file(catalogue, name, tier, info, repair=repair)
    elif (copies[entry.tier].st_size, copies[entry.tier].st_nlink) != (entry.size_bytes, entry.links):
        info = copies[entry.tier]
        text = (
            f"it has {info.st_size} bytes and {info.st_nlink} hard links; the catalogue had {entry.size_bytes} bytes "
            f"and {entry.links} hard links"
        )
        yield TierFinding(FindingKind.CHANGED, name, entry.tier, text, mended=repair)
        _record_file(catalogue, name, entry.tier, info, repair=repair)


def _record_file(catalogue: Catalogue, name: str, tier: str, info: os.stat_result, *, repair: bool) -> None:
    if repair:
        catalogue.record_file(name, tier, info)


def _missing_file(
    entry: Entry, catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool
) -> TierFinding:
    if entry.tier not in folders:
        return TierFinding(FindingKind.ABSENT, entry.name, entry.tier, "its tier is not available")
    if repair:
        catalogue.remove(entry.name)
    text = "no tier has it; another program removed it"
    return TierFinding(FindingKind.MISSING, entry.name, entry.tier, text, mended=repair)


def _stat_regular(folder: TierFolder, name: str) -> os.stat_result | None:
    info = folder.stat(name)
    return info if info is not None and stat.S_ISREG(info.st_mode) else None


def _is_migration_in_progress(folders: Mapping[str, TierFolder]) -> bool:
    """Return whether a migration is in progress, during which a file may briefly have its name in two tiers."""
    return any(recorded_ids(folder) for folder in folders.values())
