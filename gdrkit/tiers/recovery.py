"""Recovery of migrations whose process died.

The recovery finds out from the tiers whether the copy had already replaced the old file (see
:mod:`gdrkit.tiers.migration`). If another program wrote to the old file and to its copy, the recovery deletes neither.
It moves one of them to the ``kept`` folder and reports it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from gdrkit.host import rename_without_replacing
from gdrkit.tiers.finding import FindingKind, TierFinding
from gdrkit.tiers.kernel_errors import convert_os_errors
from gdrkit.tiers.names import printable
from gdrkit.tiers.record import list_recorded_ids, lock_dead_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.record import MoveRecord, RecordedMove

__all__ = ["find_interrupted_migrations", "recover"]


def find_interrupted_migrations(folders: Mapping[str, TierFolder]) -> Iterator[TierFinding]:
    """Yield a finding for each migration that :func:`recover` would try to complete or undo."""
    for folder in folders.values():
        for record in lock_dead_records(folder):
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
        The catalogue. It gets the resulting tiers of the files.

    Raises
    ------
    ApiError
        A tier cannot be changed. The records of the migrations that are not recovered yet are still on the disks.
    """
    findings: list[TierFinding] = []
    for folder in folders.values():
        with convert_os_errors("recover", tier=folder.name):
            findings += _recover_into(folder, folders, catalogue)
    # A migration creates its record before it moves the old file to the ``retired`` folder, and removes the old file
    # before the record. So the retired files must be listed before the records. A listed file without a record then
    # belongs to no migration.
    retired_names_by_tier = {tier: folder.list_gdrkit_folder("retired") for tier, folder in folders.items()}
    recorded_move_ids = set().union(*map(list_recorded_ids, folders.values()))
    for tier, names in retired_names_by_tier.items():
        with convert_os_errors("recover", tier=tier):
            findings += _keep_unrecorded_files(folders[tier], set(names) - recorded_move_ids)
    for move_id in set(catalogue.reserved_move_ids()) - recorded_move_ids:
        catalogue.release_reservation(move_id)
    return findings


def _recover_into(folder: TierFolder, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> Iterator[TierFinding]:
    """Recover the interrupted migrations into one tier."""
    if folder.identity is None:
        return  # This user cannot write to the tier, or cannot read its identity, so nothing can be changed.
    with folder.hold_lock(exclusive=True) as is_locked:
        if not is_locked:
            return
        records = lock_dead_records(folder)
        # A migration creates its copy and its record while it holds the shared lock. So a copy without a record is from
        # a process that died before it had created the record.
        for copy_id in set(folder.list_gdrkit_folder("incoming")) - list_recorded_ids(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy_id, dir_fd=folder.gdrkit_folder_fd("incoming"))
    for record in records:
        try:
            yield from _complete_or_undo(record, folders, catalogue)
        finally:
            record.close()


def _complete_or_undo(
    record: MoveRecord, folders: Mapping[str, TierFolder], catalogue: Catalogue
) -> Iterator[TierFinding]:
    """Complete or undo the migration of one record, and remove the record."""
    move, destination = record.move, record.folder
    if move is not None:
        source = folders.get(move.source)
        if source is None:
            text = f"its migration from the tier {move.source} was interrupted, and that tier is not available now"
            yield TierFinding(FindingKind.INTERRUPTED, move.name, destination.name, text)
            return
        yield from _InterruptedMove(record, move, source).complete_or_undo(catalogue)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record.id, dir_fd=destination.gdrkit_folder_fd("incoming"))
    record.remove()
    catalogue.release_reservation(record.id)


