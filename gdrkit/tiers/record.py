"""The record of a migration, which is stored beside the copy while the migration is in progress.

The record is the file ``moves/ID.json`` in the ``.gdrkit-tiers`` folder of the destination. The migrating process keeps
the record locked, so a record that another process can lock belongs to a process that has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.serialization import from_json_data, to_json_data

if TYPE_CHECKING:
    from gdrkit.tiers.folder import TierFolder

__all__ = ["MoveRecord", "RecordedMove", "list_recorded_ids", "lock_dead_records"]

_SUFFIX = ".json"
# Largest size of a record that is read, in bytes.
_RECORD_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class RecordedMove:
    """The contents of a record: the migration of one file.

    Attributes
    ----------
    name, source : str
        Name of the file and its tier.
    inode, size_bytes, modified_ns : int
        Inode, size in bytes and modification time in nanoseconds of the file when the migration began.
    copy_inode : int
        Inode of the copy.
    """

    name: str
    source: str
    inode: int
    size_bytes: int
    modified_ns: int
    copy_inode: int

    def is_unchanged(self, file_status: os.stat_result) -> bool:
        """Return whether this stat result has the size and the modification time of the migrated file."""
        return (file_status.st_size, file_status.st_mtime_ns) == (self.size_bytes, self.modified_ns)


class MoveRecord:
    """A record that this process has locked.

    Parameters
    ----------
    folder : TierFolder
        Folder of the destination tier.
    move_id : str
        ID of the migration.
    descriptor : int
        Descriptor of the record file. It is closed with the record.
    move : RecordedMove or None
        Contents of the record. None: the record is incomplete, so the migration has not copied anything yet.
    """

    def __init__(self, folder: TierFolder, move_id: str, descriptor: int, move: RecordedMove | None) -> None:
        self.folder = folder
        self.id = move_id
        self.move = move
        self._descriptor = descriptor

    @classmethod
    def create(
        cls,
        folder: TierFolder,
        move_id: str,
        *,
        name: str,
        source: str,
        file_status: os.stat_result,
        copy_inode: int,
    ) -> MoveRecord:
        """Create a record that this process has locked, sync it to the disk and return it."""
        move = RecordedMove(name, source, file_status.st_ino, file_status.st_size, file_status.st_mtime_ns, copy_inode)
        moves_fd = folder.gdrkit_folder_fd("moves")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(move_id + _SUFFIX, flags, 0o600, dir_fd=moves_fd)
        record = cls(folder, move_id, descriptor, move)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # json.dumps escapes all characters that are not ASCII.
            _write_all(descriptor, json.dumps(to_json_data(move)).encode("ascii"))
            os.fsync(descriptor)
            os.fsync(moves_fd)
            # The caller has created the copy in this folder.
            os.fsync(folder.gdrkit_folder_fd("incoming"))
        except BaseException:
            record.remove()
            record.close()
            raise
        return record

    def remove(self) -> None:
        """Remove the record of a migration that has ended."""
        moves_fd = self.folder.gdrkit_folder_fd("moves")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.id + _SUFFIX, dir_fd=moves_fd)
        os.fsync(moves_fd)

    def close(self) -> None:
        """Close the record, which releases its lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def list_recorded_ids(folder: TierFolder) -> set[str]:
    """Return the IDs of the migrations into this tier that have a record. They are in progress or interrupted."""
    return {name.removesuffix(_SUFFIX) for name in folder.list_gdrkit_folder("moves")}


def lock_dead_records(folder: TierFolder) -> list[MoveRecord]:
    """Return the records of processes that have died, and lock them for this process. The caller closes each record."""
    records = []
    for name in folder.list_gdrkit_folder("moves"):
        try:
            descriptor = os.open(
                name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.gdrkit_folder_fd("moves")
            )
        except FileNotFoundError:
            continue  # The migration has just ended.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file without links has no name any more: the record was removed after it was opened.
            if not os.fstat(descriptor).st_nlink:
                raise BlockingIOError  # noqa: TRY301 - the migration ended between the two calls.
        except BlockingIOError:
            os.close(descriptor)
            continue
        records.append(MoveRecord(folder, name.removesuffix(_SUFFIX), descriptor, _read_move(descriptor)))
    return records


def _read_move(descriptor: int) -> RecordedMove | None:
    try:
        return from_json_data(RecordedMove, json.loads(os.pread(descriptor, _RECORD_BYTES_MAX, 0)))
    except (ValueError, UsageError):
        return None  # The record is incomplete. A migration does nothing before its record is on the disk.


def _write_all(descriptor: int, data: bytes) -> None:
    written_bytes = 0
    while written_bytes < len(data):
        written_bytes += os.write(descriptor, data[written_bytes:])
