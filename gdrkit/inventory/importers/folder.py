"""Importer of a copied folder: a copy of /sys/class/infiniband, or a whole tree that contains sys or proc.

Only regular files, folders and symbolic links are imported. The target of a link is stored and never followed, so that
nothing outside of the folder is read.
"""

from __future__ import annotations

import base64
import itertools
import os
import stat
from typing import TYPE_CHECKING

from gdrkit.inventory.capture import SCHEMA_VERSION, Capture, RecordedReads
from gdrkit.inventory.importers.functions import make_malformed_error

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["import_folder"]

_INFINIBAND_FOLDER = "/sys/class/infiniband"
_ROOT_FOLDERS = ("sys", "proc", "etc", "run", "dev")
_FILES_MAX = 100_000
_FILE_BYTES_MAX = 1 << 20
# Limit of all paths and contents together, in bytes of UTF-8. Python takes up to four times as many bytes for a text.
_TOTAL_BYTES_MAX = 32 << 20
_DEPTH_MAX = 64


def import_folder(folder: Path) -> Capture:
    """Read the copied folder and return it as a capture.

    Raises
    ------
    UsageError
        ``MALFORMED``: the folder cannot be read, contains devices, pipes or sockets, exceeds the limits of this module,
        or is not a known tree.
    """
    source_name = str(folder)
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise make_malformed_error(source_name, f"cannot be listed: {error.strerror}") from error
    has_root_folders = any(name in _ROOT_FOLDERS for name in names)
    if not has_root_folders and not any((folder / name / "ports").is_dir() for name in names):
        raise make_malformed_error(
            source_name, "it contains neither sys nor proc, and is not a copy of /sys/class/infiniband"
        )
    walker = _Walker(folder)
    walker.walk("" if has_root_folders else _INFINIBAND_FOLDER, folder, depth=0)
    if has_root_folders:
        # Only a part of the root folder was copied, so a name that is missing in it may exist on the machine.
        walker.reads.folders.pop("/", None)
    origin = "copied tree" if has_root_folders else "copied /sys/class/infiniband"
    return Capture(schema_version=SCHEMA_VERSION, origin=origin, answers=walker.reads)


class _Walker:
    """Recursive reader of a copied folder, with limits."""

    def __init__(self, root: Path) -> None:
        self.reads = RecordedReads()
        self._source_name = str(root)
        self._bytes_left, self._files_left = _TOTAL_BYTES_MAX, _FILES_MAX

    def walk(self, captured_path: str, folder: Path, *, depth: int) -> None:
        """Import the contents of `folder`, which is a copy of `captured_path` on the captured machine.

        For the root folder, `captured_path` is empty.
        """
        if depth > _DEPTH_MAX:
            raise make_malformed_error(self._source_name, f"folders are nested more than {_DEPTH_MAX} deep")
        try:
            with os.scandir(folder) as entries:
                # One entry more than allowed is enough to detect that the folder has too many.
                limited_entries = sorted(itertools.islice(entries, self._files_left + 1), key=lambda entry: entry.name)
            self.reads.folders[captured_path or "/"] = tuple(entry.name for entry in limited_entries)
            for entry in limited_entries:
                self._import_entry(f"{captured_path}/{entry.name}", entry, folder, depth)
        except UnicodeEncodeError as error:
            raise make_malformed_error(self._source_name, "a file name is not UTF-8") from error
        except OSError as error:
            raise make_malformed_error(
                self._source_name, f"{captured_path or '/'} cannot be read: {error.strerror}"
            ) from error

    def _import_entry(self, captured_path: str, entry: os.DirEntry[str], folder: Path, depth: int) -> None:
        self._files_left -= 1
        if self._files_left < 0:
            raise make_malformed_error(self._source_name, f"more than {_FILES_MAX} files")
        # encode() raises an error for a path or a link target that is not UTF-8.
        self._count_bytes(captured_path, len(captured_path.encode()))
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            self.reads.links[captured_path] = target = str((folder / entry.name).readlink())
            target.encode()
        elif stat.S_ISDIR(mode):
            self.walk(captured_path, folder / entry.name, depth=depth + 1)
        elif stat.S_ISREG(mode):
            self._import_file(captured_path, entry.path)
        else:
            raise make_malformed_error(self._source_name, f"{captured_path} is neither a file nor a folder nor a link")

    def _import_file(self, captured_path: str, source_path: str) -> None:
        # These flags also protect against a file that was replaced by a link or a pipe after the check of its type.
        with os.fdopen(os.open(source_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            raise make_malformed_error(self._source_name, f"{captured_path} has more than {_FILE_BYTES_MAX} bytes")
        self._count_bytes(captured_path, len(data))
        try:
            self.reads.texts[captured_path] = data.decode("utf-8")
        except UnicodeDecodeError:
            self.reads.binaries[captured_path] = base64.b64encode(data).decode()

    def _count_bytes(self, captured_path: str, length_bytes: int) -> None:
        self._bytes_left -= length_bytes
        if self._bytes_left < 0:
            raise make_malformed_error(
                self._source_name, f"{captured_path}: names and contents have more than {_TOTAL_BYTES_MAX} bytes"
            )
