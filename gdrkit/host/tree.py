"""A host's file tree under a root that is an argument.

Level 2. A file that is not there is an answer (None, or nothing). One that is there and refuses to be read is another:
it is kept in :attr:`HostTree.unreadable` with the kernel's errno, so that "none" is never said where "not allowed to
look" is meant.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import errno_name

if TYPE_CHECKING:
    import os
    from io import FileIO

__all__ = ["HostTree", "Unreadable"]

_LARGEST_FILE_BYTES = 16 << 20
# For /proc/sys the kernel allocates as much as is asked for, and refuses (ENOMEM) more than it can have in one piece.
_PART_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that exists and could not be read."""

    path: str
    errno: int
    errno_name: str


class HostTree:
    """Reads small files below a root.

    Parameters
    ----------
    root : path
        ``/`` for this host; any other folder for a tree that has the same names below it.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)
        self._unreadable: dict[str, Unreadable] = {}

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """What refused to be read until now, in the order in which it was met."""
        return tuple(self._unreadable.values())

    def path(self, name: str) -> Path:
        """Where `name`, an absolute path on the host, lies in this tree."""
        return self.root / name.lstrip("/")

    def data(self, name: str) -> bytes | None:
        """The bytes of a file, at most 16 MiB; None when it is not there or cannot be read (see :attr:`unreadable`)."""
        try:
            with self.path(name).open("rb", buffering=0) as file:
                return _read_parts(file)
        except OSError as error:
            self._note(name, error)
            return None

    def text(self, name: str) -> str | None:
        """The text of a file without blanks around it; bytes that are no UTF-8 are shown as escapes."""
        data = self.data(name)
        return None if data is None else data.decode("utf-8", "backslashreplace").strip()

    def number(self, name: str, *, base: int = 10) -> int | None:
        """The number that a file holds; None when there is no file or no number in it."""
        text = self.text(name)
        try:
            return None if text is None else int(text, base)
        except ValueError:
            return None

    def names(self, name: str) -> tuple[str, ...]:
        """What a folder holds, sorted; nothing when it is not there or cannot be read."""
        try:
            return tuple(sorted(entry.name for entry in self.path(name).iterdir()))
        except OSError as error:
            self._note(name, error)
            return ()

    def link_name(self, name: str) -> str | None:
        """The last part of what a symbolic link points to; sysfs names drivers and groups so."""
        parts = self.link_parts(name)
        return parts[-1] if parts else None

    def link_parts(self, name: str) -> tuple[str, ...]:
        """What a symbolic link says, in parts; sysfs shows so below which bridges a device is. Nothing for what is no
        link.
        """
        try:
            return self.path(name).readlink().parts
        except OSError as error:
            # EINVAL: it is there and no link, which says as much as its absence.
            if error.errno != errno.EINVAL:
                self._note(name, error)
            return ()

    def exists(self, name: str) -> bool:
        """Whether something of that name is there."""
        try:
            self.path(name).lstat()
        except OSError as error:
            self._note(name, error)
            return False
        return True

    def _note(self, name: str, error: OSError) -> None:
        number = error.errno or errno.EIO
        if number not in (errno.ENOENT, errno.ENOTDIR):
            self._unreadable[name] = Unreadable(path=name, errno=number, errno_name=errno_name(number))


def _read_parts(file: FileIO) -> bytes:
    data = bytearray()
    while len(data) < _LARGEST_FILE_BYTES and (part := file.read(_PART_BYTES)):
        data += part
    return bytes(data)
