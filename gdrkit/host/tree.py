"""Reader of the small files of a host, which are on a disk or in a capture.

For a missing file the result is None or empty. A file that exists and cannot be read is also added to
:attr:`HostTree.unreadable` with the errno, so that a caller does not confuse "not allowed to read" with "does not
exist". A file with malformed contents is added there with EBADMSG.

:class:`HostTree` gets the bytes from an object with the interface :class:`Files`: :class:`DiskFiles`, or
``CapturedFiles`` of :mod:`gdrkit.inventory`.
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

_FILE_BYTES_MAX = 16 << 20
# For /proc/sys the kernel allocates a buffer of the size of the read, and fails with ENOMEM if it is too large.
_READ_BYTES = 64 << 10
_LINES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that exists and could not be read."""

    path: str
    errno: int
    errno_name: str


class Files(Protocol):
    """Access to the files of a host.

    `host_path` is an absolute path on the host. Each method raises OSError as the system call would.
    """

    def read(self, host_path: str) -> bytes:
        """Return the bytes of a file, at most 16 MiB."""

    def lines(self, host_path: str, words: Sequence[str]) -> list[str]:
        """Return the lines of a file that contain one of `words`, at most 10,000."""

    def list(self, host_path: str) -> list[str]:
        """Return the names in a folder, sorted."""

    def link(self, host_path: str) -> str:
        """Return the target of a symbolic link. For another type of file, fail with EINVAL."""

    def check_exists(self, host_path: str) -> None:
        """Fail with ENOENT if the path does not exist. A symbolic link exists even if its target does not."""


class DiskFiles:
    """The files below the folder `root`, which stands for the root of the host."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)

    def path(self, host_path: str) -> Path:
        """Return the path of `host_path` below the root."""
        return self.root / host_path.lstrip("/")

    def read(self, host_path: str) -> bytes:
        """See :class:`Files`."""
        with self.path(host_path).open("rb", buffering=0) as file:
            return _read_in_chunks(file)

    def lines(self, host_path: str, words: Sequence[str]) -> list[str]:
        """See :class:`Files`."""
        encoded_words = [word.encode() for word in words]
        with self.path(host_path).open("rb") as file:
            matching_lines = [line for line in file if any(word in line for word in encoded_words)]
        return [line.decode("utf-8", "backslashreplace").rstrip("\n") for line in matching_lines[:_LINES_MAX]]

    def list(self, host_path: str) -> list[str]:
        """See :class:`Files`."""
        return sorted(entry.name for entry in self.path(host_path).iterdir())

    def link(self, host_path: str) -> str:
        """See :class:`Files`."""
        return str(self.path(host_path).readlink())

    def check_exists(self, host_path: str) -> None:
        """See :class:`Files`."""
        self.path(host_path).lstat()


class HostTree:
    """Reader of small files of a host. In each method, `host_path` is an absolute path on the host.

    Parameters
    ----------
    root : path
        ``/`` for this host, or a folder that contains files of a host, e.g. ``<root>/sys/module``.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.files: Files = DiskFiles(root)
        self._unreadable: dict[str, Unreadable] = {}

    @classmethod
    def of(cls, files: Files) -> Self:
        """Return a tree that reads through `files`."""
        tree = cls()
        tree.files = files
        return tree

    @property
    def is_this_host(self) -> bool:
        """Whether the files describe this machine."""
        return isinstance(self.files, DiskFiles) and self.files.root == Path("/")

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """The files that could not be read so far, in the order of the attempts."""
        return tuple(self._unreadable.values())

    def path(self, host_path: str) -> Path:
        """Return the path on the disk of this machine at which the file `host_path` of the host is.

        Raises
        ------
        UsageError
            NOT_SUPPORTED: the tree is a capture.
        """
        if not isinstance(self.files, DiskFiles):
            message = f"{host_path} is in a capture, so it has no path on this machine"
            raise UsageError(message, reason=Reason.NOT_SUPPORTED)
        return self.files.path(host_path)

    def data(self, host_path: str) -> bytes | None:
        """Return the bytes of a file, at most 16 MiB, or None if it does not exist or is :attr:`unreadable`."""
        try:
            return self.files.read(host_path)
        except OSError as error:
            self._record_unreadable(host_path, error)
            return None

    def text(self, host_path: str) -> str | None:
        """Return the text of a file, stripped, or None as in :meth:`data`. Bytes that are not UTF-8 become escapes."""
        data = self.data(host_path)
        return None if data is None else data.decode("utf-8", "backslashreplace").strip()

    def number(self, host_path: str, *, base: int = 10) -> int | None:
        """Return the number in a file, or None if there is no file or its text is not a number."""
        text = self.text(host_path)
        try:
            return None if text is None else int(text, base)
        except ValueError:
            self._unreadable[host_path] = Unreadable(
                path=host_path, errno=errno.EBADMSG, errno_name=errno_name(errno.EBADMSG)
            )
            return None

    def lines(self, host_path: str, words: Sequence[str]) -> tuple[str, ...]:
        """Return the lines of a file that contain one of `words`, or an empty tuple if the file cannot be read."""
        try:
            return tuple(self.files.lines(host_path, words))
        except OSError as error:
            self._record_unreadable(host_path, error)
            return ()

    def names(self, host_path: str) -> tuple[str, ...]:
        """Return the names in a folder, sorted, or an empty tuple if the folder cannot be read."""
        try:
            return tuple(self.files.list(host_path))
        except OSError as error:
            self._record_unreadable(host_path, error)
            return ()

    def link_name(self, host_path: str) -> str | None:
        """Return the last part of the target of a symbolic link. In sysfs it names a driver or an IOMMU group."""
        path_parts = self.link_parts(host_path)
        return path_parts[-1] if path_parts else None

    def link_parts(self, host_path: str) -> tuple[str, ...]:
        """Return the parts of the target of a symbolic link. In sysfs they show the bridges above a device.

        The result is empty if `host_path` is not a symbolic link.
        """
        try:
            return Path(self.files.link(host_path)).parts
        except OSError as error:
            # EINVAL means that the file exists and is not a link.
            if error.errno != errno.EINVAL:
                self._record_unreadable(host_path, error)
            return ()

    def exists(self, host_path: str) -> bool:
        """Return whether the path exists. The result is also False if the check failed; see :attr:`unreadable`."""
        try:
            self.files.check_exists(host_path)
        except OSError as error:
            self._record_unreadable(host_path, error)
            return False
        return True

    def _record_unreadable(self, host_path: str, error: OSError) -> None:
        error_number = error.errno or errno.EIO
        if error_number not in (errno.ENOENT, errno.ENOTDIR):
            self._unreadable[host_path] = Unreadable(
                path=host_path, errno=error_number, errno_name=errno_name(error_number)
            )


def _read_in_chunks(file: FileIO) -> bytes:
    data = bytearray()
    while len(data) < _FILE_BYTES_MAX and (chunk := file.read(_READ_BYTES)):
        data += chunk
    return bytes(data)
