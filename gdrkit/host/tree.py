"""A host's file tree under a root that is an argument.

Level 2. A file that is not there is an answer (None, or nothing). One that is there and refuses to be read is another:
it is kept in :attr:`HostTree.unreadable` with the kernel's errno, so that "none" is never said where "not allowed to
look" is meant. One that holds something else than it must (no number) is kept there as EBADMSG.

Where the bytes come from is :class:`Files`: those of a disk, or a capture that answers as the disk did.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from gdrkit.errors import Reason, UsageError, errno_name

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from io import FileIO

__all__ = ["DiskFiles", "Files", "HostTree", "Unreadable"]

_LARGEST_FILE_BYTES = 16 << 20
# For /proc/sys the kernel allocates as much as is asked for, and refuses (ENOMEM) more than it can have in one piece.
_PART_BYTES = 64 << 10
_LINES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that exists and could not be read."""

    path: str
    errno: int
    errno_name: str


class Files(Protocol):
    """What answers questions about absolute paths; each raises OSError as the system call would."""

    def read(self, name: str) -> bytes:
        """The bytes of a file, at most 16 MiB."""

    def lines(self, name: str, words: Sequence[str]) -> list[str]:
        """The lines of a file that hold one of `words`, for files of which a few lines matter."""

    def list(self, name: str) -> list[str]:
        """The names in a folder, sorted."""

    def link(self, name: str) -> str:
        """What a symbolic link says; EINVAL for what is no link."""

    def look(self, name: str) -> None:
        """Whether it is there: a symbolic link is, wherever it points to."""


class DiskFiles:
    """The files below a folder."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        """Where `name` lies."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> bytes:
        """As :class:`Files` says."""
        with self.path(name).open("rb", buffering=0) as file:
            return _read_parts(file)

    def lines(self, name: str, words: Sequence[str]) -> list[str]:
        """As :class:`Files` says."""
        wanted = [word.encode() for word in words]
        with self.path(name).open("rb") as file:
            found = [line for line in file if any(word in line for word in wanted)]
        return [line.decode("utf-8", "backslashreplace").rstrip("\n") for line in found[:_LINES_MAX]]

    def list(self, name: str) -> list[str]:
        """As :class:`Files` says."""
        return sorted(entry.name for entry in self.path(name).iterdir())

    def link(self, name: str) -> str:
        """As :class:`Files` says."""
        return str(self.path(name).readlink())

    def look(self, name: str) -> None:
        """As :class:`Files` says."""
        self.path(name).lstat()


class HostTree:
    """Reads small files below a root.

    Parameters
    ----------
    root : path
        ``/`` for this host; any other folder for a tree that has the same names below it.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.files: Files = DiskFiles(root)
        self._unreadable: dict[str, Unreadable] = {}

    @classmethod
    def of(cls, files: Files) -> Self:
        """A tree whose bytes come from elsewhere."""
        tree = cls()
        tree.files = files
        return tree

    @property
    def is_this_host(self) -> bool:
        """Whether its files are those of this very machine."""
        return isinstance(self.files, DiskFiles) and self.files.root == Path("/")

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """What refused to be read until now, in the order in which it was met."""
        return tuple(self._unreadable.values())

    def path(self, name: str) -> Path:
        """Where `name`, an absolute path on the host, lies on this machine's disk.

        Raises
        ------
        UsageError
            NOT_SUPPORTED: it lies in a capture.
        """
        if not isinstance(self.files, DiskFiles):
            message = f"{name} lies in a capture and not on this machine"
            raise UsageError(message, reason=Reason.NOT_SUPPORTED)
        return self.files.path(name)

    def data(self, name: str) -> bytes | None:
        """The bytes of a file, at most 16 MiB; None when it is not there or cannot be read (see :attr:`unreadable`)."""
        try:
            return self.files.read(name)
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
            self._unreadable[name] = Unreadable(path=name, errno=errno.EBADMSG, errno_name=errno_name(errno.EBADMSG))
            return None

    def lines(self, name: str, words: Sequence[str]) -> tuple[str, ...]:
        """The lines of a file that hold one of `words`; nothing when it is not there or cannot be read."""
        try:
            return tuple(self.files.lines(name, words))
        except OSError as error:
            self._note(name, error)
            return ()

    def names(self, name: str) -> tuple[str, ...]:
        """What a folder holds, sorted; nothing when it is not there or cannot be read."""
        try:
            return tuple(self.files.list(name))
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
            return Path(self.files.link(name)).parts
        except OSError as error:
            # EINVAL: it is there and no link, which says as much as its absence.
            if error.errno != errno.EINVAL:
                self._note(name, error)
            return ()

    def exists(self, name: str) -> bool:
        """Whether something of that name is there."""
        try:
            self.files.look(name)
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
