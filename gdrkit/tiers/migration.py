"""Migration of one file to another tier, without loss of data at any point of interruption.

The disks decide where a file is, so the catalogue is updated only after step 5. The words in italics are the phases.

1. *record*: an empty copy and a record of the migration are created in the destination's own folder, and synced.
2. *copy*, *attributes*, *sync*: the copy gets all data and attributes, and is synced to the disk.
3. *verify*: the copy is read back, and its digest is compared with the digest of the data that was copied.
4. *rename*: the copy gets the name of the file in the destination. The step fails if another file has that name there.
   *folder*: the folder of the copy is synced.
5. *retire*: the old file is renamed into the ``retired`` folder. **At this moment the copy becomes the file.** If the
   process dies earlier, a recovery removes the copy. If the process dies later, a recovery removes the old file.
   *retired*: the ``retired`` folder and the folder that had the old file are synced.
6. *catalogue*: the catalogue gets the new tier.
7. *remove*: the old file is removed. *forget*: the record is removed.

If a program opens the file for writing during the migration, the migration fails, and the file stays in its tier.
Readers are not disturbed: the name always leads to a complete file, and an open file can still be read.
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
from gdrkit.host import rename_without_replacing
from gdrkit.tiers.copying import (
    CHUNK_BYTES,
    compute_copy_digest,
    copy_attributes,
    copy_data,
    find_first_difference,
    preserve_access_time,
)
from gdrkit.tiers.guard import Guard
from gdrkit.tiers.kernel_errors import busy_error, convert_os_errors, kernel_error
from gdrkit.tiers.names import printable
from gdrkit.tiers.record import MoveRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.folder import TierFolder
    from gdrkit.tiers.schedule import RateLimiter

__all__ = ["Phase", "PhaseObserver", "migrate_file"]


class Phase(enum.Enum):
    """The step of a migration that begins, or DONE after the last step."""

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
    # A function that is called with the phase, the name of the file and the progress in bytes: before each phase, and
    # before each chunk that is copied or read back. If the function raises an exception before the old file is removed,
    # the migration is undone.
    PhaseObserver = Callable[[Phase, str, int], None]


def migrate_file(
    name: str,
    *,
    source: TierFolder,
    destination: TierFolder,
    catalogue: Catalogue,
    limit_bytes: int,
    observe: PhaseObserver,
    rate_limiter: RateLimiter | None = None,
) -> int:
    """Move a file to another tier.

    Parameters
    ----------
    name : str
        Logical name of the file.
    source, destination : TierFolder
        The tier that has the file, and the tier that it is moved to.
    catalogue : Catalogue
        The catalogue. It gets the new tier of the file.
    limit_bytes : int
        Space that gdrkit may use in the destination in total, in bytes.
    observe : callable
        Called before each phase, and before each chunk that is copied or read back; see `PhaseObserver`.
    rate_limiter : RateLimiter or None
        The rate limit of a background run. None: the file is copied as fast as possible.

    Returns
    -------
    int
        Space that the file takes in the destination, in bytes.

    Raises
    ------
    DataMismatch
        The copy differs from the file: the disk of the destination, or the memory, has changed bytes.
    ApiError
        The migration failed, and the file is unchanged in its tier. ``BUSY``: a program writes the file. ``NO_SPACE``,
        ``NO_PERMISSION``, ``IO_ERROR``: a system call failed. ``CONFLICT``: the destination has a file of that name.
        ``NOT_SUPPORTED``: the file has other names (hard links).
    """
    with contextlib.ExitStack() as stack:
        with convert_os_errors("open", name=printable(name), tier=source.name):
            source_fd = source.open(name, os.O_RDONLY)
        stack.callback(os.close, source_fd)
        guard = stack.enter_context(Guard(source_fd, name=name))
        with convert_os_errors("open", name=printable(name), tier=source.name):
            _check_file_has_name(source, name, guard.initial_status)
        _check_single_link(guard.initial_status, name)
        preserve_access_time(source_fd)
        migration = _Migration(name, (source, destination), catalogue, observe, guard, rate_limiter=rate_limiter)
        # st_blocks counts blocks of 512 bytes.
        allocated_bytes = guard.initial_status.st_blocks * 512
        catalogue.reserve_space(
            (migration.id, name, source.name, destination.name, allocated_bytes), limit_bytes=limit_bytes
        )
        try:
            with convert_os_errors("migrate", name=printable(name), source=source.name, destination=destination.name):
                migration.run()
        except BaseException as error:
            migration.undo(error)
            raise
        finally:
            migration.close()
    return allocated_bytes


class _Migration:
    """The steps of one migration, and the undo of each step."""

    def __init__(
        self,
        name: str,
        source_and_destination: tuple[TierFolder, TierFolder],
        catalogue: Catalogue,
        observe: PhaseObserver,
        guard: Guard,
        *,
        rate_limiter: RateLimiter | None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self._name = name
        self._source, self._destination = source_and_destination
        self._catalogue = catalogue
        self._observe = observe
        self._source_fd, self._guard = guard.descriptor, guard
        self._rate_limiter = rate_limiter
        self._chunk_bytes = CHUNK_BYTES if rate_limiter is None else rate_limiter.chunk_bytes
        self._unsynced_bytes = 0
        self._copy_fd = -1
        self._record: MoveRecord | None = None
        # Completed steps, newest last. If the migration fails, undo() reverts them.
        self._completed_steps: list[Phase] = []

    def run(self) -> None:
        self._run_step(Phase.RECORD, self._create_copy)
        source_digest = copy_data(
            self._source_fd,
            self._copy_fd,
            size_bytes=self._size_bytes,
            on_chunk=self._make_chunk_observer(Phase.COPY),
            chunk_bytes=self._chunk_bytes,
        )
        self._run_step(
            Phase.ATTRIBUTES, lambda: copy_attributes(self._source_fd, self._copy_fd, self._guard.initial_status)
        )
        self._run_step(Phase.SYNC, lambda: os.fsync(self._copy_fd))
        copy_digest = compute_copy_digest(
            self._source_fd,
            self._copy_fd,
            size_bytes=self._size_bytes,
            on_chunk=self._make_chunk_observer(Phase.VERIFY),
            chunk_bytes=self._chunk_bytes,
        )
        if copy_digest != source_digest:
            raise self._make_mismatch_error()
        self._run_step(Phase.RENAME, self._rename_copy)
        self._run_step(Phase.FOLDER, self._sync_destination)
        self._run_step(Phase.RETIRE, self._retire_source)
        self._run_step(Phase.RETIRED, self._sync_source)
        self._run_step(Phase.CATALOGUE, self._update_catalogue)
        self._run_step(Phase.REMOVE, self._remove_retired_file)
        self._run_step(Phase.FORGET, self._remove_record)
        self._observe(Phase.DONE, self._name, self._size_bytes)

    def _make_mismatch_error(self) -> DataMismatch | OSError:
        """Return the exception for a copy whose digest is wrong, with the first byte that differs from the file."""
        offset_bytes = find_first_difference(
            self._source_fd,
            self._copy_fd,
            size_bytes=self._size_bytes,
            on_chunk=self._make_chunk_observer(Phase.VERIFY),
            chunk_bytes=self._chunk_bytes,
        )
        if offset_bytes is None:
            # One of the earlier reads, of the file or of the copy, returned wrong bytes.
            text = "the digests of the file and its copy differ, but a second comparison finds no difference"
            return OSError(errno.EIO, text)
        excerpt_bytes = min(16, self._size_bytes - offset_bytes)
        return DataMismatch(
            first_offset_bytes=offset_bytes,
            expected=os.pread(self._source_fd, excerpt_bytes, offset_bytes),
            actual=os.pread(self._copy_fd, excerpt_bytes, offset_bytes),
            length_bytes=self._size_bytes,
        )

    @property
    def _size_bytes(self) -> int:
        return self._guard.initial_status.st_size

    def _run_step(self, phase: Phase, action: Callable[[], None]) -> None:
        # The step RECORD is the only one before the copy. After the copy, the progress is the size of the file.
        self._observe(phase, self._name, self._size_bytes if self._completed_steps else 0)
        action()
        self._completed_steps.append(phase)

    def _make_chunk_observer(self, phase: Phase) -> Callable[[int, int], None]:
        def on_chunk(offset_bytes: int, length_bytes: int) -> None:
            self._observe(phase, self._name, offset_bytes)
            if self._rate_limiter is not None:
                self._rate_limiter.wait_and_charge(length_bytes)
                if phase is Phase.COPY:
                    self._sync_if_due(self._rate_limiter, length_bytes)
            # A program that opens the file for writing blocks until the next check, so for one chunk at most.
            self._guard.check()

        return on_chunk

    def _sync_if_due(self, rate_limiter: RateLimiter, next_chunk_bytes: int) -> None:
        """Sync the copy before more than `rate_limiter.unsynced_bytes_max` bytes of it are only in memory."""
        if self._unsynced_bytes + next_chunk_bytes > rate_limiter.unsynced_bytes_max:
            os.fdatasync(self._copy_fd)
            self._unsynced_bytes = 0
        self._unsynced_bytes += next_chunk_bytes

    def _create_copy(self) -> None:
        """Create the empty copy, lock it, and write the record of the migration."""
        with self._destination.hold_lock(exclusive=False):
            # O_NOATIME: the verification must not change the access time.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOATIME
            self._copy_fd = os.open(self.id, flags, 0o600, dir_fd=self._destination.gdrkit_folder_fd("incoming"))
            # Once the copy has its name, another process may open it for writing through gdrkit. The lock makes that
            # open wait for the end of the migration.
            fcntl.flock(self._copy_fd, fcntl.LOCK_EX)
            self._record = MoveRecord.create(
                self._destination,
                self.id,
                name=self._name,
                source=self._source.name,
                file_status=self._guard.initial_status,
                copy_inode=os.fstat(self._copy_fd).st_ino,
            )

    def _rename_copy(self) -> None:
        """Give the copy the name of the file in the destination."""
        self._guard.check()
        with self._destination.open_parent(self._name, create_like=self._source) as (parent_fd, base_name):
            rename_without_replacing(
                self.id, base_name, folder_fd=self._destination.gdrkit_folder_fd("incoming"), new_folder_fd=parent_fd
            )

    def _sync_destination(self) -> None:
        with self._destination.open_parent(self._name) as (parent_fd, _):
            os.fsync(parent_fd)

    def _retire_source(self) -> None:
        """Rename the old file into the ``retired`` folder. From that moment the copy is the file."""
        retired_fd = self._source.gdrkit_folder_fd("retired")
        self._check_copy_has_name()
        with self._source.open_parent(self._name) as (parent_fd, base_name):
            self._guard.check()
            os.rename(base_name, self.id, src_dir_fd=parent_fd, dst_dir_fd=retired_fd)
            # If one of the next calls fails, undo() must revert this step too. If none fails, _run_step() appends the
            # phase again.
            self._completed_steps.append(Phase.RETIRE)
        # Before the rename, another process may have given the name to another file, or opened the file for writing.
        if os.stat(self.id, dir_fd=retired_fd, follow_symlinks=False).st_ino != self._guard.initial_status.st_ino:
            raise busy_error("migrate", "another file has taken the name", name=printable(self._name))
        self._guard.check()
        self._completed_steps.pop()

    def _check_copy_has_name(self) -> None:
        """Check that the copy still has its name: another process may have removed it or moved its folder."""
        file_status = self._destination.stat(self._name)
        if file_status is None or file_status.st_ino != os.fstat(self._copy_fd).st_ino:
            error = OSError(errno.ENOENT, "another program removed or renamed the copy")
            raise kernel_error(error, "migrate", name=printable(self._name), tier=self._destination.name)

    def _sync_source(self) -> None:
        os.fsync(self._source.gdrkit_folder_fd("retired"))
        with self._source.open_parent(self._name) as (parent_fd, _):
            os.fsync(parent_fd)

    def _update_catalogue(self) -> None:
        self._guard.check()
        self._catalogue.record_file(self._name, self._destination.name, os.fstat(self._copy_fd))

    def _remove_retired_file(self) -> None:
        # This is the last check of both files before one of them is removed.
        self._check_copy_has_name()
        self._guard.check()
        retired_fd = self._source.gdrkit_folder_fd("retired")
        os.unlink(self.id, dir_fd=retired_fd)
        # The folder is synced before the record is removed: a recovery keeps a retired file without a record, because
        # it may be the only copy.
        os.fsync(retired_fd)

    def _remove_record(self) -> None:
        if self._record is not None:
            self._record.remove()
        self._catalogue.release_reservation(self.id)

    def undo(self, error: BaseException) -> None:
        """Undo the completed steps, newest first. If that fails, a later recovery undoes the rest."""
        if Phase.REMOVE in self._completed_steps:
            error.add_note(
                f"{printable(self._name)!r} was moved to {self._destination.name}, although a later step failed"
            )
            return
        undo_actions = {
            Phase.CATALOGUE: self._restore_catalogue,
            Phase.RETIRE: self._restore_source_name,
            Phase.RENAME: self._remove_copy_name,
            Phase.RECORD: self._remove_copy,
        }
        # The step RECORD may have failed after it created the copy.
        if self._copy_fd >= 0 and Phase.RECORD not in self._completed_steps:
            self._completed_steps.insert(0, Phase.RECORD)
        try:
            for phase in reversed(self._completed_steps):
                if phase in undo_actions:
                    undo_actions[phase]()
            self._catalogue.release_reservation(self.id)
        except (OSError, ApiError) as undo_error:
            error.add_note(f"the undo of the migration failed: {undo_error}; gdrkit tiers check --repair completes it")

    def _restore_catalogue(self) -> None:
        self._catalogue.record_file(self._name, self._source.name, self._guard.initial_status)

    def _restore_source_name(self) -> None:
        with self._source.open_parent(self._name) as (parent_fd, base_name):
            rename_without_replacing(
                self.id, base_name, folder_fd=self._source.gdrkit_folder_fd("retired"), new_folder_fd=parent_fd
            )
            os.fsync(parent_fd)
        os.fsync(self._source.gdrkit_folder_fd("retired"))

    def _remove_copy_name(self) -> None:
        """Remove the name of the copy in the destination."""
        with self._destination.open_parent(self._name) as (parent_fd, base_name):
            file_status = os.stat(base_name, dir_fd=parent_fd, follow_symlinks=False)
            if file_status.st_ino != os.fstat(self._copy_fd).st_ino:
                error = OSError(errno.EEXIST, "another file has the name")
                raise kernel_error(error, "unlink", name=printable(self._name))
            os.unlink(base_name, dir_fd=parent_fd)

    def _remove_copy(self) -> None:
        if self._record is not None:
            self._record.remove()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.id, dir_fd=self._destination.gdrkit_folder_fd("incoming"))

    def close(self) -> None:
        """Close the descriptors and locks of the copy and the record."""
        if self._record is not None:
            self._record.close()
        if self._copy_fd >= 0:
            os.close(self._copy_fd)


def _check_file_has_name(source: TierFolder, name: str, file_status: os.stat_result) -> None:
    """Check that the locked file still has the name: another process may have migrated it before the lock."""
    named_status = source.stat(name)
    if named_status is None or named_status.st_ino != file_status.st_ino:
        raise FileNotFoundError(errno.ENOENT, "another process has just moved the file")


def _check_single_link(file_status: os.stat_result, name: str) -> None:
    if file_status.st_nlink > 1:
        raise ApiError(
            api=Api.NONE,
            operation="migrate",
            status=None,
            status_name="hard links",
            arguments={"name": printable(name), "links": file_status.st_nlink},
            reason=Reason.NOT_SUPPORTED,
            what_to_do="a file with several hard links stays where it is; remove the other names first",
            detail="the other names would keep the old bytes",
        )
