"""Migration of one file to another tier, without loss of data at any point of interruption.

The disks decide where a file is. The catalogue is updated last.

1. *record*: an empty copy and a record of the migration are created in the destination's own folder, and synced.
2. *copy*, *attributes*, *sync*: the copy gets all data and attributes, and is synced to the disk.
3. *verify*: the copy is read back and compared with the data that was read.
4. *rename*: the copy gets the name in the destination, where no file may have it. *folder*: the folder is synced.
5. *retire*: the old file loses its name. **At this moment the copy becomes the file.** A recovery that finds the record
   removes the copy if it runs before this moment, and the old file if it runs after it. *retired*: the folders are
   synced.
6. *catalogue*: the catalogue gets the new tier.
7. *remove*: the old file is removed. *forget*: the record is removed.

A program that opens the file for writing meanwhile ends the migration, and the file stays where it was. For readers,
the name always leads to a complete file, and programs that have the file open can continue to read it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import uuid
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, DataMismatch, Reason
from gdrkit.host import rename_new
from gdrkit.tiers.copying import copy_attributes, copy_data, keep_access_time, read_back
from gdrkit.tiers.guard import Guard
from gdrkit.tiers.names import shown
from gdrkit.tiers.record import MoveRecord
from gdrkit.tiers.refusal import busy, kernel_error, told

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.folder import TierFolder

__all__ = ["Observer", "Phase", "migrate_file"]


class Phase(enum.Enum):
    """The next step of a migration."""

    RECORD = "record"
    COPY = "copy"
    ATTRIBUTES = "attributes"
    SYNC = "sync"
    VERIFY = "verify"
    RENAME = "rename"
    FOLDER = "folder"
    RETIRE = "retire"
    RETIRED = "retired"
    CATALOGUE = "catalogue"
    REMOVE = "remove"
    FORGET = "forget"
    DONE = "done"


if TYPE_CHECKING:
    # Called before each phase, and before each part that is copied or read back, with the progress as `offset_bytes`.
    # An exception from it ends the migration as any other failure does.
    Observer = Callable[[Phase, str, int], None]


def migrate_file(
    name: str,
    *,
    source: TierFolder,
    destination: TierFolder,
    catalogue: Catalogue,
    limit_bytes: int,
    observe: Observer,
) -> int:
    """Move a file to another tier. Return the bytes that it takes there.

    Raises
    ------
    ApiError
        The file is unchanged and where it was. ``BUSY``: a program writes it. ``NO_SPACE``, ``NO_PERMISSION``,
        ``IO_ERROR``: the kernel reported it. ``CONFLICT``: the destination has a file of that name. ``NOT_SUPPORTED``:
        the file has other names (hard links).
    """
    with contextlib.ExitStack() as stack:
        with told("open", name=shown(name), tier=source.name):
            old = source.open(name, os.O_RDONLY)
        stack.callback(os.close, old)
        guard = stack.enter_context(Guard(old, name=name))
        with told("open", name=shown(name), tier=source.name):
            _check_name(source, name, guard.info)
        _check_links(guard.info, name)
        keep_access_time(old)
        move = _Migration(name, (source, destination), catalogue, observe, guard)
        size = guard.info.st_blocks * 512
        catalogue.begin_move((move.id, name, source.name, destination.name, size), limit_bytes=limit_bytes)
        try:
            with told("migrate", name=shown(name), source=source.name, destination=destination.name):
                move.run()
        except BaseException as error:
            move.undo(error)
            raise
        finally:
            move.close()
    return size


class _Migration:
    """The steps of one migration, and the undo of each step."""

    def __init__(
        self,
        name: str,
        way: tuple[TierFolder, TierFolder],
        catalogue: Catalogue,
        observe: Observer,
        guard: Guard,
    ) -> None:
        self.id = uuid.uuid4().hex
        self._name = name
        self._source, self._destination = way
        self._catalogue = catalogue
        self._observe = observe
        self._old, self._guard = guard.descriptor, guard
        self._copy = -1
        self._record: MoveRecord | None = None
        # Completed steps, newest last. If the migration fails, undo() reverts them.
        self._done: list[Phase] = []

    def run(self) -> None:
        self._step(Phase.RECORD, self._begin)
        digest = copy_data(self._old, self._copy, size_bytes=self._size, go_on=self._going_on(Phase.COPY))
        self._step(Phase.ATTRIBUTES, lambda: copy_attributes(self._old, self._copy, self._guard.info))
        self._step(Phase.SYNC, lambda: os.fsync(self._copy))
        back = read_back(self._old, self._copy, size_bytes=self._size, go_on=self._going_on(Phase.VERIFY))
        if back != digest:
            raise DataMismatch(first_offset_bytes=0, expected=digest[:16], actual=back[:16], length_bytes=self._size)
        self._step(Phase.RENAME, self._publish)
        self._step(Phase.FOLDER, self._sync_destination)
        self._step(Phase.RETIRE, self._retire)
        self._step(Phase.RETIRED, self._sync_source)
        self._step(Phase.CATALOGUE, self._tell_catalogue)
        self._step(Phase.REMOVE, self._remove)
        self._step(Phase.FORGET, self._forget)
        self._observe(Phase.DONE, self._name, self._size)

    @property
    def _size(self) -> int:
        return self._guard.info.st_size

    def _step(self, phase: Phase, action: Callable[[], None]) -> None:
        self._observe(phase, self._name, self._size if self._done else 0)
        action()
        self._done.append(phase)

    def _going_on(self, phase: Phase) -> Callable[[int], None]:
        def go_on(offset_bytes: int) -> None:
            self._observe(phase, self._name, offset_bytes)
            # A writer blocks until the next check, so it waits for one part and not for the whole file.
            self._guard.check()

        return go_on

    def _begin(self) -> None:
        with self._destination.locked(alone=False):
            # O_NOATIME: the verification must not change the access time.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOATIME
            self._copy = os.open(self.id, flags, 0o600, dir_fd=self._destination.own("incoming"))
            # A program that opens the copy for writing, once it has its name, waits until the catalogue is updated.
            fcntl.flock(self._copy, fcntl.LOCK_EX)
            self._record = MoveRecord.create(
                self._destination,
                self.id,
                name=self._name,
                source=self._source.name,
                info=self._guard.info,
                copy_inode=os.fstat(self._copy).st_ino,
            )

    def _publish(self) -> None:
        self._guard.check()
        with self._destination.parent(self._name, like=self._source) as (folder, last):
            rename_new(self.id, last, folder=self._destination.own("incoming"), new_folder=folder)

    def _sync_destination(self) -> None:
        with self._destination.parent(self._name) as (folder, _):
            os.fsync(folder)

    def _retire(self) -> None:
        retired = self._source.own("retired")
        self._check_copy()
        with self._source.parent(self._name) as (folder, last):
            self._guard.check()
            os.rename(last, self.id, src_dir_fd=folder, dst_dir_fd=retired)
            self._done.append(Phase.RETIRE)  # The step is also undone if one of the next calls fails.
        # Another process may just have put another file under the name, or started to write.
        if os.stat(self.id, dir_fd=retired, follow_symlinks=False).st_ino != self._guard.info.st_ino:
            raise busy("migrate", "another file took the name meanwhile", name=shown(self._name))
        self._guard.check()
        self._done.pop()

    def _check_copy(self) -> None:
        """Check that the copy still has its name: another process may have removed it or moved its folder."""
        found = self._destination.stat(self._name)
        if found is None or found.st_ino != os.fstat(self._copy).st_ino:
            gone = OSError(errno.ENOENT, "somebody took the copy away")
            raise kernel_error(gone, "migrate", name=shown(self._name), tier=self._destination.name)

    def _sync_source(self) -> None:
        os.fsync(self._source.own("retired"))
        with self._source.parent(self._name) as (folder, _):
            os.fsync(folder)

    def _tell_catalogue(self) -> None:
        self._guard.check()
        self._catalogue.see(self._name, self._destination.name, os.fstat(self._copy))

    def _remove(self) -> None:
        # This is the last check of both files before one of them is removed.
        self._check_copy()
        self._guard.check()
        retired = self._source.own("retired")
        os.unlink(self.id, dir_fd=retired)
        # The folder is synced before the record is removed: a recovery keeps a retired file without a record, because
        # it may be the only copy.
        os.fsync(retired)

    def _forget(self) -> None:
        if self._record is not None:
            self._record.remove()
        self._catalogue.end_move(self.id)

    def undo(self, error: BaseException) -> None:
        """Undo the completed steps, newest first. A later recovery undoes the rest by the record."""
        if Phase.REMOVE in self._done:
            error.add_note(f"{shown(self._name)!r} is in {self._destination.name} all the same")
            return
        steps = {
            Phase.CATALOGUE: self._untell_catalogue,
            Phase.RETIRE: self._unretire,
            Phase.RENAME: self._unpublish,
            Phase.RECORD: self._unbegin,
        }
        if self._copy >= 0 and Phase.RECORD not in self._done:
            self._done.insert(0, Phase.RECORD)
        try:
            for phase in reversed(self._done):
                if phase in steps:
                    steps[phase]()
            self._catalogue.end_move(self.id)
        except (OSError, ApiError) as second:
            error.add_note(f"then, while it was taken back: {second}; gdrkit tiers check --repair does the rest")

    def _untell_catalogue(self) -> None:
        self._catalogue.see(self._name, self._source.name, self._guard.info)

    def _unretire(self) -> None:
        with self._source.parent(self._name) as (folder, last):
            rename_new(self.id, last, folder=self._source.own("retired"), new_folder=folder)
            os.fsync(folder)
        os.fsync(self._source.own("retired"))

    def _unpublish(self) -> None:
        with self._destination.parent(self._name) as (folder, last):
            found = os.stat(last, dir_fd=folder, follow_symlinks=False)
            if found.st_ino != os.fstat(self._copy).st_ino:
                raise kernel_error(OSError(errno.EEXIST, "another file has the name"), "unlink", name=shown(self._name))
            os.unlink(last, dir_fd=folder)

    def _unbegin(self) -> None:
        if self._record is not None:
            self._record.remove()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.id, dir_fd=self._destination.own("incoming"))

    def close(self) -> None:
        """Close the descriptors and locks of the copy and the record."""
        if self._record is not None:
            self._record.close()
        if self._copy >= 0:
            os.close(self._copy)


def _check_name(source: TierFolder, name: str, info: os.stat_result) -> None:
    """Check that the locked file still has the name: another process may have migrated it just before."""
    here = source.stat(name)
    if here is None or here.st_ino != info.st_ino:
        raise FileNotFoundError(errno.ENOENT, "it has just gone elsewhere")


def _check_links(info: os.stat_result, name: str) -> None:
    if info.st_nlink > 1:
        raise ApiError(
            api=Api.NONE,
            operation="migrate",
            status=None,
            status_name="hard links",
            arguments={"name": shown(name), "links": info.st_nlink},
            reason=Reason.NOT_SUPPORTED,
            what_to_do="a file with several names stays where it is; remove the other names first",
            detail="its other names would keep the old bytes",
        )
