"""The requests of the kernel to the FUSE mount of an agent, for the files of the store and for ``3fs-virt``.

Names, inodes, permissions, times and data of files come from the storage server. The kernel must cache nothing, because
rings write to files without the kernel.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.storage import messages
from gdrkit.usrbio.agent.files import PathAccess
from gdrkit.usrbio.fuse._mfusepy import request_sender
from gdrkit.usrbio.virtual import VIRTUAL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.usrbio.fuse.link_clients import LinkClients
    from gdrkit.usrbio.fuse.store import StoreFiles
    from gdrkit.usrbio.fuse.virtual_folder import VirtualFolder

__all__ = ["Operations"]

# Largest number of folders whose paths are stored for the ioctls HARDLINK and MOVE.
_FOLDERS_MAX = 4096
# Flags of renameat2(2).
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
# The number (-1, unsigned) for which chown(2) leaves the user or the group unchanged.
_UNCHANGED_ID = 0xFFFFFFFF


@dataclass(frozen=True)
class _OpenFile:
    """A file that is open through the mount.

    Attributes
    ----------
    handle : int
        Handle of the file in the :class:`StoreFiles`.
    inode : int
        Inode of the file at the server.
    writable : bool
        Whether the file was opened for writing.
    path : str
        The path at the time of opening. The file may have been renamed since.
    """

    handle: int
    inode: int
    writable: bool
    path: str


class Operations:
    """The requests, named as libfuse names them. `fh` is the number of an open file or folder (``fuse_file_info.fh``).

    Parameters
    ----------
    store : StoreFiles
        The files of the store.
    virtual_folder : VirtualFolder
        The folder ``3fs-virt``.
    link_clients : LinkClients
        The processes that publish rings by links. Such a ring can use every file that its user has open.
    mount : str
        Path of the mount.
    """

    def __init__(
        self, store: StoreFiles, virtual_folder: VirtualFolder, link_clients: LinkClients, *, mount: str
    ) -> None:
        self._store, self._virtual_folder, self._link_clients = store, virtual_folder, link_clients
        self._mount = mount
        self._lock = threading.Lock()
        self._last_fh = 0
        self._open_files: dict[int, _OpenFile] = {}
        # Path and inode of each open folder, by its number.
        self._open_folders: dict[int, tuple[str, int]] = {}
        # Paths of folders by inode, because the ioctls HARDLINK and MOVE name a folder by its inode.
        self._folder_paths: dict[int, str] = {}

    # ------------------------------------------------------------------------------------------------------- names

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        """Return the attributes of a path or of an open file, as stat(2) does."""
        if fh:
            status = self._store.request(messages.Stat(handle=self._find_file(fh).handle), messages.FileStat)
        elif path is None:
            raise _make_error(errno.ENOENT)
        elif self._virtual_folder.has(path):
            return self._virtual_folder.attributes(path)
        else:
            status = self._store.request(messages.Stat(path=_make_relative(path)), messages.FileStat)
        if path is not None and stat.S_ISDIR(status.mode):
            self._remember_folder(status.inode, path)
        return _make_attributes(status)

    def opendir(self, path: str) -> int:
        """Open a folder and return its number, by which the later requests name the folder."""
        inode = self.getattr(path)["st_ino"]
        with self._lock:
            self._last_fh += 1
            self._open_folders[self._last_fh] = path, inode
            return self._last_fh

    def releasedir(self, _path: str | None, fh: int) -> None:
        """Close a folder."""
        with self._lock:
            self._open_folders.pop(fh, None)

    def readdir(self, _path: str | None, fh: int) -> list[tuple[str, dict[str, int], int]]:
        """Return name, attributes and offset of every entry of a folder. Offset 0: libfuse stores the whole list."""
        with self._lock:
            path_and_inode = self._open_folders.get(fh)
        if path_and_inode is None:
            raise _make_error(errno.EBADF)
        path, _inode = path_and_inode
        # libfuse does not add these two entries.
        dot_entries = [(name, {"st_mode": stat.S_IFDIR, "st_ino": 0}, 0) for name in (".", "..")]
        is_virtual = self._virtual_folder.has(path)
        return dot_entries + list(self._virtual_folder.entries(path) if is_virtual else self._list_entries(path))

    def _list_entries(self, path: str) -> Iterator[tuple[str, dict[str, int], int]]:
        """Yield the entries of a folder of the store."""
        if path == "/":
            yield VIRTUAL_FOLDER, self._virtual_folder.attributes(f"/{VIRTUAL_FOLDER}"), 0
        last_name: str | None = None
        while True:
            reply = self._store.request(messages.List(path=_make_relative(path), after=last_name), messages.ListReply)
            for entry in reply.entries:
                yield entry.name, {"st_ino": entry.inode, "st_mode": entry.kind}, 0
                last_name = entry.name
            if not reply.more or not reply.entries:
                return

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""
        if self._virtual_folder.has(path):
            return self._virtual_folder.readlink(path)
        return self._store.request(messages.Readlink(path=_make_relative(path)), messages.ReadlinkReply).target

    def mkdir(self, path: str, mode: int) -> None:
        """Create a folder."""
        self._check_in_store(path)
        self._store.request(messages.Mkdir(path=_make_relative(path), mode=stat.S_IMODE(mode)), messages.FileStat)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        self._check_in_store(path)
        self._store.request(messages.Rmdir(path=_make_relative(path)), messages.Done)

    def unlink(self, path: str) -> None:
        """Remove a file, or a publication."""
        if self._virtual_folder.has(path):
            self._virtual_folder.unlink(path)
            return
        self._store.request(messages.Unlink(path=_make_relative(path)), messages.Done)

    def symlink(self, path: str, target: str) -> None:
        """Create a symbolic link. A link in ``3fs-virt`` is a request; see :class:`VirtualFolder`."""
        if self._virtual_folder.has(path):
            self._virtual_folder.symlink(path, target)
            return
        self._store.request(messages.Symlink(path=_make_relative(path), target=target), messages.FileStat)

    def link(self, new_path: str, path: str) -> None:
        """Create a hard link."""
        self._check_in_store(path, new_path)
        self._store.request(
            messages.HardLink(path=_make_relative(path), new_path=_make_relative(new_path)), messages.FileStat
        )

    def rename(self, path: str, new_path: str, flags: int = 0) -> None:
        """Rename a file or folder, with the flags of renameat2(2)."""
        self._check_in_store(path, new_path)
        if flags & ~(_RENAME_NOREPLACE | _RENAME_EXCHANGE):
            raise _make_error(errno.EINVAL)
        is_exclusive, is_exchange = bool(flags & _RENAME_NOREPLACE), bool(flags & _RENAME_EXCHANGE)
        request = messages.Rename(
            path=_make_relative(path),
            new_path=_make_relative(new_path),
            exclusive=is_exclusive,
            exchange=is_exchange,
        )
        self._store.request(request, messages.Done)

    # -------------------------------------------------------------------------------------------------- attributes

    def chmod(self, path: str | None, mode: int, fh: int | None = None) -> None:
        """Change permission bits."""
        request = messages.Chmod(path=_make_relative(self._find_current_path(path, fh)), mode=stat.S_IMODE(mode))
        self._store.request(request, messages.FileStat)

    def chown(self, path: str | None, uid: int, gid: int, fh: int | None = None) -> None:
        """Change user and group. A change fails with EPERM if the mount is not shared: then all files have one user."""
        attributes = self.getattr(path, fh)
        # The mask turns -1 into the unsigned number.
        new_uid, new_gid = (
            None if requested_id & _UNCHANGED_ID in {_UNCHANGED_ID, current_id} else requested_id & _UNCHANGED_ID
            for requested_id, current_id in ((uid, attributes["st_uid"]), (gid, attributes["st_gid"]))
        )
        if new_uid is not None or new_gid is not None:
            request = messages.Chown(path=_make_relative(self._find_current_path(path, fh)), uid=new_uid, gid=new_gid)
            self._store.request(request, messages.FileStat)

    def truncate(self, path: str | None, length_bytes: int, fh: int | None = None) -> None:
        """Set the size of a file."""
        if fh:
            request = messages.Truncate(size_bytes=length_bytes, handle=self._find_file(fh).handle)
        else:
            request = messages.Truncate(
                size_bytes=length_bytes, path=_make_relative(self._find_current_path(path, None))
            )
        self._store.request(request, messages.FileStat)

    def utimens(self, path: str | None, access_ns: int | None, modification_ns: int | None, fh: int | None) -> None:
        """Change times, in nanoseconds since 1970. -1 means the current time, None means no change."""
        now_ns = time.time_ns()
        access_time_ns, modification_time_ns = (
            now_ns if time_ns == -1 else time_ns for time_ns in (access_ns, modification_ns)
        )
        request = messages.Utimens(
            path=_make_relative(self._find_current_path(path, fh)),
            access_time_ns=access_time_ns,
            modification_time_ns=modification_time_ns,
        )
        self._store.request(request, messages.FileStat)

    def statfs(self, _path: str) -> dict[str, int]:
        """Return the sizes and free space of the store's file system, as statvfs(3) does."""
        reply = self._store.request(messages.Statfs(), messages.StatfsReply)
        return {
            "f_bsize": reply.block_bytes,
            "f_frsize": reply.block_bytes,
            "f_blocks": reply.blocks,
            "f_bfree": reply.blocks_free,
            "f_bavail": reply.blocks_available,
            "f_files": reply.files,
            "f_ffree": reply.files_free,
            "f_namemax": reply.name_bytes_max,
        }

    # -------------------------------------------------------------------------------------------------------- files

    def create(self, path: str, mode: int, flags: int) -> int:
        """Create and open a file, and return its number."""
        self._check_in_store(path)
        return self._open(path, flags, create=True, mode=stat.S_IMODE(mode))

    def open(self, path: str, flags: int) -> int:
        """Open a file, and return its number."""
        if self._virtual_folder.has(path):
            raise _make_error(errno.EACCES)
        return self._open(path, flags, create=False, mode=0)

    def read(self, _path: str | None, length_bytes: int, offset_bytes: int, fh: int) -> bytes:
        """Read from the server."""
        return self._store.read(self._find_file(fh).handle, offset_bytes=offset_bytes, length_bytes=length_bytes)

    def write(self, _path: str | None, data: bytes, offset_bytes: int, fh: int) -> int:
        """Write to the server."""
        return self._store.write(self._find_file(fh).handle, data, offset_bytes=offset_bytes)

    def fsync(self, _path: str | None, data_only: int, fh: int) -> None:
        """Sync a file at the server."""
        self._store.request(messages.Sync(handle=self._find_file(fh).handle, data_only=bool(data_only)), messages.Done)

    def release(self, _path: str | None, fh: int) -> None:
        """Close a file, because its last descriptor was closed."""
        with self._lock:
            file = self._open_files.pop(fh, None)
        if file is not None:
            self._link_clients.remove_file(fh)
            self._store.close_file(file.handle)

    def close(self) -> None:
        """Close all files that are still open. Call this method after the unmount."""
        with self._lock:
            open_fhs = list(self._open_files)
        for fh in open_fhs:
            self.release(None, fh)

    # ------------------------------------------------------------------------------------------------------ helpers

    def _find_file(self, fh: int) -> _OpenFile:
        """Return the open file with this number, or raise EBADF."""
        with self._lock:
            file = self._open_files.get(fh)
        if file is None:
            raise _make_error(errno.EBADF)
        return file

    def _find_current_path(self, path: str | None, fh: int | None) -> str:
        """Return `path` if it is set, else the path of an open file. Raise ENOENT if that path is outdated."""
        if path is not None:
            self._check_in_store(path)
            return path
        file = self._find_file(fh or 0)
        if self.getattr(file.path)["st_ino"] != file.inode:
            raise _make_error(errno.ENOENT)
        return file.path

    def _find_folder_path(self, inode: int) -> str:
        """Return the path of the folder `inode`. Raise ENOENT if its path is unknown or outdated.

        The path is known if the kernel has looked up the folder.
        """
        with self._lock:
            path = self._folder_paths.get(inode)
        if path is None or self.getattr(path)["st_ino"] != inode:
            raise _make_error(errno.ENOENT)
        return path

    def _get_open_folder(self, fh: int) -> tuple[str, int]:
        """Return the path and the inode of an open folder.

        Raise ENOTDIR if no folder has this number, and ENOENT if the folder no longer has the path of its opening.
        """
        with self._lock:
            path_and_inode = self._open_folders.get(fh)
        if path_and_inode is None:
            raise _make_error(errno.ENOTDIR)
        path, inode = path_and_inode
        if self.getattr(path)["st_ino"] != inode:
            raise _make_error(errno.ENOENT)
        return path, inode

    def _open(self, path: str, flags: int, *, create: bool, mode: int) -> int:
        access_mode = flags & os.O_ACCMODE
        writable = access_mode != os.O_RDONLY
        reply = self._store.request(
            messages.Open(
                path=_make_relative(path),
                read=access_mode != os.O_WRONLY,
                write=writable or create,
                create=create,
                truncate=bool(flags & os.O_TRUNC) and (writable or create),
                exclusive=create and bool(flags & os.O_EXCL),
                mode=mode,
            ),
            messages.OpenReply,
        )
        with self._lock:
            self._last_fh += 1
            fh = self._last_fh
            self._open_files[fh] = _OpenFile(reply.handle, reply.stat.inode, writable, path)
        access = PathAccess(
            _make_relative(path),
            inode=reply.stat.inode,
            readable=access_mode != os.O_WRONLY,
            writable=writable,
            user=self._store.user_of_request(),
        )
        self._link_clients.add_file(fh, access, uid=request_sender().uid)
        return fh

    def _check_in_store(self, *paths: str) -> None:
        """Raise EPERM if a path is ``3fs-virt`` or below it."""
        if any(map(self._virtual_folder.has, paths)):
            raise _make_error(errno.EPERM)

    def _remember_folder(self, inode: int, path: str) -> None:
        """Store the path of a folder by its inode. Forget the oldest path if there are too many."""
        with self._lock:
            self._folder_paths.pop(inode, None)
            self._folder_paths[inode] = path
            if len(self._folder_paths) > _FOLDERS_MAX:
                del self._folder_paths[next(iter(self._folder_paths))]


def _make_relative(path: str) -> str:
    return path.lstrip("/")


def _make_error(error_number: int) -> OSError:
    return OSError(error_number, os.strerror(error_number))


def _make_attributes(status: messages.FileStat) -> dict[str, int]:
    return {
        "st_ino": status.inode,
        "st_mode": status.mode,
        "st_size": status.size_bytes,
        "st_nlink": status.links,
        "st_uid": status.uid,
        "st_gid": status.gid,
        "st_blocks": status.allocated_bytes // 512,
        "st_blksize": 4096,
        "st_atime": status.access_time_ns,
        "st_mtime": status.modification_time_ns,
        "st_ctime": status.change_time_ns,
    }
