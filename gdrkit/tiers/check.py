"""Comparison of the catalogue with the disks, and repair of the catalogue.

The comparison lists the files on the disks in a temporary table, so it needs little memory even for a million files.
Other processes may change files during the comparison, so each difference is checked again before it is reported.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from gdrkit.tiers._sqlite import convert_sqlite_errors
from gdrkit.tiers.catalogue import Entry
from gdrkit.tiers.finding import FindingKind, TierFinding
from gdrkit.tiers.heat import score_from_heat
from gdrkit.tiers.kernel_errors import convert_os_errors
from gdrkit.tiers.record import list_recorded_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.tiers._sqlite import Connection
    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.configuration import Configuration
    from gdrkit.tiers.folder import TierFolder

__all__ = ["compare_with_disks", "fill_catalogue", "find_kept_files"]

# Number of rows that are inserted at a time.
_BATCH_ROWS = 1000
_CREATE_ON_DISK_TABLE = """
CREATE TEMP TABLE on_disk (
    name BLOB NOT NULL, tier TEXT NOT NULL, size_bytes INTEGER NOT NULL, links INTEGER NOT NULL,
    PRIMARY KEY (name, tier)
) WITHOUT ROWID
"""


def fill_catalogue(catalogue: Catalogue, configuration: Configuration, folders: Mapping[str, TierFolder]) -> None:
    """Fill an empty catalogue with the files on disk.

    The heat of the files was lost with the old catalogue. Each file gets the heat that its tier requires, so that it
    stays in the tier until it has cooled. If two tiers have a file of the same name, the catalogue gets the file in the
    faster tier.
    """
    now_half_lives = catalogue.now_half_lives()
    for tier in configuration.tiers:
        folder = folders.get(tier.name)
        if folder is None:
            continue
        if folder.identity is not None:
            catalogue.record_identity(tier.name, folder.identity)
        with convert_os_errors("scan", tier=tier.name):
            for name, file_status in folder.walk():
                if stat.S_ISREG(file_status.st_mode) and catalogue.find(name) is None:
                    score = score_from_heat(tier.accesses_min, at_half_lives=now_half_lives)
                    catalogue.put(Entry.from_stat(name, tier.name, file_status, score=score))


def find_kept_files(folders: Mapping[str, TierFolder]) -> Iterator[TierFinding]:
    """Yield a finding for each file that a recovery moved to the ``kept`` folder."""
    for folder in folders.values():
        for name in folder.list_gdrkit_folder("kept"):
            text = f"this file may be the only copy of its data; see {folder.directory}/.gdrkit-tiers/kept"
            yield TierFinding(FindingKind.KEPT, f"kept/{name}", folder.name, text)


def compare_with_disks(
    catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool
) -> Iterator[TierFinding]:
    """Yield the differences between catalogue and disks; with `repair`, also correct the catalogue.

    The files on the disks are never changed.
    """
    connection = catalogue.new_connection()
    try:
        with convert_sqlite_errors("check"):
            connection.execute(_CREATE_ON_DISK_TABLE)
        for folder in folders.values():
            yield from _insert_regular_files(folder, connection)
        with convert_sqlite_errors("check"):
            encoded_names = _find_differing_names(connection)
        for encoded_name in encoded_names:
            yield from _compare_file(os.fsdecode(encoded_name), catalogue, folders, repair=repair)
    finally:
        connection.close()


def _insert_regular_files(folder: TierFolder, connection: Connection) -> Iterator[TierFinding]:
    """Insert the regular files of a tier into the temporary table, and yield a finding for each other file."""
    rows: list[tuple[bytes, str, int, int]] = []
    with convert_os_errors("scan", tier=folder.name):
        for name, file_status in folder.walk():
            if not stat.S_ISREG(file_status.st_mode):
                yield TierFinding(
                    FindingKind.FOREIGN, name, folder.name, "not a regular file; gdrkit does not touch it"
                )
                continue
            rows.append((os.fsencode(name), folder.name, file_status.st_size, file_status.st_nlink))
            if len(rows) == _BATCH_ROWS:
                _insert_rows(connection, rows)
                rows.clear()
    _insert_rows(connection, rows)


def _insert_rows(connection: Connection, rows: list[tuple[bytes, str, int, int]]) -> None:
    with convert_sqlite_errors("check"):
        connection.executemany("INSERT OR REPLACE INTO on_disk VALUES (?, ?, ?, ?)", rows)


def _find_differing_names(connection: Connection) -> list[bytes]:
    """Return the encoded names of the files whose entry is wrong or missing, or that are in several tiers."""
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
    """Compare the entry of one file with the current state of the disks, and yield the differences."""
    entry = catalogue.find(name)
    status_by_tier = {
        tier: file_status
        for tier, folder in folders.items()
        if (file_status := _stat_regular_file(folder, name)) is not None
    }
    if len(status_by_tier) > 1 and not _is_migration_in_progress(folders):
        reported_tier = entry.tier if entry is not None and entry.tier in status_by_tier else next(iter(status_by_tier))
        other_tiers = ", ".join(tier for tier in status_by_tier if tier != reported_tier)
        yield TierFinding(FindingKind.TWICE, name, reported_tier, f"also in {other_tiers}")
    if entry is None:
        if status_by_tier:
            tier, file_status = next(iter(status_by_tier.items()))
            yield TierFinding(FindingKind.UNKNOWN, name, tier, "the catalogue did not have the file", mended=repair)
            _record_file(catalogue, name, tier, file_status, repair=repair)
    elif not status_by_tier:
        yield _handle_missing_file(entry, catalogue, folders, repair=repair)
    elif entry.tier not in status_by_tier:
        tier, file_status = next(iter(status_by_tier.items()))
        yield TierFinding(FindingKind.ELSEWHERE, name, tier, f"the catalogue had it in {entry.tier}", mended=repair)
        _record_file(catalogue, name, tier, file_status, repair=repair)
    elif (status_by_tier[entry.tier].st_size, status_by_tier[entry.tier].st_nlink) != (entry.size_bytes, entry.links):
        file_status = status_by_tier[entry.tier]
        text = (
            f"the file has {file_status.st_size} bytes and {file_status.st_nlink} hard links; "
            f"the catalogue had {entry.size_bytes} bytes and {entry.links} hard links"
        )
        yield TierFinding(FindingKind.CHANGED, name, entry.tier, text, mended=repair)
        _record_file(catalogue, name, entry.tier, file_status, repair=repair)


def _record_file(catalogue: Catalogue, name: str, tier: str, file_status: os.stat_result, *, repair: bool) -> None:
    if repair:
        catalogue.record_file(name, tier, file_status)


def _handle_missing_file(
    entry: Entry, catalogue: Catalogue, folders: Mapping[str, TierFolder], *, repair: bool
) -> TierFinding:
    """Return the finding about an entry without a file. With `repair`, remove the entry."""
    if entry.tier not in folders:
        return TierFinding(FindingKind.ABSENT, entry.name, entry.tier, "its tier is not available")
    if repair:
        catalogue.remove(entry.name)
    text = "no tier has the file; another program removed it"
    return TierFinding(FindingKind.MISSING, entry.name, entry.tier, text, mended=repair)


def _stat_regular_file(folder: TierFolder, name: str) -> os.stat_result | None:
    file_status = folder.stat(name)
    return file_status if file_status is not None and stat.S_ISREG(file_status.st_mode) else None


def _is_migration_in_progress(folders: Mapping[str, TierFolder]) -> bool:
    """Return whether a migration is in progress, during which two tiers may briefly have a file of the same name."""
    return any(list_recorded_ids(folder) for folder in folders.values())