class _InterruptedMove:
    """One interrupted migration, with the stat(2) results of the three places where its file may be.

    Attributes
    ----------
    _source_status : os.stat_result or None
        The file under its name in the source; None if the name does not exist.
    _retired_status : os.stat_result or None
        The old file in the ``retired`` folder of the source; None if it is not there.
    _copy_status : os.stat_result or None
        The copy under its name in the destination; None if the name does not exist, or belongs to another file.
    """

    def __init__(self, record: MoveRecord, move: RecordedMove, source: TierFolder) -> None:
        self._id = record.id
        self._move = move
        self._source, self._destination = source, record.folder
        self._source_status = source.stat(move.name)
        self._retired_status = _stat_at(source.gdrkit_folder_fd("retired"), record.id)
        file_status = self._destination.stat(move.name)
        self._copy_status = file_status if file_status is not None and file_status.st_ino == move.copy_inode else None

    def complete_or_undo(self, catalogue: Catalogue) -> Iterator[TierFinding]:
        """Complete or undo the migration, and yield the findings for the administrator."""
        name = self._move.name
        if self._retired_status is None and self._source_status is not None:
            # The file was not retired yet, so the migration is undone.
            yield from self._discard_copy()
            catalogue.record_file(name, self._source.name, self._source_status)
        elif self._retired_status is not None and self._must_restore_name():
            # The retired file has the newest or the only data, so the migration is undone.
            yield from self._discard_copy()
            self._restore_source_name()
            catalogue.record_file(name, self._source.name, self._retired_status)
            text = "the file had changed during its migration; it is back in its tier"
            yield TierFinding(FindingKind.INTERRUPTED, name, self._source.name, text, mended=True)
        else:
            # The copy has become the file, so the migration is completed.
            if self._retired_status is not None:
                yield from self._discard_retired()
            if self._copy_status is not None:
                catalogue.record_file(name, self._destination.name, self._copy_status)

    def _must_restore_name(self) -> bool:
        """Return whether the retired file must get its name back, because it has the newest or the only data.

        Either only the retired file was written during the migration, or the copy does not exist and no other file has
        its name in the destination.
        """
        if self._source_status is not None or self._retired_status is None:
            return False
        if self._copy_status is None:
            return self._destination.stat(self._move.name) is None
        return not self._move.is_unchanged(self._retired_status) and self._move.is_unchanged(self._copy_status)

    def _discard_copy(self) -> Iterator[TierFinding]:
        """Remove the copy, or keep it if another program has written to it."""
        if self._copy_status is None:
            return
        with self._destination.open_parent(self._move.name) as (parent_fd, base_name):
            if self._move.is_unchanged(self._copy_status):
                os.unlink(base_name, dir_fd=parent_fd)
            else:
                text = "another program wrote to the copy before the migration was complete; gdrkit kept the copy"
                yield self._move_to_kept(parent_fd, base_name, self._destination, text)
            os.fsync(parent_fd)

    def _discard_retired(self) -> Iterator[TierFinding]:
        """Remove the retired file, or keep it if another program has written to it or the copy is gone."""
        retired_fd = self._source.gdrkit_folder_fd("retired")
        if (
            self._retired_status is not None
            and self._move.is_unchanged(self._retired_status)
            and self._copy_status is not None
        ):
            os.unlink(self._id, dir_fd=retired_fd)
        else:
            text = "another program wrote to the old file or replaced the new one; gdrkit kept the old file"
            yield self._move_to_kept(retired_fd, self._id, self._source, text)
        os.fsync(retired_fd)

    def _restore_source_name(self) -> None:
        retired_fd = self._source.gdrkit_folder_fd("retired")
        with self._source.open_parent(self._move.name, create_like=self._destination) as (parent_fd, base_name):
            rename_without_replacing(self._id, base_name, folder_fd=retired_fd, new_folder_fd=parent_fd)
            os.fsync(parent_fd)
        os.fsync(retired_fd)

    def _move_to_kept(self, parent_fd: int, base_name: str, tier: TierFolder, problem: str) -> TierFinding:
        """Move a file to the ``kept`` folder of its tier, and return the finding."""
        rename_without_replacing(base_name, self._id, folder_fd=parent_fd, new_folder_fd=tier.gdrkit_folder_fd("kept"))
        return TierFinding(FindingKind.KEPT, self._move.name, tier.name, f"{problem}, as kept/{self._id}")


def _keep_unrecorded_files(folder: TierFolder, names: set[str]) -> Iterator[TierFinding]:
    """Move retired files whose record is gone to the ``kept`` folder. Each may be the only copy of its data."""
    for name in names:
        try:
            rename_without_replacing(
                name, name, folder_fd=folder.gdrkit_folder_fd("retired"), new_folder_fd=folder.gdrkit_folder_fd("kept")
            )
        except FileNotFoundError:
            continue  # The migration has just ended.
        text = "the old name of this file is unknown, because the record of its migration is gone"
        yield TierFinding(FindingKind.KEPT, f"kept/{printable(name)}", folder.name, text)


def _stat_at(folder_fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
