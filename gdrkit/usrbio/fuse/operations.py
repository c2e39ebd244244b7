"""What the FUSE mount of an agent answers: the files of the store, and ``3fs-virt``.

Level 5. Files are the server's: names, inodes, permissions and times come from it, and data through it. The kernel
keeps nothing, since rings write behind its back.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

from gdrkit.storage import messages
from gdrkit.usrbio import virtual
from gdrkit.usrbio.fuse._mfusepy import copy_in, copy_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.usrbio.fuse.virtual_folder import VirtualFolder

__all__ = ["OpenFile", "Operations", "StoreFiles"]

Reply = TypeVar("Reply")

_FOLDERS_REMEMBERED = 4096
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
# Of nobody else: says which handle a descriptor of this mount has.
HANDLE_OF = virtual.request_of(200, 8)


class StoreFiles(Protocol):
    """The store, as its client gives it to a mount; errors are OSError, or errors of gdrkit that have an errno."""

    @overload
    def ask(self, request: object) -> object: ...

    @overload
    def ask(self, request: object, kind: type[Reply]) -> Reply: ...

    def ask(self, request: object, kind: type[object] = object) -> object:
        """A control message (:mod:`gdrkit.storage.messages`), and its reply, which is of this kind."""

    def read(self, handle: int, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes of an open file; fewer at its end."""

    def write(self, handle: int, data: bytes, *, offset_bytes: int) -> int:
        """How many bytes were written."""


@dataclass(frozen=True)
class OpenFile:
    """A file that is open through the mount.

    Attributes
    ----------
    handle : int
        The server's.
    inode : int
        The server's, which entries of rings name.
    readable, writable : bool
        For what it was opened.
    path : str
        By which it was opened; it may have another by now.
    """

    handle: int
    inode: int
    readable: bool
    writable: bool
    path: str


