"""udev's database with and without an entry for a file system, for as long as a case needs it.

libcufile asks it what a file lies on. Where the machine has no entry, a case writes one and takes it away again; runs
beside it on the same machine agree by a lock: who needs it shares, who needs it gone is alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.harness.needs.cufile import OURS, entry_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["absent", "present", "unchanged"]

_LOCK = Path(tempfile.gettempdir()) / "gdrkit-suites-udev.lock"
_FOLDER = Path("/run/udev/data")
_ENTRY = f"E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n{OURS}\n"


@contextlib.contextmanager
def present(folder: Path) -> Iterator[None]:
    """An entry for the file system of `folder`: udev's own, or one that goes again with the last who needs it."""
    if entry_of(folder):
        yield
        return
    with _lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        entry = _path(folder)
        entry.parent.mkdir(parents=True, exist_ok=True)
        # Moved into place, since others read it meanwhile.
        whole = entry.with_name(f"{entry.name}.{os.getpid()}")
        whole.write_text(_ENTRY, encoding="utf-8")
        whole.replace(entry)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):
                # Somebody else still needs it, and will take it away.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _take_away(entry)


@contextlib.contextmanager
def absent(folder: Path) -> Iterator[None]:
    """No entry for the file system of `folder`."""
    with _lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entry = _path(folder)
        if entry.exists():
            _take_away(entry)
        yield


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """No case of any run writes an entry, or takes one away."""
    with _lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _lock() -> Iterator[int]:
    """The lock of all runs; whoever made it, everybody may open it to read."""
    try:
        descriptor = os.open(_LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.open(_LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _path(folder: Path) -> Path:
    device = folder.stat().st_dev
    return _FOLDER / f"b{os.major(device)}:{os.minor(device)}"


def _take_away(entry: Path) -> None:
    entry.unlink(missing_ok=True)
    # The folders too, unless they are somebody's.
    for made in (entry.parent, entry.parent.parent):
        with contextlib.suppress(OSError):
            made.rmdir()
