"""What is written down of a migration, beside its copy, while it goes on.

Level 4. ``moves/ID.json`` in the destination's own folder. Whoever migrates keeps it locked, so that a record that can
be locked is that of a process which is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.plain import from_plain, to_plain

if TYPE_CHECKING:
    from gdrkit.gds.tiers.folder import TierFolder

__all__ = ["MoveRecord", "Moved", "dead_records", "recorded"]

_SUFFIX = ".json"
_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Moved:
    """The migration of one file.

    Attributes
    ----------
    name, source : str
        The file and its tier.
    inode, size_bytes, modified_ns : int
        The file as it was when the migration began.
    copy_inode : int
        The copy.
    """

    name: str
    source: str
    inode: int
    size_bytes: int
    modified_ns: int
    copy_inode: int

    def is_unchanged(self, info: os.stat_result) -> bool:
        """Whether this has the size and the time of the file that was migrated."""
        return (info.st_size, info.st_mtime_ns) == (self.size_bytes, self.modified_ns)


class MoveRecord:
    """A record that we have locked.

    Parameters
    ----------
    folder : TierFolder
        The destination.
    identifier : str
        Of the migration.
    descriptor : int
        Of the file; closed with the record.
    moved : Moved or None
        What it says; None: it was never complete, so that nothing had been done yet.
    """

    def __init__(self, folder: TierFolder, identifier: str, descriptor: int, moved: Moved | None) -> None:
        self.folder = folder
        self.id = identifier
        self.moved = moved
        self._descriptor = descriptor

    @classmethod
    def create(
        cls, folder: TierFolder, identifier: str, *, name: str, source: str, info: os.stat_result, copy_inode: int
    ) -> MoveRecord:
        """Write one down; it is on the device when this returns."""
        moved = Moved(name, source, info.st_ino, info.st_size, info.st_mtime_ns, copy_inode)
        own = folder.own("moves")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(identifier + _SUFFIX, flags, 0o600, dir_fd=own)
        record = cls(folder, identifier, descriptor, moved)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # ASCII, whatever bytes the name has.
            _write(descriptor, json.dumps(to_plain(moved)).encode("ascii"))
            os.fsync(descriptor)
            os.fsync(own)
            os.fsync(folder.own("incoming"))
        except BaseException:
            record.remove()
            record.close()
            raise
        return record

    def remove(self) -> None:
        """The migration has ended."""
        own = self.folder.own("moves")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.id + _SUFFIX, dir_fd=own)
        os.fsync(own)

    def close(self) -> None:
        """Let it go."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def recorded(folder: TierFolder) -> set[str]:
    """The migrations into this tier of which there is a record, under way or not."""
    return {name.removesuffix(_SUFFIX) for name in folder.names_of("moves")}


def dead_records(folder: TierFolder) -> list[MoveRecord]:
    """The records of processes that are gone; each is locked, and closed by the caller."""
    found = []
    for name in folder.names_of("moves"):
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.own("moves"))
        except FileNotFoundError:
            continue  # It has ended just now.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:
                raise BlockingIOError  # noqa: TRY301 - ended between the two calls.
        except BlockingIOError:
            os.close(descriptor)
            continue
        found.append(MoveRecord(folder, name.removesuffix(_SUFFIX), descriptor, _read(descriptor)))
    return found


def _read(descriptor: int) -> Moved | None:
    try:
        return from_plain(Moved, json.loads(os.pread(descriptor, _BYTES_MAX, 0)))
    except (ValueError, UsageError):
        return None  # Cut off: the migration goes on only after the whole record is on the device.


def _write(descriptor: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
