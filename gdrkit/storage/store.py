"""A folder whose files the storage service serves. No path of a client leads out of it.

User files are ordinary files. gdrkit's own data is in ``.gdrkit`` beside them: ``store.json`` (the format), ``token``
(the secret of clients over TCP), ``lock`` (one server at a time) and ``sums`` (the checksums of chunks, one file per
inode).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gdrkit.errors import Reason, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.host import PrivateFolder
from gdrkit.storage._native import engine
from gdrkit.storage.messages import FileStat, FolderEntry, ListReply, StatfsReply
from gdrkit.storage.token import OWN_FOLDER, checked_token
from gdrkit.storage.wire import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ["FileStore", "file_stat"]

# Names in the root of the store that clients never see: the store's own folder and that of the agent.
_HIDDEN = frozenset({b".gdrkit", b"3fs-virt"})
_FORMAT = 1
_CHUNK_BYTES = 4096
# Limit of the JSON of the entries in one list reply, in bytes: a frame without the rest of that reply.
_ENTRIES_BYTES_MAX = CONTROL_BYTES_MAX - 1024
# Size of the JSON of one entry without its name, in bytes: the names of the fields, and two numbers.
_ENTRY_BYTES = 80
# Permission bits that a client may set. Set-user-ID, set-group-ID and sticky bits are excluded.
_MODE_MASK = 0o777


class FileStore:
    """The files of one store. Only one process at a time can open it.

    Parameters
    ----------
    root : Path
        The folder. `.gdrkit` is created in it if it does not exist.
    chunk_bytes : int or None
        Bytes that one checksum covers, a power of two from 4096 to 65536, fixed when the store is created. None: the
        existing value, or 4096.

    Raises
    ------
    OSError
        The folder cannot be used. EWOULDBLOCK: another server has it open.
    SetupMissing
        Another user can change gdrkit's data in `.gdrkit`, or has created that folder.
    UsageError
        The store was created with another chunk size, or by another version.
    """

    def __init__(self, root: Path, *, chunk_bytes: int | None = None) -> None:
        self._parts = ReleaseStack()
        self._closed = False
        try:
            self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._parts.push(lambda: os.close(self._root))
            self._own = PrivateFolder.below(root / OWN_FOLDER, parent=self._root)
            self._parts.push(self._own.close)
            lock = self._own.lock("lock")
            self._parts.push(lambda: os.close(lock))
            self.chunk_bytes = self._format(chunk_bytes)
            self.token = self._token()
            sums = self._own.folder("sums")
            self._parts.push(sums.close)
            self.native = engine().Store(sums.fd, self.chunk_bytes)
        except BaseException as error:
            self._parts.run_after(error)
            raise
        self._handle = Handle("storage.store")

    def open(self, path: str, *, flags: int, mode: int = 0) -> Any:  # noqa: ANN401 - native object.
        """Open a regular file and return the engine's object (``_engine.OpenFile``); flags as in open(2)."""
        _check_visible(path)
        write = flags & os.O_ACCMODE != os.O_RDONLY
        # A change of a part of a chunk must read the rest of it, so a file that is written is opened for reading, too.
        # With O_NONBLOCK, the open of a FIFO fails at once and does not block.
        access = os.O_RDWR if write else os.O_RDONLY
        descriptor = self._beneath(path, access | (flags & (os.O_CREAT | os.O_EXCL)) | os.O_NONBLOCK, mode & _MODE_MASK)
        file = self.native.adopt(descriptor, read=flags & os.O_ACCMODE != os.O_WRONLY, write=write)
        if flags & os.O_TRUNC:
            file.truncate(0)
        return file

    def adopt(self, descriptor: int, *, read: bool, write: bool) -> Any:  # noqa: ANN401 - native object.
        """Open the file of a descriptor that a client sent. Fail with EXDEV if the file is not in the store."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        access = flags & os.O_ACCMODE
        if flags & os.O_PATH or (read and access == os.O_WRONLY) or (write and access == os.O_RDONLY):
            raise OSError(errno.EACCES, "the access mode of the descriptor does not permit this")
        file, root = os.fstat(descriptor), os.fstat(self._root)
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        relative = os.path.relpath(name, Path(f"/proc/self/fd/{self._root}").readlink())
        if file.st_dev != root.st_dev or relative.startswith("../") or os.fsencode(relative).split(b"/")[0] in _HIDDEN:
            raise OSError(errno.EXDEV, "the file of the descriptor is not in this store")
        # The file is opened again, because flags such as O_APPEND belong to the client's descriptor.
        reopened = os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
        return self.native.adopt(reopened, read=read, write=write)

    def stat(self, path: str) -> FileStat:
        """Return the attributes of a path. A symbolic link is not followed."""
        if not path:
            return file_stat(os.fstat(self._root))
        with self._parent(path) as (folder, name):
            return file_stat(os.stat(name, dir_fd=folder, follow_symlinks=False))

    def list(self, path: str, after: str | None) -> ListReply:
        """Return the names of a folder that fit into one reply."""
        _check_visible(path)
        with self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
            with os.scandir(folder) as entries:
                by_name = {os.fsencode(each.name): each for each in entries}
            least = b"" if after is None else os.fsencode(after)
            hidden = _HIDDEN if os.path.samestat(os.fstat(folder), os.fstat(self._root)) else frozenset()
            names = sorted(name for name in by_name if name > least and name not in hidden)
            listed, bytes_left = [], _ENTRIES_BYTES_MAX
            for name in names:
                entry = by_name[name]
                # The size is that of the JSON: a character takes up to 12 bytes, as two escapes.
                bytes_left -= _ENTRY_BYTES + len(json.dumps(entry.name))
                if bytes_left < 0:
                    break
                with contextlib.suppress(FileNotFoundError):  # The file was removed meanwhile.
                    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    listed.append(FolderEntry(name=entry.name, inode=info.st_ino, kind=stat.S_IFMT(info.st_mode)))
        return ListReply(entries=tuple(listed), more=bytes_left < 0)

    def mkdir(self, path: str, mode: int) -> FileStat:
        """Create a folder."""
        with self._parent(path) as (folder, name):
            os.mkdir(name, mode & _MODE_MASK, dir_fd=folder)
            return file_stat(os.stat(name, dir_fd=folder, follow_symlinks=False))

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        with self._parent(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)

    def unlink(self, path: str) -> None:
        """Remove a name. With the last name, the checksums are removed, too."""
        with self._parent(path) as (folder, name):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            os.unlink(name, dir_fd=folder)
        self._remove_sums(info)

    def rename(self, path: str, new_path: str, *, exclusive: bool, exchange: bool) -> None:
        """Rename by renameat2(2)."""
        with self._parent(path) as (folder, name), self._parent(new_path) as (new_folder, new_name):
            replaced = None
            if not exchange:
                with contextlib.suppress(FileNotFoundError):
                    replaced = os.stat(new_name, dir_fd=new_folder, follow_symlinks=False)
            moved = os.stat(name, dir_fd=folder, follow_symlinks=False)
            engine().rename(folder, name, new_folder, new_name, exclusive=exclusive, exchange=exchange)
        # If both are names of one file, rename(2) does nothing.
        if replaced is not None and replaced.st_ino != moved.st_ino:
            self._remove_sums(replaced)

    def link(self, path: str, new_path: str) -> FileStat:
        """Create a second name (hard link)."""
        with self._parent(path) as (folder, name), self._parent(new_path) as (new_folder, new_name):
            os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)
            return file_stat(os.stat(new_name, dir_fd=new_folder, follow_symlinks=False))

    def symlink(self, path: str, target: str) -> FileStat:
        """Create a symbolic link."""
        with self._parent(path) as (folder, name):
            os.symlink(os.fsencode(target), name, dir_fd=folder)
            return file_stat(os.stat(name, dir_fd=folder, follow_symlinks=False))

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""
        with self._parent(path) as (folder, name):
            return os.fsdecode(os.readlink(name, dir_fd=folder))

    def chmod(self, path: str, mode: int) -> FileStat:
        """Change the permission bits within 0777. A symbolic link fails with ELOOP."""
        _check_visible(path)
        with self._opened(path, os.O_PATH) as file:
            # fchmod does not accept an O_PATH descriptor, and a file without read permission can only be opened with
            # O_PATH.
            Path(f"/proc/self/fd/{file}").chmod(mode & _MODE_MASK)
            return file_stat(os.fstat(file))

    def utimens(self, path: str, *, access_time_ns: int | None, modification_time_ns: int | None) -> FileStat:
        """Change times. The checksums of the file stay valid."""
        if stat.S_ISREG(self.stat(path).mode):
            self.open(path, flags=os.O_RDONLY).set_times(access_time_ns, modification_time_ns)
        else:
            now = self.stat(path)
            times = (
                now.access_time_ns if access_time_ns is None else access_time_ns,
                now.modification_time_ns if modification_time_ns is None else modification_time_ns,
            )
            if not path:
                os.utime(self._root, ns=times)
            else:
                with self._parent(path) as (folder, name):
                    os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)
        return self.stat(path)

    def statfs(self) -> StatfsReply:
        """Return the space of the file system."""
        now = os.fstatvfs(self._root)
        return StatfsReply(
            block_bytes=now.f_frsize,
            blocks=now.f_blocks,
            blocks_free=now.f_bfree,
            blocks_available=now.f_bavail,
            files=now.f_files,
            files_free=now.f_ffree,
            name_bytes_max=now.f_namemax,
        )

    def own_socket(self) -> Path:
        """Return the default socket path of a server of this store."""
        return self._own.path.resolve() / "server.sock"

    def close(self) -> None:
        """Close the folder and release its lock. Open files stay open."""
        if not self._closed:
            self._parts.run()
            self._closed = True
            self._handle.release()

    def _beneath(self, path: str, flags: int, mode: int = 0) -> int:
        return int(engine().open_beneath(self._root, os.fsencode(path), flags, mode))

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        descriptor = self._beneath(path, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Open the folder of a path. Yield its descriptor and the last name."""
        _check_visible(path)
        before, _, name = path.rstrip("/").rpartition("/")
        if name in {"", ".", ".."}:
            raise OSError(errno.EINVAL, f"the last component of the path must be a name, not {name!r}")
        with self._opened(before, os.O_PATH | os.O_DIRECTORY) as folder:
            yield folder, os.fsencode(name)

    def _remove_sums(self, info: os.stat_result) -> None:
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
            self.native.remove_sums(info.st_ino)

    def _format(self, chunk_bytes: int | None) -> int:
        requested = {"format": _FORMAT, "chunk_bytes": _CHUNK_BYTES if chunk_bytes is None else chunk_bytes}
        if not self._own.has("store.json"):
            self._own.write_text("store.json", json.dumps(requested) + "\n")
        try:
            stored = json.loads(self._own.read_text("store.json"))
        except ValueError as error:
            message = f"{OWN_FOLDER}/store.json is not JSON"
            raise UsageError(message, reason=Reason.MALFORMED) from error
        if (
            not isinstance(stored, dict)
            or stored.get("format") != _FORMAT
            or type(stored.get("chunk_bytes")) is not int
        ):
            message = f"{OWN_FOLDER}/store.json must be of format {_FORMAT}, not {str(stored)[:80]}"
            raise UsageError(message, reason=Reason.MALFORMED)
        if chunk_bytes is not None and stored["chunk_bytes"] != chunk_bytes:
            message = f"the store has chunks of {stored['chunk_bytes']} bytes, not {chunk_bytes}"
            raise UsageError(message, what_to_do="leave --chunk-bytes out")
        return int(stored["chunk_bytes"])

    def _token(self) -> str:
        if not self._own.has("token"):
            self._own.write_text("token", secrets.token_hex(32) + "\n")
        return checked_token(self._own.read_text, "token", self._own.path / "token")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def file_stat(info: os.stat_result) -> FileStat:
    """Return the attributes in the form of a reply."""
    return FileStat(
        inode=info.st_ino,
        mode=info.st_mode,
        size_bytes=info.st_size,
        links=info.st_nlink,
        uid=info.st_uid,
        gid=info.st_gid,
        allocated_bytes=info.st_blocks * 512,
        access_time_ns=info.st_atime_ns,
        modification_time_ns=info.st_mtime_ns,
        change_time_ns=info.st_ctime_ns,
    )


def _check_visible(path: str) -> None:
    parts = os.fsencode(path).split(b"/")
    if path.startswith("/") or b".." in parts:
        raise OSError(errno.EXDEV, "the path must be relative to the store, without ..")
    first = next((part for part in parts if part not in {b"", b"."}), b"")
    if first in _HIDDEN:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
