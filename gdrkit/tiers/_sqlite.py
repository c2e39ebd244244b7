"""Connections and transactions of SQLite, for the catalogue of the tiers.

Only this file imports sqlite3. It converts errors of SQLite to :class:`ApiError`, with their result codes.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from sqlite3 import Connection
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Connection", "connect", "convert_sqlite_errors", "is_damaged", "transaction"]

# Primary result codes of SQLite: SQLITE_BUSY, SQLITE_LOCKED, SQLITE_READONLY, SQLITE_IOERR, SQLITE_CORRUPT,
# SQLITE_FULL, SQLITE_CANTOPEN and SQLITE_NOTADB.
_BUSY, _LOCKED, _READ_ONLY, _IO, _CORRUPT, _FULL, _CANNOT_OPEN, _NO_DATABASE = 5, 6, 8, 10, 11, 13, 14, 26
# The low byte of an extended result code is the primary result code (sqlite3.h).
_PRIMARY_CODE_MASK = 0xFF
_REASON_BY_CODE = {
    _BUSY: Reason.BUSY,
    _LOCKED: Reason.BUSY,
    _READ_ONLY: Reason.NO_PERMISSION,
    _IO: Reason.IO_ERROR,
    _CORRUPT: Reason.MALFORMED,
    _FULL: Reason.NO_SPACE,
    _CANNOT_OPEN: Reason.NO_PERMISSION,
    _NO_DATABASE: Reason.MALFORMED,
}
_ADVICE_BY_REASON = {
    Reason.BUSY: "another process has locked the catalogue: stop that process, or try again later",
    Reason.NO_PERMISSION: "give this user write permission for the folder of the catalogue",
    Reason.IO_ERROR: "check the device of the catalogue; gdrkit tiers check --repair rebuilds the catalogue",
    Reason.MALFORMED: "rebuild the catalogue from the tiers: gdrkit tiers check --repair",
    Reason.NO_SPACE: "free space on the file system of the catalogue, or configure another folder for it",
}
# Memory for cached pages of one connection.
_CACHE_KIB = 4096


def connect(path: Path, *, timeout_ms: int, sorts_on_disk: bool = False) -> Connection:
    """Open a database in WAL mode and return the connection. A commit returns after its data is on the disk.

    Parameters
    ----------
    path : Path
        Path of the database. It is created if it does not exist.
    timeout_ms : int
        Longest time to wait for locks of other connections, in milliseconds.
    sorts_on_disk : bool
        Whether SQLite stores temporary tables and the intermediate data of sorts in files instead of memory.

    Raises
    ------
    ApiError
        SQLite failed. ``MALFORMED``: the file is not a database, or is damaged.
    """
    with convert_sqlite_errors("sqlite3_open", path=str(path)):
        connection = sqlite3.connect(
            path, timeout=timeout_ms / 1000, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchone()
            connection.execute("PRAGMA synchronous=FULL")
            # A negative number is a size in KiB; a positive one would be a number of pages.
            connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            # The database is not mapped into memory, because an I/O error would then be a SIGBUS instead of a result
            # code.
            connection.execute("PRAGMA mmap_size=0")
            if sorts_on_disk:
                connection.execute("PRAGMA temp_store=FILE")
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def transaction(connection: Connection) -> Iterator[Connection]:
    """Run the block in a transaction, and roll the transaction back if the block fails."""
    # IMMEDIATE takes the write lock now, so that no other process can write between a read and a write of the block.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        # After some errors, SQLite has already rolled the transaction back.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def convert_sqlite_errors(operation: str, **arguments: object) -> Iterator[None]:
    """Convert errors of SQLite in this block to :class:`ApiError`, which shows `operation` and `arguments`."""
    try:
        yield
    except sqlite3.Error as error:
        result_code = getattr(error, "sqlite_errorcode", None)
        reason = _REASON_BY_CODE.get((result_code or 0) & _PRIMARY_CODE_MASK, Reason.OTHER)
        raise ApiError(
            api=Api.SQLITE,
            operation=operation,
            status=result_code,
            status_name=getattr(error, "sqlite_errorname", None) or type(error).__name__,
            arguments=arguments,
            reason=reason,
            what_to_do=_ADVICE_BY_REASON.get(reason, ""),
            detail=str(error),
        ) from error


def is_damaged(connection: Connection) -> bool:
    """Return whether SQLite finds damage in the database. The check reads the whole database."""
    try:
        # The check ends at the first error, because of the argument 1. Without errors, it returns one row, "ok".
        return [row[0] for row in connection.execute("PRAGMA quick_check(1)")] != ["ok"]
    except sqlite3.DatabaseError:
        return True
