"""Entries in udev's database for the duration of a block, for cases with cuFile.

libcufile reads the type of a file system from udev's database, /run/udev/data. If the machine has no entry for a file
system, a case creates the entry and later removes it.

Several runs on one machine share a lock file. A case that needs an entry takes a shared lock. A case that needs the
absence of an entry takes an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.harness.needs.cufile import SUITES_UDEV_LINE, find_udev_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["lock_entries", "provide_entry", "remove_entry"]

_LOCK_FILE = Path(tempfile.gettempdir()) / "gdrkit-suites-udev.lock"
_UDEV_DATA = Path("/run/udev/data")
# The line SUITES_UDEV_LINE marks an entry that the suites have created.
_ENTRY_TEXT = f"E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n{SUITES_UDEV_LINE}\n"


@contextlib.contextmanager
def provide_entry(folder: Path) -> Iterator[None]:
    """Provide an entry for the file system of `folder`. If there is no entry, create one and remove it at the end."""
    if find_udev_entry(folder):
        yield
        return
    with _open_lock() as lock_fd:
        fcntl.flock(lock_fd, fcntl.LOCK_SH)
        entry_path = _get_entry_path(folder)
        entry_path.parent.mkdir(parents=True, exist_ok=True)
        # The rename is atomic, because other processes may read the entry at the same time.
        new_entry_path = entry_path.with_name(f"{entry_path.name}.{os.getpid()}")
        new_entry_path.write_text(_ENTRY_TEXT, encoding="utf-8")
        new_entry_path.replace(entry_path)
        try:
            yield
        finally:
            # If another process still uses the entry, this lock fails, and that process removes the entry later.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_entry_file(entry_path)


@contextlib.contextmanager
def remove_entry(folder: Path) -> Iterator[None]:
    """Remove the entry for the file system of `folder`, and hold the exclusive lock until the block ends."""
    with _open_lock() as lock_fd:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        entry_path = _get_entry_path(folder)
        if entry_path.exists():
            _remove_entry_file(entry_path)
        yield


@contextlib.contextmanager
def lock_entries() -> Iterator[None]:
    """Hold the exclusive lock, so that no other run creates or removes an entry before the block ends."""
    with _open_lock() as lock_fd:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _open_lock() -> Iterator[int]:
    """Yield a descriptor of the lock file, which every user may read. The file is not locked yet."""
    try:
        lock_fd = os.open(_LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        lock_fd = os.open(_LOCK_FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield lock_fd
    finally:
        os.close(lock_fd)


def _get_entry_path(folder: Path) -> Path:
    """Return the path of the entry for the device of the file system that contains `folder`."""
    device = folder.stat().st_dev
    return _UDEV_DATA / f"b{os.major(device)}:{os.minor(device)}"


def _remove_entry_file(entry_path: Path) -> None:
    entry_path.unlink(missing_ok=True)
    # The folders are removed if they are empty.
    for folder in (entry_path.parent, entry_path.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()
