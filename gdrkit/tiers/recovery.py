"""Recovery of migrations whose process died.

The state of the disks shows whether the copy had become the file (see :mod:`gdrkit.tiers.migration`). If a program has
written to both outside gdrkit, the recovery does not discard either: it moves one of them to the ``kept`` folder and
reports it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from gdrkit.host import rename_new
from gdrkit.tiers.finding import FindingKind, TierFinding
from gdrkit.tiers.kernel_errors import convert_os_errors
from gdrkit.tiers.names import printable
from gdrkit.tiers.record import dead_records, recorded_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.record import MoveRecord, RecordedMove

__all__ = ["interrupted_migrations", "recover"]


def interrupted_migrations(folders: Mapping[str, TierFolder]) -> Iterator[TierFinding]:
    """Yield a finding for each migration that :func:`recover` would complete or undo."""
    for folder in folders.values():
        for record in dead_records(folder):
            record.close()
            name = record.move.name if record.move else record.id
            yield TierFinding(FindingKind.INTERRUPTED, name, folder.name, "a process died while it migrated the file")


def recover(folders: Mapping[str, TierFolder], catalogue: Catalogue) -> list[TierFinding]:
    """Complete or undo all migrations whose process died.

    Parameters
    ----------
    folders : mapping
        Folders of the tiers by name.
    catalogue : Catalogue
        The catalogue, which is updated.

    Raises
    ------
    ApiError
        A tier cannot be changed. The records of the migrations that are left are still on the disks.
    """
    findings: list[TierFinding] = []
    for folder in folders.values():
        with convert_os_errors("recover", tier=folder.name):
            findings += _recover_into(folder, folders, catalogue)
    # The order matters: a record exists before its file is retired, and until the retired file is removed. So a retired
    # file that is listed now and has no record afterwards belongs to no migration.
    retired = {tier: folder.list_own_folder("retired") for tier, folder in folders.items()}
    recorded = set().union(*map(recorded_ids, folders.values()))
    for tier, names in retired.items():
        with convert_os_errors("recover", tier=tier):
            findings += _keep_unrecorded(folders[tier], set(names) - recorded)
    for identifier in set(catalogue.moves()) - recorded:
        catalogue.end_move(identifier)
    return findings


def _recover_into(folder: TierFolder, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> Iterator[TierFinding]:
    if folder.identity is None:
        return  # The tier is read-only: no file was ever migrated to it, and nothing can be changed now.
    with folder.locked(exclusive=True) as is_locked:
        if not is_locked:
            return
        records = dead_records(folder)
        # A migration creates its copy and its record under one lock, so a copy without a record was left by a process
        # that died between the two.
        for copy in set(folder.list_own_folder("incoming")) - recorded_ids(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy, dir_fd=folder.own_folder("incoming"))
    for record in records:
        try:
            yield from _settle(record, folders, catalogue)
        finally:
            record.close()


def _settle(record: MoveRecord, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> Iterator[TierFinding]:
    """Complete or undo the migration of one record, and remove the record."""
    move, destination = record.move, record.folder
    if move is not None:
        source = folders.get(move.source)
        if source is None:
            text = f"its migration from the tier {move.source} was interrupted, and that tier is not available now"
            yield TierFinding(FindingKind.INTERRUPTED, move.name, destination.name, text)
            return
        yield from _InterruptedMove(record, move, source).settle(catalogue)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record.id, dir_fd=destination.own_folder("incoming"))
    record.remove()
    catalogue.end_move(record.id)


class _InterruptedMove:
    """One interrupted migration, and the three places where its file may be.

    The stat results are those of the file under its name in the source, of the old file in the ``retired`` folder, and
    of the copy under the name in the destination. Each is None if the file is not there.
    """

    def __init__(self, record: MoveRecord, move: RecordedMove, source: TierFolder) -> None:
        self._id = record.id
        self._move = move
        self._source, self._destination = source, record.folder
        self._named = source.stat(move.name)
        self._retired = _stat_at(source.own_folder("retired"), record.id)
        copy = self._destination.stat(move.name)
        self._copy = copy if copy is not None and copy.st_ino == move.copy_inode else None

    def settle(self, catalogue: Catalogue) -> Iterator[TierFinding]:
        name = self._move.name
        if self._retired is None and self._named is not None:
            yield from self._discard_copy()
            catalogue.record_file(name, self._source.name, self._named)
        elif self._retired is not None and self._is_retired_valid():
            yield from self._discard_copy()
            self._restore_name()
            catalogue.record_file(name, self._source.name, self._retired)
            text = "the file had changed during its migration; it is back in its tier"
            yield TierFinding(FindingKind.INTERRUPTED, name, self._source.name, text, mended=True)
        else:
            if self._retired is not None:
                yield from self._discard_retired()
            if self._copy is not None:
                catalogue.record_file(name, self._destination.name, self._copy)

    def _is_retired_valid(self) -> bool:
        """Return whether the retired file is the valid one: it was written outside gdrkit, or the copy is gone."""
        if self._named is not None or self._retired is None:
            return False
        if self._copy is None:
            return self._destination.stat(self._move.name) is None
        return not self._move.is_unchanged(self._retired) and self._move.is_unchanged(self._copy)

    def _discard_copy(self) -> Iterator[TierFinding]:
        """Remove the copy, or keep it if another program has written to it."""
        if self._copy is None:
            return
        with self._destination.parent(self._move.name) as (folder, last):
            if self._move.is_unchanged(self._copy):
                os.unlink(last, dir_fd=folder)
            else:
                text = "another program wrote to the copy before the copy became the file"
                yield self._keep(folder, last, self._destination, text)
            os.fsync(folder)

    def _discard_retired(self) -> Iterator[TierFinding]:
        """Remove the retired file, or keep it if another program has written to it or the copy is gone."""
        retired = self._source.own_folder("retired")
        if self._retired is not None and self._move.is_unchanged(self._retired) and self._copy is not None:
            os.unlink(self._id, dir_fd=retired)
        else:
            text = "another program wrote to the file and to its copy; the older one is kept"
            yield self._keep(retired, self._id, self._source, text)
        os.fsync(retired)

    def _restore_name(self) -> None:
        retired = self._source.own_folder("retired")
        with self._source.parent(self._move.name, like=self._destination) as (folder, last):
            rename_new(self._id, last, folder=retired, new_folder=folder)
            os.fsync(folder)
        os.fsync(retired)

    def _keep(self, folder: int, last: str, tier: TierFolder, problem: str) -> TierFinding:
        """Move a file to the ``kept`` folder of its tier, and return the finding."""
        rename_new(last, self._id, folder=folder, new_folder=tier.own_folder("kept"))
        return TierFinding(FindingKind.KEPT, self._move.name, tier.name, f"{problem}, as kept/{self._id}")


def _keep_unrecorded(folder: TierFolder, names: set[str]) -> Iterator[TierFinding]:
    """Move retired files whose record is gone to the ``kept`` folder. Each may be the only copy of its data."""
    for name in names:
        try:
            rename_new(name, name, folder=folder.own_folder("retired"), new_folder=folder.own_folder("kept"))
        except FileNotFoundError:
            continue  # The migration has just ended.
        text = "the name and the tier of this file are unknown, because the record of its migration is gone"
        yield TierFinding(FindingKind.KEPT, f"kept/{printable(name)}", folder.name, text)


def _stat_at(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
