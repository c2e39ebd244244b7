"""Recovery of migrations whose process died.

The state of the disks shows whether the copy had become the file (see :mod:`gdrkit.tiers.migration`). If a program
wrote to both outside gdrkit, the recovery does not choose: it moves one of them to ``kept`` and reports it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from gdrkit.host import rename_new
from gdrkit.tiers.finding import Finding, Kind
from gdrkit.tiers.names import shown
from gdrkit.tiers.record import dead_records, recorded
from gdrkit.tiers.refusal import told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.record import Moved, MoveRecord

__all__ = ["interrupted", "recover"]


def interrupted(folders: Mapping[str, TierFolder]) -> Iterator[Finding]:
    """Yield a finding for each migration that :func:`recover` would complete or undo."""
    for folder in folders.values():
        for record in dead_records(folder):
            record.close()
            name = record.moved.name if record.moved else record.id
            yield Finding(Kind.INTERRUPTED, name, folder.name, "a process died while it migrated the file")


def recover(folders: Mapping[str, TierFolder], catalogue: Catalogue) -> list[Finding]:
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
        A tier cannot be changed. The rest is still recorded.
    """
    found: list[Finding] = []
    for folder in folders.values():
        with told("recover", tier=folder.name):
            found += _recover_into(folder, folders, catalogue)
    # The order matters: a record exists before its file is retired, and until the retired file is removed. So a retired
    # file that is listed now and has no record afterwards belongs to no migration.
    retired = {tier: folder.names_of("retired") for tier, folder in folders.items()}
    known = set().union(*map(recorded, folders.values()))
    for tier, names in retired.items():
        with told("recover", tier=tier):
            found += _unclaimed(folders[tier], set(names) - known)
    for identifier in set(catalogue.moves()) - known:
        catalogue.end_move(identifier)
    return found


def _recover_into(folder: TierFolder, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> Iterator[Finding]:
    if folder.identity is None:
        return  # The tier is read-only: no file was ever migrated to it, and nothing can be changed now.
    with folder.locked(alone=True) as is_alone:
        if not is_alone:
            return
        records = dead_records(folder)
        # A migration creates its copy and its record under one lock.
        for left in set(folder.names_of("incoming")) - recorded(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left, dir_fd=folder.own("incoming"))
    for record in records:
        try:
            yield from _settle(record, folders, catalogue)
        finally:
            record.close()


def _settle(record: MoveRecord, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> Iterator[Finding]:
    moved, destination = record.moved, record.folder
    if moved is not None:
        source = folders.get(moved.source)
        if source is None:
            text = f"its migration from {moved.source} ended early, and there is no such tier now"
            yield Finding(Kind.INTERRUPTED, moved.name, destination.name, text)
            return
        yield from _Interrupted(record, moved, source).settle(catalogue)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record.id, dir_fd=destination.own("incoming"))
    record.remove()
    catalogue.end_move(record.id)


class _Interrupted:
    """One interrupted migration, and the three places where its file may be."""

    def __init__(self, record: MoveRecord, moved: Moved, source: TierFolder) -> None:
        self._id = record.id
        self._moved = moved
        self._source, self._destination = source, record.folder
        self._here = source.stat(moved.name)
        self._retired = _stat_at(source.own("retired"), record.id)
        copy = self._destination.stat(moved.name)
        self._copy = copy if copy is not None and copy.st_ino == moved.copy_inode else None

    def settle(self, catalogue: Catalogue) -> Iterator[Finding]:
        name = self._moved.name
        if self._retired is None and self._here is not None:
            yield from self._drop_copy()
            catalogue.see(name, self._source.name, self._here)
        elif self._retired is not None and self._must_return():
            # The retired file was written outside gdrkit, or the copy is gone. So the old file is the valid one.
            yield from self._drop_copy()
            self._put_back()
            catalogue.see(name, self._source.name, self._retired)
            text = "the file had changed during its migration, and is back"
            yield Finding(Kind.INTERRUPTED, name, self._source.name, text, mended=True)
        else:
            if self._retired is not None:
                yield from self._drop_retired()
            if self._copy is not None:
                catalogue.see(name, self._destination.name, self._copy)

    def _must_return(self) -> bool:
        if self._here is not None or self._retired is None:
            return False
        if self._copy is None:
            return self._destination.stat(self._moved.name) is None
        return not self._moved.is_unchanged(self._retired) and self._moved.is_unchanged(self._copy)

    def _drop_copy(self) -> Iterator[Finding]:
        if self._copy is None:
            return
        with self._destination.parent(self._moved.name) as (folder, last):
            if self._moved.is_unchanged(self._copy):
                os.unlink(last, dir_fd=folder)
            else:
                yield self._keep(folder, last, self._destination, "somebody wrote to a copy that was not the file yet")
            os.fsync(folder)

    def _drop_retired(self) -> Iterator[Finding]:
        retired = self._source.own("retired")
        if self._retired is not None and self._moved.is_unchanged(self._retired) and self._copy is not None:
            os.unlink(self._id, dir_fd=retired)
        else:
            text = "somebody wrote to the file and to its copy: the older one is kept"
            yield self._keep(retired, self._id, self._source, text)
        os.fsync(retired)

    def _put_back(self) -> None:
        retired = self._source.own("retired")
        with self._source.parent(self._moved.name, like=self._destination) as (folder, last):
            rename_new(self._id, last, folder=retired, new_folder=folder)
            os.fsync(folder)
        os.fsync(retired)

    def _keep(self, folder: int, last: str, tier: TierFolder, why: str) -> Finding:
        rename_new(last, self._id, folder=folder, new_folder=tier.own("kept"))
        return Finding(Kind.KEPT, self._moved.name, tier.name, f"{why}, as kept/{self._id}")


def _unclaimed(folder: TierFolder, names: set[str]) -> Iterator[Finding]:
    """Keep retired files whose record is gone. Each may be the only copy of its data."""
    for left in names:
        try:
            rename_new(left, left, folder=folder.own("retired"), new_folder=folder.own("kept"))
        except FileNotFoundError:
            continue  # The migration has just ended.
        text = "nobody knows what this was: the record of its migration is gone"
        yield Finding(Kind.KEPT, f"kept/{shown(left)}", folder.name, text)


def _stat_at(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
