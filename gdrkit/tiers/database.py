"""The database file of the catalogue, which is rebuilt if it is lost or damaged, and the clock of the catalogue.

The catalogue records the tier and the accesses of each file. It is stored in an SQLite database: the file
``catalogue-N.sqlite`` with the largest N. A process that has an older file open switches to the newest one at its next
call. A damaged file is never renamed or removed: another process may have it open, and SQLite finds the write-ahead log
of a database by the name of the database.

The clock is the host's clock without backward steps. If an administrator sets the host's clock back, the clock of the
catalogue continues from its latest stored value. Otherwise, all accesses would seem more recent, so the heat of all
files (the sum of their accesses, weighted by age) would rise.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, ClosedResource, Reason
from gdrkit.handles import Handle
from gdrkit.tiers._sqlite import connect, convert_sqlite_errors, is_damaged, transaction
from gdrkit.tiers.kernel_errors import convert_os_errors
from gdrkit.tiers.schema import CREATE_ROUTES, FORMAT_VERSION, SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gdrkit.tiers._sqlite import Connection

__all__ = ["Database"]

_FILE_NAME_PATTERN = re.compile(r"catalogue-(\d{6})\.sqlite")
# Interval between two attempts to lock the folder, in seconds.
_LOCK_INTERVAL_S = 0.02
# Least time to wait for another process that rebuilds the database, in seconds, even if the configured timeout is
# shorter.
_REBUILD_TIMEOUT_S_MIN = 60.0
_log = logging.getLogger(__name__)


class Database(ABC):
    """A connection to the newest database of a folder; a context manager.

    Parameters
    ----------
    folder : Path
        Folder of the database. It is created if it does not exist.
    half_life_s : float
        Half-life of an access, in seconds: an access of this age counts half.
    timeout_ms : int
        Longest time to wait for locks of other processes, in milliseconds. For another process that creates the
        database, the wait is at least 60 s.
    clock : callable
        Function that returns the seconds since 1970.

    Attributes
    ----------
    was_rebuilt : bool
        Whether this object has created a database from the files on disk.

    Raises
    ------
    ApiError
        The database cannot be opened or created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        half_life_s: float,
        timeout_ms: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.was_rebuilt = False
        self._half_life_s = half_life_s
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        # N in the name of the current file, and the inode of the file. N is 0 before the first open and while a draft
        # (catalogue.new, a new database that is being filled) is in use, and -1 after close().
        self._file_number = self._inode = 0
        with convert_os_errors("open catalogue", folder=str(folder)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._live_handle = Handle("tiers.catalogue")  # It counts this database as an open object, for leak checks.
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def fill(self) -> None:
        """Fill a new, empty database with the files on disk. The caller has begun a transaction."""

    @property
    def path(self) -> Path:
        """Path of the current database."""
        return self._make_path(self._file_number)

    def new_connection(self) -> Connection:
        """Return another connection to the same database. The caller closes it.

        For sorting, SQLite uses temporary files instead of memory in this connection.
        """
        with self.locked_connection("connect"):
            return connect(self.path, timeout_ms=self._timeout_ms, sorts_on_disk=True)

    def now_half_lives(self) -> float:
        """Return the time since 1970 in half-lives."""
        with self.locked_connection("read clock") as connection:
            return self.read_clock_half_lives(connection, store=False)

    @contextmanager
    def write_transaction(self, operation: str, **arguments: object) -> Iterator[Connection]:
        """Run the block in one transaction. A nested call joins the outer transaction."""
        with self.locked_connection(operation, **arguments) as connection:
            if connection.in_transaction:
                yield connection
                return
            with transaction(connection):
                yield connection

    def rebuild(self) -> None:
        """Create a new database from the files on disk."""
        with self._lock:
            self._rebuild(self._file_number)

    def is_damaged(self) -> bool:
        """Return whether SQLite finds damage in the database. The check reads the whole database."""
        with self.locked_connection("quick_check") as connection:
            return is_damaged(connection)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            connection, self._connection, self._file_number = self._connection, None, -1
            if connection is not None:
                connection.close()
            self._live_handle.release()

    @contextmanager
    def locked_connection(self, operation: str, **arguments: object) -> Iterator[Connection]:
        """Yield the connection, which no other thread can use during the block.

        Errors of SQLite are raised as :class:`ApiError`, which shows `operation` and `arguments`.
        """
        with self._lock:
            if self._file_number < 0:
                resource = "the catalogue"
                raise ClosedResource(resource)
            if self._connection is None or not (self._connection.in_transaction or self._is_current()):
                self._open()
            with convert_sqlite_errors(operation, catalogue=str(self.path), **arguments):
                if self._connection is not None:
                    yield self._connection

    def _is_current(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode and not self._make_path(self._file_number + 1).exists()
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        """Open the newest database. If there is no database, or the newest cannot be read, create a new one."""
        file_numbers = self._list_file_numbers()
        if file_numbers and self._try_open(file_numbers[-1]):
            return
        self._rebuild(file_numbers[-1] if file_numbers else 0)

    def _try_open(self, file_number: int) -> bool:
        """Open one database. Return False if it cannot be read or has another format."""
        path = self._make_path(file_number)
        try:
            connection = connect(path, timeout_ms=self._timeout_ms)
            try:
                with convert_sqlite_errors("open catalogue", catalogue=str(path)):
                    format_row = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
                    if format_row != (FORMAT_VERSION,):
                        return False
                    connection.execute(CREATE_ROUTES)  # Older catalogues do not have this table.
                    self._set_half_life(connection)
            except BaseException:
                connection.close()
                raise
        except ApiError as error:
            if error.reason not in {Reason.MALFORMED, Reason.OTHER}:
                raise
            _log.warning("the catalogue %s cannot be read, so gdrkit rebuilds it: %s", path, error)
            return False
        self._switch_to(connection, file_number)
        return True

    def _switch_to(self, connection: Connection, file_number: int) -> None:
        """Use this connection from now on, and close the previous one."""
        previous_connection, self._connection, self._file_number = self._connection, connection, file_number
        self._inode = self._make_path(file_number).stat().st_ino
        if previous_connection is not None:
            previous_connection.close()

    def _rebuild(self, last_file_number: int) -> None:
        """Create a database with a number above `last_file_number`, unless another process has just created one."""
        with self._hold_creation_lock():
            file_numbers = self._list_file_numbers()
            if file_numbers and file_numbers[-1] > last_file_number and self._try_open(file_numbers[-1]):
                return
            file_number = max([last_file_number, *file_numbers]) + 1
            draft_path = self.folder / "catalogue.new"
            for stale_file in self.folder.glob("catalogue.new*"):
                stale_file.unlink()
            connection = connect(draft_path, timeout_ms=self._timeout_ms)
            try:
                with convert_sqlite_errors("create catalogue", catalogue=str(draft_path)):
                    connection.executescript(SCHEMA)
                    self._fill_draft(connection, draft_path)
            finally:
                connection.close()
            # The close has merged the write-ahead log, so the draft is a single file and can be renamed.
            draft_path.replace(self._make_path(file_number))
            _sync_folder(self.folder)
            self.was_rebuilt = True
            if not self._try_open(file_number):
                message = f"{self._make_path(file_number)} was created but cannot be opened"
                raise ApiError(api=Api.SQLITE, operation="open catalogue", status=None, status_name=message)

    def _fill_draft(self, connection: Connection, draft_path: Path) -> None:
        """Fill the draft, which gets its final name later. Meanwhile, all methods of this object use the draft."""
        previous_state = (self._connection, self._file_number, self._inode)
        self._connection, self._file_number, self._inode = connection, 0, draft_path.stat().st_ino
        try:
            with transaction(connection):
                self._set_half_life(connection)
                self.read_clock_half_lives(connection, store=True)
                self.fill()
        finally:
            self._connection, self._file_number, self._inode = previous_state

    def _set_half_life(self, connection: Connection) -> None:
        """Store the half-life. If it has changed, convert all scores, because scores are in half-lives."""
        (old_half_life_s,) = connection.execute("SELECT value FROM meta WHERE key = 'half_life_s'").fetchone()
        if old_half_life_s == self._half_life_s:
            return
        # A transaction is open here only if _fill_draft() is the caller. The draft has no files yet, so there are no
        # scores to convert.
        if connection.in_transaction:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'half_life_s'", (self._half_life_s,))
            return
        with transaction(connection):
            # A score is log2(heat) plus the time in half-lives. The heat stays, so only the second term changes.
            now_s = self.read_clock_half_lives(connection, store=True) * self._half_life_s
            score_shift = now_s / self._half_life_s - now_s / old_half_life_s
            connection.execute("UPDATE files SET score = score + ?", (score_shift,))
            connection.execute("UPDATE meta SET value = ? WHERE key = 'half_life_s'", (self._half_life_s,))

    def read_clock_half_lives(self, connection: Connection, *, store: bool) -> float:
        """Return the time since 1970 in half-lives.

        With `store`, also write the clock to the database. The caller must then have begun a transaction.
        """
        meta_by_key = dict(
            connection.execute("SELECT key, value FROM meta WHERE key IN ('wall_s', 'offset_s')").fetchall()
        )
        wall_s, stored_wall_s, offset_s = self._clock(), float(meta_by_key["wall_s"]), float(meta_by_key["offset_s"])
        # If the host's clock was set back, the clock of the catalogue continues from the stored time.
        offset_s += max(0.0, stored_wall_s - wall_s)
        if store:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'wall_s'", (wall_s,))
            connection.execute("UPDATE meta SET value = ? WHERE key = 'offset_s'", (offset_s,))
        return (wall_s + offset_s) / self._half_life_s

    @contextmanager
    def _hold_creation_lock(self) -> Iterator[None]:
        """Hold the lock of the folder, so that only one process creates a database."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with convert_os_errors("lock catalogue", folder=str(self.folder)):
            lock_fd = os.open(self.folder / "lock", flags, 0o600)
        deadline_s = time.monotonic() + max(self._timeout_ms / 1000, _REBUILD_TIMEOUT_S_MIN)
        try:
            while True:
                try:
                    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline_s:
                        with convert_os_errors("lock catalogue", folder=str(self.folder)):
                            raise OSError(error.errno, "another process rebuilds the catalogue") from error
                threading.Event().wait(_LOCK_INTERVAL_S)
            yield
        finally:
            os.close(lock_fd)

    def _list_file_numbers(self) -> list[int]:
        """Return the numbers of the databases in the folder, in ascending order."""
        return sorted(
            int(match[1]) for path in self.folder.iterdir() if (match := _FILE_NAME_PATTERN.fullmatch(path.name))
        )

    def _make_path(self, file_number: int) -> Path:
        return self.folder / (f"catalogue-{file_number:06}.sqlite" if file_number else "catalogue.new")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
