"""The folder ``3fs-virt`` of a FUSE mount. Its entries look like files, and their creation is a request to the agent.

- ``iovs`` shows the links of publications. The links are stored in the agent's private folder. Creating a link
  publishes an iov or a ring. If the agent refuses the publication, symlink(2) fails with the agent's errno.
- ``rm-rf``: creating a link removes the file or folder that the link names.
- ``get-conf`` and ``set-conf`` exist for programs of 3FS that look for them. This agent has no configuration.
- ``agent.sock`` is a link to the agent's socket.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import zlib
from typing import TYPE_CHECKING

from gdrkit.storage import messages
from gdrkit.usrbio.fuse._mfusepy import refuse_restricted_root, request_sender
from gdrkit.usrbio.virtual import VIRTUAL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.usrbio.fuse.link_clients import LinkClients
    from gdrkit.usrbio.fuse.store import StoreFiles

__all__ = ["VirtualFolder"]

_ROOT = f"/{VIRTUAL_FOLDER}"
_IOVS, _GET_CONF, _SET_CONF, _RM_RF = (f"{_ROOT}/{name}" for name in ("iovs", "get-conf", "set-conf", "rm-rf"))
_SOCKET = f"{_ROOT}/agent.sock"
_FOLDER_MODES = {_ROOT: 0o555, _IOVS: 0o777, _GET_CONF: 0o555, _SET_CONF: 0o777, _RM_RF: 0o777}
_SEMAPHORE_LINK_STEM = "submit-ios"
# Inodes of the entries below 3fs-virt have these bits set. As in 3FS, no file of a store has such an inode.
_VIRTUAL_INODE_BITS = 0xF << 60


class VirtualFolder:
    """The entries below ``3fs-virt``. Paths begin at the mount, such as ``/3fs-virt/iovs``.

    Parameters
    ----------
    agent_folder : Path
        The real folder ``3fs-virt`` of the agent, with ``iovs`` and ``agent.sock``.
    link_clients : LinkClients
        The processes that publish iovs and rings by links.
    store : StoreFiles
        The files of the store, which ``rm-rf`` removes.
    mount : str
        Path of the mount. ``rm-rf`` needs absolute paths below it.
    is_shared : bool
        Whether other users use the mount. In ``iovs``, a user sees only the user's own links, and root sees all links.
    """

    def __init__(
        self, agent_folder: Path, link_clients: LinkClients, store: StoreFiles, *, mount: str, is_shared: bool = False
    ) -> None:
        self._agent_folder, self._link_clients = agent_folder, link_clients
        self._store, self._mount = store, mount
        self._is_shared = is_shared
        self._lock = threading.Lock()
        # The targets of new links in rm-rf. After symlink(2) the kernel reads the link once. Then the link does not
        # exist any more.
        self._rm_rf_targets: dict[str, str] = {}

    @staticmethod
    def has(path: str) -> bool:
        """Return whether a path is ``3fs-virt`` or below it."""
        return path == _ROOT or path.startswith(f"{_ROOT}/")

    def attributes(self, path: str) -> dict[str, int]:
        """Return the attributes of a path, as stat(2) does."""
        if path in _FOLDER_MODES:
            # With the sticky bit, a user can remove only links that belong to this user.
            sticky_bit = stat.S_ISVTX if self._is_shared and path == _IOVS else 0
            return _make_attributes(path, stat.S_IFDIR | _FOLDER_MODES[path] | sticky_bit, 0)
        attributes = _make_attributes(path, stat.S_IFLNK | 0o777, len(os.fsencode(self.readlink(path))))
        folder_path, name = os.path.split(path)
        owner_uid = self._link_clients.owner_uid(name) if self._is_shared and folder_path == _IOVS else None
        return attributes if owner_uid is None else {**attributes, "st_uid": owner_uid}

    def entries(self, path: str) -> Iterator[tuple[str, dict[str, int], int]]:
        """Yield name, attributes and offset (0) of every entry of a folder; see :meth:`Operations.readdir`."""
        if path not in _FOLDER_MODES:
            raise _make_error(errno.ENOTDIR)
        names = [
            entry_path.removeprefix(f"{path}/")
            for entry_path in (*_FOLDER_MODES, _SOCKET)
            if entry_path.rpartition("/")[0] == path
        ]
        if path == _IOVS:
            link_names = (entry.name for entry in (self._agent_folder / "iovs").iterdir() if entry.is_symlink())
            names = sorted(filter(self._is_visible, link_names))
        for name in names:
            file_type = stat.S_IFDIR if f"{path}/{name}" in _FOLDER_MODES else stat.S_IFLNK
            yield name, {"st_ino": _compute_inode(f"{path}/{name}"), "st_mode": file_type}, 0

    def readlink(self, path: str) -> str:
        """Return the target of a link."""
        if path == _SOCKET:
            return str(self._agent_folder / "agent.sock")
        folder_path, name = os.path.split(path)
        if folder_path == _IOVS:
            if not self._is_visible(name):
                raise _make_error(errno.ENOENT)
            try:
                return os.readlink(self._agent_folder / "iovs" / name)  # noqa: PTH115 - a Path would change gdr://.
            except OSError as error:
                raise _make_error(errno.ENOENT) from error
        with self._lock:
            target = self._rm_rf_targets.pop(path, None)
        if target is None:
            raise _make_error(errno.EINVAL if path in _FOLDER_MODES else errno.ENOENT)
        return target

    def symlink(self, path: str, target: str) -> None:
        """Publish an iov or a ring by a link in ``iovs``, or remove a file or folder by a link in ``rm-rf``."""
        folder_path, name = os.path.split(path)
        if folder_path == _IOVS:
            sender = request_sender()
            user = self._store.user_of_request()
            self._link_clients.publish(name, target, uid=sender.uid, user=user, thread_id=sender.thread_id)
        elif folder_path == _RM_RF:
            self._remove_all(target)
            with self._lock:
                self._rm_rf_targets[path] = target
        else:
            # A link in set-conf would set a configuration key, and this agent has no keys.
            raise _make_error(errno.EINVAL if folder_path == _SET_CONF else errno.EPERM)

    def unlink(self, path: str) -> None:
        """Remove a publication."""
        folder_path, name = os.path.split(path)
        if folder_path != _IOVS or name.partition(".")[0] == _SEMAPHORE_LINK_STEM:
            raise _make_error(errno.EPERM)
        self._link_clients.unpublish(name, uid=request_sender().uid)

    def _is_visible(self, name: str) -> bool:
        """Return whether the requesting user may see a link in ``iovs``: a link of this user, or to a semaphore."""
        if not self._is_shared or name.partition(".")[0] == _SEMAPHORE_LINK_STEM:
            return True
        return request_sender().uid in {0, self._link_clients.owner_uid(name)}

    def _remove_all(self, target: str) -> None:
        """Remove the file or folder that `target`, the target of a new link in ``rm-rf``, names."""
        refuse_restricted_root()
        prefix = f"{self._mount}/"
        # A relative path is refused, because the kernel does not pass the working folder of the requesting process.
        if not target.startswith(prefix) or os.path.normpath(target) != target.rstrip("/"):
            raise _make_error(errno.EINVAL)
        path = target.removeprefix(prefix).rstrip("/")
        if not path or self.has(f"/{path}"):
            raise _make_error(errno.EPERM)
        status = self._store.request(messages.Stat(path=path), messages.FileStat)
        self._store.remove_tree(path, status.mode)


def _make_attributes(path: str, mode: int, size_bytes: int) -> dict[str, int]:
    return {
        "st_ino": _compute_inode(path),
        "st_mode": mode,
        "st_size": size_bytes,
        "st_nlink": 1,
        "st_uid": os.geteuid(),
        "st_gid": os.getegid(),
    }


def _compute_inode(path: str) -> int:
    return _VIRTUAL_INODE_BITS | zlib.crc32(os.fsencode(path))


def _make_error(error_number: int) -> OSError:
    return OSError(error_number, os.strerror(error_number))
