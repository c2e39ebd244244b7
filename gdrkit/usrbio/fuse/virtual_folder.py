"""``3fs-virt`` of a FUSE mount: what looks like files and is the agent.

Level 5. ``iovs`` shows the links that the agent keeps in a folder of its own, and a link made there is a publication,
whose errno is that of ``symlink``. ``rm-rf`` removes what a link made there names. ``get-conf`` and ``set-conf`` are
there for programs that look: this agent has nothing to set. ``agent.sock`` is a link to the real socket.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import zlib
from typing import TYPE_CHECKING, Protocol

from gdrkit.storage import messages
from gdrkit.usrbio.fuse._mfusepy import caller
from gdrkit.usrbio.virtual import VIRTUAL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.usrbio.fuse.operations import StoreFiles

__all__ = ["Publisher", "VirtualFolder"]

_ROOT = f"/{VIRTUAL_FOLDER}"
_IOVS, _GET_CONF, _SET_CONF, _RM_RF = (f"{_ROOT}/{name}" for name in ("iovs", "get-conf", "set-conf", "rm-rf"))
_SOCKET = f"{_ROOT}/agent.sock"
_MODES = {_ROOT: 0o555, _IOVS: 0o777, _GET_CONF: 0o555, _SET_CONF: 0o777, _RM_RF: 0o777}
_SUBMIT = "submit-ios"
# The inodes of 3FS that are no file's have this.
_VIRTUAL_INODE = 0xF << 60


class Publisher(Protocol):
    """The agent, as a mount needs it."""

    def publish_link(self, name: str, target: str, *, uid: int, process_id: int) -> None:
        """Publish what a bare symbolic link says, and make the link; OSError or an error with an errno when refused."""

    def unpublish_link(self, name: str, *, uid: int, process_id: int) -> None:
        """Take it back; ENOENT when there is none."""


class VirtualFolder:
    """What lies below ``3fs-virt``.

    Parameters
    ----------
    place : Path
        The agent's own folder, which holds ``iovs`` and ``agent.sock``.
    publisher : Publisher
        Who publishes.
    store : StoreFiles
        For ``rm-rf``.
    mount : str
        Where it is mounted: what ``rm-rf`` removes is named by whole paths.
    """

    def __init__(self, place: Path, publisher: Publisher, store: StoreFiles, *, mount: str) -> None:
        self._place, self._publisher, self._store, self._mount = place, publisher, store, mount
        self._lock = threading.Lock()
        # The kernel asks for the link that it has just made, and rm-rf makes none.
        self._removed: dict[str, str] = {}

    @staticmethod
    def has(path: str) -> bool:
        """Whether a path of the mount is one of these."""
        return path == _ROOT or path.startswith(f"{_ROOT}/")

    def attributes(self, path: str) -> dict[str, int]:
        """Ask what stat(2) says."""
        if path in _MODES:
            return self._attributes(path, stat.S_IFDIR | _MODES[path], 0)
        return self._attributes(path, stat.S_IFLNK | 0o777, len(os.fsencode(self.readlink(path))))

    def entries(self, path: str) -> Iterator[tuple[str, dict[str, int], int]]:
        """List a folder."""
        if path not in _MODES:
            raise _error(errno.ENOTDIR)
        names = [at.removeprefix(f"{path}/") for at in (*_MODES, _SOCKET) if at.rpartition("/")[0] == path]
        if path == _IOVS:
            names = sorted(entry.name for entry in self._links.iterdir() if entry.is_symlink())
        for name in names:
            kind = stat.S_IFDIR if f"{path}/{name}" in _MODES else stat.S_IFLNK
            yield name, {"st_ino": _inode(f"{path}/{name}"), "st_mode": kind}, 0

    def readlink(self, path: str) -> str:
        """Give the target of a link."""
        if path == _SOCKET:
            return str(self._place / "agent.sock")
        folder, name = os.path.split(path)
        if folder == _IOVS:
            try:
                return os.readlink(self._links / name)  # noqa: PTH115 - a Path would change gdr://.
            except OSError as error:
                raise _error(errno.ENOENT) from error
        with self._lock:
            target = self._removed.pop(path, None)
        if target is None:
            raise _error(errno.EINVAL if path in _MODES else errno.ENOENT)
        return target

    def symlink(self, path: str, target: str) -> None:
        """Publish, or remove."""
        folder, name = os.path.split(path)
        if folder == _IOVS:
            who = caller()
            self._publisher.publish_link(name, target, uid=who.uid, process_id=who.process_id)
        elif folder == _RM_RF:
            self._remove_all(target)
            with self._lock:
                self._removed[path] = target
        else:
            # A key that nobody has.
            raise _error(errno.EINVAL if folder == _SET_CONF else errno.EPERM)

    def unlink(self, path: str) -> None:
        """Take a publication back."""
        folder, name = os.path.split(path)
        if folder != _IOVS or name.partition(".")[0] == _SUBMIT:
            raise _error(errno.EPERM)
        who = caller()
        self._publisher.unpublish_link(name, uid=who.uid, process_id=who.process_id)

    @property
    def _links(self) -> Path:
        return self._place / "iovs"

    def _attributes(self, path: str, mode: int, size_bytes: int) -> dict[str, int]:
        return {
            "st_ino": _inode(path),
            "st_mode": mode,
            "st_size": size_bytes,
            "st_nlink": 1,
            "st_uid": os.geteuid(),
            "st_gid": os.getegid(),
        }

    def _remove_all(self, target: str) -> None:
        inside = f"{self._mount}/"
        # The kernel hands over the text alone, so only a whole path says what is meant.
        if not target.startswith(inside) or os.path.normpath(target) != target.rstrip("/"):
            raise _error(errno.EINVAL)
        path = target.removeprefix(inside).rstrip("/")
        if not path or self.has(f"/{path}"):
            raise _error(errno.EPERM)
        found = self._store.ask(messages.Stat(path=path), messages.FileStat)
        self._remove(path, found.mode)

    def _remove(self, path: str, mode: int) -> None:
        if not stat.S_ISDIR(mode):
            self._store.ask(messages.Unlink(path=path))
            return
        while True:
            reply = self._store.ask(messages.List(path=path), messages.ListReply)
            for entry in reply.entries:
                self._remove(f"{path}/{entry.name}", entry.kind)
            if not reply.more:
                break
        self._store.ask(messages.Rmdir(path=path))


def _inode(path: str) -> int:
    return _VIRTUAL_INODE | zlib.crc32(os.fsencode(path))


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