class Operations:
    """The answers, each named as libfuse names its request."""

    def __init__(self, store: StoreFiles, folder: VirtualFolder, *, mount: str) -> None:
        self._store, self._folder, self._mount = store, folder, mount
        self._lock = threading.Lock()
        self._open: dict[int, OpenFile] = {}
        self._next = 0
        self._listed: dict[int, str] = {}
        # The kernel names a folder by its inode in one ioctl.
        self._folders: dict[int, str] = {}

    def open_file(self, number: int) -> OpenFile:
        """The file of a handle of the mount; OSError(EBADF) when there is none."""
        with self._lock:
            found = self._open.get(number)
        if found is None:
            raise _error(errno.EBADF)
        return found

    def files_of(self, inode: int) -> list[OpenFile]:
        """All that are open with this inode."""
        with self._lock:
            return [file for file in self._open.values() if file.inode == inode]

    # ------------------------------------------------------------------------------------------------------- names

    def getattr(self, path: str | None, number: int | None = None) -> dict[str, int]:
        """Ask what stat(2) says."""
        if number:
            reply = self._store.ask(messages.Stat(handle=self.open_file(number).handle), messages.FileStat)
        elif path is None:
            raise _error(errno.ENOENT)
        elif self._folder.has(path):
            return self._folder.attributes(path)
        else:
            reply = self._store.ask(messages.Stat(path=_relative(path)), messages.FileStat)
        if path is not None and stat.S_ISDIR(reply.mode):
            self._remember(reply.inode, path)
        return _attributes(reply)

    def opendir(self, path: str) -> int:
        """Begin to list a folder; later requests bring the number alone."""
        with self._lock:
            self._next += 1
            self._listed[self._next] = path
            return self._next

    def releasedir(self, _path: str | None, number: int) -> None:
        """End to list it."""
        with self._lock:
            self._listed.pop(number, None)

    def readdir(self, _path: str | None, number: int) -> list[tuple[str, dict[str, int], int]]:
        """List a folder."""
        with self._lock:
            path = self._listed.get(number)
        if path is None:
            raise _error(errno.EBADF)
        names = self._folder.entries(path) if self._folder.has(path) else self._entries(path)
        # libfuse does not know these two by itself.
        return [(name, {"st_mode": stat.S_IFDIR, "st_ino": 0}, 0) for name in (".", "..")] + list(names)

    def _entries(self, path: str) -> Iterator[tuple[str, dict[str, int], int]]:
        if path == "/":
            yield virtual.VIRTUAL_FOLDER, self._folder.attributes(f"/{virtual.VIRTUAL_FOLDER}"), 0
        after: str | None = None
        while True:
            reply = self._store.ask(messages.List(path=_relative(path), after=after), messages.ListReply)
            for entry in reply.entries:
                yield entry.name, {"st_ino": entry.inode, "st_mode": entry.kind}, 0
                after = entry.name
            if not reply.more or not reply.entries:
                return

    def readlink(self, path: str) -> str:
        """Give the target of a symbolic link."""
        if self._folder.has(path):
            return self._folder.readlink(path)
        return self._store.ask(messages.Readlink(path=_relative(path)), messages.ReadlinkReply).target

    def mkdir(self, path: str, mode: int) -> None:
        """Make a folder."""
        self._only_files(path)
        self._store.ask(messages.Mkdir(path=_relative(path), mode=stat.S_IMODE(mode)))

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        self._only_files(path)
        self._store.ask(messages.Rmdir(path=_relative(path)))

    def unlink(self, path: str) -> None:
        """Remove a name; of a publication, take it back."""
        if self._folder.has(path):
            self._folder.unlink(path)
            return
        self._store.ask(messages.Unlink(path=_relative(path)))

    def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link; in ``iovs``, publish."""
        if self._folder.has(path):
            self._folder.symlink(path, target)
            return
        self._store.ask(messages.Symlink(path=_relative(path), target=target))

    def link(self, new_path: str, path: str) -> None:
        """Make a second name of a file."""
        self._only_files(path, new_path)
        self._store.ask(messages.HardLink(path=_relative(path), new_path=_relative(new_path)))

    def rename(self, path: str, new_path: str, flags: int = 0) -> None:
        """Rename, as renameat2(2)."""
        self._only_files(path, new_path)
        if flags & ~(_RENAME_NOREPLACE | _RENAME_EXCHANGE):
            raise _error(errno.EINVAL)
        exclusive, exchange = bool(flags & _RENAME_NOREPLACE), bool(flags & _RENAME_EXCHANGE)
        self._store.ask(
            messages.Rename(path=_relative(path), new_path=_relative(new_path), exclusive=exclusive, exchange=exchange)
        )

    # -------------------------------------------------------------------------------------------------- attributes

    def chmod(self, path: str | None, mode: int, number: int | None = None) -> None:
        """Change permission bits."""
        self._store.ask(messages.Chmod(path=_relative(self._named(path, number)), mode=stat.S_IMODE(mode)))

    def chown(self, path: str | None, uid: int, gid: int, number: int | None = None) -> None:
        """Refuse another owner: the store has one."""
        found = self.getattr(path, number)
        unchanged = 0xFFFFFFFF
        if uid & unchanged not in {unchanged, found["st_uid"]} or gid & unchanged not in {unchanged, found["st_gid"]}:
            raise _error(errno.EPERM)

    def truncate(self, path: str | None, length_bytes: int, number: int | None = None) -> None:
        """Set the size of a file."""
        if number:
            request = messages.Truncate(size_bytes=length_bytes, handle=self.open_file(number).handle)
        else:
            request = messages.Truncate(size_bytes=length_bytes, path=_relative(self._named(path, None)))
        self._store.ask(request)

    def utimens(self, path: str | None, access_ns: int | None, modified_ns: int | None, number: int | None) -> None:
        """Change times; -1: now."""
        now = time.time_ns()
        access, modified = (now if given == -1 else given for given in (access_ns, modified_ns))
        self._store.ask(
            messages.Utimens(
                path=_relative(self._named(path, number)), access_time_ns=access, modification_time_ns=modified
            )
        )

    def statfs(self, _path: str) -> dict[str, int]:
        """Say what room there is."""
        reply = self._store.ask(messages.Statfs(), messages.StatfsReply)
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
        """Make a file and open it."""
        self._only_files(path)
        return self._opened(path, flags, create=True, mode=stat.S_IMODE(mode))

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        if self._folder.has(path):
            raise _error(errno.EACCES)
        return self._opened(path, flags, create=False, mode=0)

    def read(self, _path: str | None, length_bytes: int, offset_bytes: int, number: int) -> bytes:
        """Read through the server."""
        handle = self.open_file(number).handle
        return self._store.read(handle, offset_bytes=offset_bytes, length_bytes=length_bytes)

    def write(self, _path: str | None, data: bytes, offset_bytes: int, number: int) -> int:
        """Write through the server."""
        return self._store.write(self.open_file(number).handle, data, offset_bytes=offset_bytes)

    def fsync(self, _path: str | None, data_only: int, number: int) -> None:
        """Have the server bring a file to its disk."""
        self._store.ask(messages.Sync(handle=self.open_file(number).handle, data_only=bool(data_only)))

    def release(self, _path: str | None, number: int) -> None:
        """Close a file: its last descriptor is closed."""
        with self._lock:
            file = self._open.pop(number, None)
        if file is not None:
            self._store.ask(messages.Close(handle=file.handle))

    def ioctl(self, path: str | None, request: int, _argument: object, number: int, _flags: int, data: int) -> None:
        """Answer what 3FS answers; ENOTTY for the rest."""
        request &= 0xFFFFFFFF
        if answer := self._said(request, number):
            copy_out(data, answer)
        elif request == virtual.FSYNC:
            self.fsync(path, 0, number)
        elif request == virtual.HARDLINK:
            self._hardlink(number, copy_in(data, virtual.HARDLINK_ARGUMENT.size))
        elif request == virtual.PUNCH_HOLE:
            self._punch_hole(number, copy_in(data, virtual.PUNCH_HOLE_ARGUMENT.size))
        else:
            raise _error(errno.ENOTTY)

    def close(self) -> None:
        """Close what is open still, when the mount is gone."""
        with self._lock:
            numbers = list(self._open)
        for number in numbers:
            self.release(None, number)

    # ------------------------------------------------------------------------------------------------------ helpers

    def _said(self, request: int, number: int) -> bytes | None:
        if request == virtual.GET_MAGIC:
            return virtual.MAGIC.to_bytes(4, "little")
        if request == virtual.GET_IOCTL_VERSION:
            return virtual.IOCTL_VERSION.to_bytes(4, "little")
        if request == virtual.GET_PATH_OFFSET:
            return len(os.fsencode(self._mount)).to_bytes(4, "little")
        if request == virtual.GET_MOUNT_NAME:
            name = os.fsencode(Path(self._mount).name)[: virtual.MOUNT_NAME_BYTES - 1]
            return name.ljust(virtual.MOUNT_NAME_BYTES, b"\0")
        return number.to_bytes(8, "little") if request == HANDLE_OF else None

    def _hardlink(self, number: int, argument: bytes) -> None:
        parent, name = virtual.HARDLINK_ARGUMENT.unpack(argument)
        text = os.fsdecode(name.partition(b"\0")[0])
        with self._lock:
            folder = self._folders.get(parent)
        if folder is None or self.getattr(folder)["st_ino"] != parent:
            raise _error(errno.ENOENT)
        if text in {"", ".", ".."} or "/" in text:
            raise _error(errno.EINVAL)
        self.link(f"{folder.rstrip('/')}/{text}", self._named(None, number))

    def _punch_hole(self, number: int, argument: bytes) -> None:
        count, _flags, *ends = virtual.PUNCH_HOLE_ARGUMENT.unpack(argument)
        if not 0 <= count <= virtual.PUNCH_HOLE_MAX:
            raise _error(errno.EINVAL)
        starts, stops = ends[:count], ends[virtual.PUNCH_HOLE_MAX : virtual.PUNCH_HOLE_MAX + count]
        file = self.open_file(number)
        if not file.writable:
            raise _error(errno.EBADF)
        self._store.ask(messages.PunchHole(handle=file.handle, ranges=tuple(zip(starts, stops, strict=True))))

    def _opened(self, path: str, flags: int, *, create: bool, mode: int) -> int:
        access = flags & os.O_ACCMODE
        readable, writable = access != os.O_WRONLY, access != os.O_RDONLY
        reply = self._store.ask(
            messages.Open(
                path=_relative(path),
                read=readable,
                write=writable or create,
                create=create,
                truncate=bool(flags & os.O_TRUNC) and (writable or create),
                exclusive=create and bool(flags & os.O_EXCL),
                mode=mode,
            ),
            messages.OpenReply,
        )
        with self._lock:
            self._next += 1
            self._open[self._next] = OpenFile(reply.handle, reply.stat.inode, readable, writable, path)
            return self._next

    def _named(self, path: str | None, number: int | None) -> str:
        """A name that the file still has."""
        if path is not None:
            self._only_files(path)
            return path
        file = self.open_file(number or 0)
        if self.getattr(file.path)["st_ino"] != file.inode:
            raise _error(errno.ENOENT)
        return file.path

    def _only_files(self, *paths: str) -> None:
        if any(map(self._folder.has, paths)):
            raise _error(errno.EPERM)

    def _remember(self, inode: int, path: str) -> None:
        with self._lock:
            self._folders.pop(inode, None)
            self._folders[inode] = path
            if len(self._folders) > _FOLDERS_REMEMBERED:
                del self._folders[next(iter(self._folders))]


def _relative(path: str) -> str:
    return path.lstrip("/")


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _attributes(found: messages.FileStat) -> dict[str, int]:
    return {
        "st_ino": found.inode,
        "st_mode": found.mode,
        "st_size": found.size_bytes,
        "st_nlink": found.links,
        "st_uid": found.uid,
        "st_gid": found.gid,
        "st_blocks": found.allocated_bytes // 512,
        "st_blksize": 4096,
        "st_atime": found.access_time_ns,
        "st_mtime": found.modification_time_ns,
        "st_ctime": found.change_time_ns,
    }
