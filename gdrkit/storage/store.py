"""A store: a folder whose files the storage service serves. No path of a client leads out of it.

The files of clients are ordinary files. The data of the service is in the *private folder* ``.gdrkit`` of the store:
``store.json`` (the format), ``token`` (the secret of clients over TCP), ``lock`` (one server at a time) and ``sums``
(the checksums of chunks, one file per inode).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gdrkit.errors import Reason, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.host import PrivateFolder, acting_as, allow_set_group_id, drop_write_capabilities, separate_umask
from gdrkit.storage._native import engine
from gdrkit.storage.messages import FileStat, FolderEntry, ListReply, StatfsReply
from gdrkit.storage.token import PRIVATE_FOLDER, read_valid_token
from gdrkit.storage.wire import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from gdrkit.storage.messages import SetUser

__all__ = ["FileStore", "file_stat"]

# Names in the root of the store that clients never see: the private folder, and the folder of the agent of
# gdrkit.usrbio.
_HIDDEN_NAMES = frozenset({b".gdrkit", b"3fs-virt"})
_FORMAT_VERSION = 1
_DEFAULT_CHUNK_BYTES = 4096
# Largest size of the JSON of the entries of one list reply. The other fields of the reply need less than 1024 bytes.
_ENTRIES_BYTES_MAX = CONTROL_BYTES_MAX - 1024
# Largest size of the JSON of one entry without its name: the names of the fields, and two numbers.
_ENTRY_BYTES_WITHOUT_NAME = 80
# Permission bits that a client may set for a file, and for a folder in a session with a user. In a folder, the
# set-group-ID and sticky bits decide who may use its files.
_MODE_MASK, _FOLDER_MODE_MASK = 0o777, 0o3777


class FileStore:
    """The files of one store. Only one process at a time can open it.

    Parameters
    ----------
    root : Path
        The folder. `.gdrkit` is created in it if it does not exist.
    chunk_bytes : int or None
        Number of bytes that one checksum covers, a power of two from 4096 to 65536. It is fixed when the store is
        created. None: the existing value, or 4096.
    sums_generation_fd : int
        Descriptor of a page of memory that the caller shares with a reader of the checksums in another process. The
        store increments a counter in this page when it creates the checksums of a file in a new place. -1: there is no
        such reader.

    Raises
    ------
    OSError
        The folder cannot be used. EWOULDBLOCK: another server has it open.
    SetupMissing
        Another user can change the data in `.gdrkit`, or has created that folder.
    UsageError
        The store was created with another chunk size, or by another version.
    """

    def __init__(self, root: Path, *, chunk_bytes: int | None = None, sums_generation_fd: int = -1) -> None:
        self._close_actions = ReleaseStack()
        self._is_closed = False
        # The attribute `user` is the user with whose rights a thread executes requests; see set_user().
        self._thread_state = threading.local()
        try:
            self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._close_actions.push(lambda: os.close(self._root_fd))
            self._private_folder = PrivateFolder.below(root / PRIVATE_FOLDER, parent_fd=self._root_fd)
            self._close_actions.push(self._private_folder.close)
            lock_fd = self._private_folder.lock("lock")
            self._close_actions.push(lambda: os.close(lock_fd))
            self.chunk_bytes = self._read_or_create_format(chunk_bytes)
            self.token = self._read_or_create_token()
            sums_folder = self._private_folder.folder("sums")
            self._close_actions.push(sums_folder.close)
            self.native = engine.Store(sums_folder.fd, self.chunk_bytes, generation_fd=sums_generation_fd)
        except BaseException as error:
            self._close_actions.run_after(error)
            raise
        self._live_handle = Handle("storage.store")

    def set_user(self, user: SetUser) -> None:
        """Use paths with the rights of this user in all later calls of this thread.

        Raises
        ------
        OSError
            EPERM: this process does not run as root, or has no CAP_SETUID, CAP_SETGID or CAP_FSETID.
        """
        if os.geteuid() != 0:
            raise OSError(
                errno.EPERM,
                f"only a server that runs as root can act as other users; this one runs as user {os.geteuid()}",
            )
        with _act_as(user):  # _act_as() raises if this process cannot take the rights of the user.
            pass
        if self._user is None:
            separate_umask()
        self._thread_state.user = user

    def open(self, path: str, *, flags: int, mode: int = 0) -> Any:  # noqa: ANN401 - native object.
        """Open a regular file with the flags of open(2), and return the object of the engine (``_engine.OpenFile``)."""
        _check_visible(path)
        is_for_writing = flags & os.O_ACCMODE != os.O_RDONLY
        # A file for writing is opened for reading, too: if a write covers only a part of a chunk, the server reads the
        # rest of the chunk, because the checksum covers the whole chunk. With O_NONBLOCK, the open of a FIFO does not
        # block, and adopt() refuses the FIFO.
        needed_access = os.O_RDWR if is_for_writing else os.O_RDONLY
        first_open_access = needed_access if self._user is None else flags & os.O_ACCMODE
        with self._act_as_user():
            descriptor = self._open_beneath(
                path, first_open_access | (flags & (os.O_CREAT | os.O_EXCL)) | os.O_NONBLOCK, mode & _MODE_MASK
            )
        if first_open_access != needed_access:
            # The file was opened for writing only, with the rights of the user. The server also reads it, so it opens
            # the file again with its own rights.
            try:
                reopened_fd = os.open(f"/proc/self/fd/{descriptor}", needed_access | os.O_NONBLOCK | os.O_CLOEXEC)
            finally:
                os.close(descriptor)
            descriptor = reopened_fd
        file = self.native.adopt(descriptor, read=flags & os.O_ACCMODE != os.O_WRONLY, write=is_for_writing)
        if flags & os.O_TRUNC:
            file.truncate(0)
        return file

    def adopt(self, descriptor: int, *, read: bool, write: bool) -> Any:  # noqa: ANN401 - native object.
        """Open the file of a descriptor that a client sent.

        Raises
        ------
        OSError
            EXDEV: the file is not in the store. EACCES: the descriptor does not permit the reads or writes. EAGAIN:
            another process has a lease on the file.
        """
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        access = flags & os.O_ACCMODE
        if flags & os.O_PATH or (read and access == os.O_WRONLY) or (write and access == os.O_RDONLY):
            raise OSError(
                errno.EACCES, "the access mode of the descriptor does not permit the requested reads or writes"
            )
        is_on_other_device = os.fstat(descriptor).st_dev != os.fstat(self._root_fd).st_dev
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        relative_path = os.path.relpath(path, Path(f"/proc/self/fd/{self._root_fd}").readlink())
        first_name = os.fsencode(relative_path).split(b"/")[0]
        if is_on_other_device or relative_path.startswith("../") or first_name in _HIDDEN_NAMES:
            raise OSError(errno.EXDEV, "the file of the descriptor is not in this store")
        # The file is opened again, because flags such as O_APPEND belong to the client's descriptor. If a client has a
        # lease on the file (F_SETLEASE), an open without O_NONBLOCK waits up to 45 s, and later requests of the session
        # wait, too.
        needed_access = os.O_RDWR if write else os.O_RDONLY
        reopened_fd = os.open(f"/proc/self/fd/{descriptor}", needed_access | os.O_NONBLOCK | os.O_CLOEXEC)
        return self.native.adopt(reopened_fd, read=read, write=write)

    def stat(self, path: str) -> FileStat:
        """Return the attributes of a path. A symbolic link is not followed."""
        if not path:
            return file_stat(os.fstat(self._root_fd))
        with self._open_parent(path) as (folder_fd, name):
            return file_stat(os.stat(name, dir_fd=folder_fd, follow_symlinks=False))

    def list(self, path: str, after: str | None) -> ListReply:
        """Return the names of a folder that are greater than `after`, as many as fit into one reply."""
        _check_visible(path)
        with self._act_as_user():
            folder_fd = self._open_beneath(path, os.O_RDONLY | os.O_DIRECTORY)
        # The types of the entries are read with the rights of the server, because the user may have no right to do so.
        with _close_after(folder_fd):
            with os.scandir(folder_fd) as entries:
                entry_by_name = {os.fsencode(entry.name): entry for entry in entries}
            after_bytes = b"" if after is None else os.fsencode(after)
            hidden_names = (
                _HIDDEN_NAMES if os.path.samestat(os.fstat(folder_fd), os.fstat(self._root_fd)) else frozenset()
            )
            names = sorted(name for name in entry_by_name if name > after_bytes and name not in hidden_names)
            reply_entries, bytes_left = [], _ENTRIES_BYTES_MAX
            for name in names:
                entry = entry_by_name[name]
                # A character of a name takes up to 12 bytes in JSON, as two escapes.
                bytes_left -= _ENTRY_BYTES_WITHOUT_NAME + len(json.dumps(entry.name))
                if bytes_left < 0:
                    break
                with contextlib.suppress(FileNotFoundError):  # The entry was removed after scandir().
                    status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                    reply_entries.append(
                        FolderEntry(name=entry.name, inode=status.st_ino, kind=stat.S_IFMT(status.st_mode))
                    )
        return ListReply(entries=tuple(reply_entries), more=bytes_left < 0)

    def mkdir(self, path: str, mode: int) -> FileStat:
        """Create a folder."""
        with self._open_parent(path) as (folder_fd, name):
            os.mkdir(name, mode & self._folder_mode_mask, dir_fd=folder_fd)
            return file_stat(os.stat(name, dir_fd=folder_fd, follow_symlinks=False))

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        with self._open_parent(path) as (folder_fd, name):
            os.rmdir(name, dir_fd=folder_fd)

    def unlink(self, path: str) -> None:
        """Remove a name of a file. With the last name of the file, remove its checksums too."""
        with self._open_parent(path) as (folder_fd, name):
            status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            os.unlink(name, dir_fd=folder_fd)
        self._remove_sums(status)

    def rename(self, path: str, new_path: str, *, exclusive: bool, exchange: bool) -> None:
        """Rename by renameat2(2)."""
        with self._open_parent(path) as (folder_fd, name), self._open_parent(new_path) as (new_folder_fd, new_name):
            replaced_status = None
            if not exchange:
                with contextlib.suppress(FileNotFoundError):
                    replaced_status = os.stat(new_name, dir_fd=new_folder_fd, follow_symlinks=False)
            moved_status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            engine.rename(folder_fd, name, new_folder_fd, new_name, exclusive=exclusive, exchange=exchange)
        # rename(2) does nothing if both paths are names of one file.
        if replaced_status is not None and replaced_status.st_ino != moved_status.st_ino:
            self._remove_sums(replaced_status)

    def link(self, path: str, new_path: str) -> FileStat:
        """Create a second name (hard link)."""
        with self._open_parent(path) as (folder_fd, name), self._open_parent(new_path) as (new_folder_fd, new_name):
            os.link(name, new_name, src_dir_fd=folder_fd, dst_dir_fd=new_folder_fd, follow_symlinks=False)
            return file_stat(os.stat(new_name, dir_fd=new_folder_fd, follow_symlinks=False))

    def symlink(self, path: str, target: str) -> FileStat:
        """Create a symbolic link."""
        with self._open_parent(path) as (folder_fd, name):
            os.symlink(os.fsencode(target), name, dir_fd=folder_fd)
            return file_stat(os.stat(name, dir_fd=folder_fd, follow_symlinks=False))

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""
        with self._open_parent(path) as (folder_fd, name):
            return os.fsdecode(os.readlink(name, dir_fd=folder_fd))

    def chmod(self, path: str, mode: int) -> FileStat:
        """Change the permission bits. A symbolic link fails with ELOOP.

        The bits in 0777 can be changed, and for a folder in a session with a user, the bits in 03777.
        """
        _check_visible(path)
        with self._open_path(path, os.O_PATH) as path_fd:
            # A file without read permission can only be opened with O_PATH, and fchmod does not accept an O_PATH
            # descriptor. So this call uses the path of the descriptor in /proc.
            mask = self._folder_mode_mask if stat.S_ISDIR(os.fstat(path_fd).st_mode) else _MODE_MASK
            Path(f"/proc/self/fd/{path_fd}").chmod(mode & mask)
            return file_stat(os.fstat(path_fd))

    def chown(self, path: str, uid: int | None, gid: int | None) -> FileStat:
        """Change the user and the group, with the rights of the user of this thread."""
        if self._user is None:
            raise OSError(errno.EPERM, "all files belong to the user of the server: this session has no other user")
        with self._open_parent(path) as (folder_fd, name):
            os.chown(
                name, -1 if uid is None else uid, -1 if gid is None else gid, dir_fd=folder_fd, follow_symlinks=False
            )
            return file_stat(os.stat(name, dir_fd=folder_fd, follow_symlinks=False))

    def utimens(self, path: str, *, access_time_ns: int | None, modification_time_ns: int | None) -> FileStat:
        """Change times. The checksums of the file stay valid."""
        current_stat = self.stat(path)
        if stat.S_ISREG(current_stat.mode):
            if self._user is None:
                file = self.open(path, flags=os.O_RDONLY)
            else:
                file = self._open_to_change_times(path, self._user)
            file.set_times(access_time_ns, modification_time_ns)
        else:
            times_ns = (
                current_stat.access_time_ns if access_time_ns is None else access_time_ns,
                current_stat.modification_time_ns if modification_time_ns is None else modification_time_ns,
            )
            if not path:
                with self._act_as_user():
                    os.utime(self._root_fd, ns=times_ns)
            else:
                with self._open_parent(path) as (folder_fd, name):
                    os.utime(name, ns=times_ns, dir_fd=folder_fd, follow_symlinks=False)
        return self.stat(path)

    def statfs(self) -> StatfsReply:
        """Return the space of the file system."""
        file_system_status = os.fstatvfs(self._root_fd)
        return StatfsReply(
            block_bytes=file_system_status.f_frsize,
            blocks=file_system_status.f_blocks,
            blocks_free=file_system_status.f_bfree,
            blocks_available=file_system_status.f_bavail,
            files=file_system_status.f_files,
            files_free=file_system_status.f_ffree,
            name_bytes_max=file_system_status.f_namemax,
        )

    def default_socket(self) -> Path:
        """Return the path of the socket on which a server of this store listens by default."""
        return self._private_folder.path.resolve() / "server.sock"

    def close(self) -> None:
        """Close the folder and release its lock. Open files stay open."""
        if not self._is_closed:
            self._close_actions.run()
            self._is_closed = True
            self._live_handle.release()

    @property
    def _user(self) -> SetUser | None:
        """The user with whose rights this thread uses paths. With None, it uses the rights of the process."""
        return getattr(self._thread_state, "user", None)

    @property
    def _folder_mode_mask(self) -> int:
        return _MODE_MASK if self._user is None else _FOLDER_MODE_MASK

    def _act_as_user(self) -> AbstractContextManager[None]:
        user = self._user
        return contextlib.nullcontext() if user is None else _act_as(user)

    def _open_to_change_times(self, path: str, user: SetUser) -> Any:  # noqa: ANN401 - native object.
        """Open a file if the user may change its times, because the user owns the file or may write to it."""
        _check_visible(path)
        with self._open_path(path, os.O_PATH) as path_fd:
            if user.uid not in {0, os.fstat(path_fd).st_uid}:
                # This open fails if the user may not write to the file.
                os.close(os.open(f"/proc/self/fd/{path_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            duplicate_fd = os.dup(path_fd)
        # This open uses the rights of the server, because the user may have no right to read the file.
        with _close_after(duplicate_fd):
            reopened_fd = os.open(f"/proc/self/fd/{duplicate_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return self.native.adopt(reopened_fd, read=True, write=False)

    def _open_beneath(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a path beneath the root by openat2(2), which follows no symbolic link."""
        return int(engine.open_beneath(self._root_fd, os.fsencode(path), flags, mode))

    @contextlib.contextmanager
    def _open_path(self, path: str, flags: int) -> Iterator[int]:
        """Open a path of the store until the block ends, and yield the descriptor. The block has the user's rights."""
        with self._act_as_user(), _close_after(self._open_beneath(path, flags)) as descriptor:
            yield descriptor

    @contextlib.contextmanager
    def _open_parent(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Open the folder of a path. Yield its descriptor and the last name. The block has the user's rights."""
        _check_visible(path)
        folder_path, _, name = path.rstrip("/").rpartition("/")
        if name in {"", ".", ".."}:
            raise OSError(errno.EINVAL, f"the last component of the path must be a name, not {name!r}")
        with self._open_path(folder_path, os.O_PATH | os.O_DIRECTORY) as folder_fd:
            yield folder_fd, os.fsencode(name)

    def _remove_sums(self, status: os.stat_result) -> None:
        """Remove the checksums of a file if its last name was removed. `status` was read before the removal."""
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            self.native.remove_sums(status.st_ino)

    def _read_or_create_format(self, chunk_bytes: int | None) -> int:
        """Return the chunk size of the store. Create store.json if the store is new."""
        requested_settings = {
            "format": _FORMAT_VERSION,
            "chunk_bytes": _DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
        }
        if not self._private_folder.has("store.json"):
            self._private_folder.write_text("store.json", json.dumps(requested_settings) + "\n")
        try:
            stored_settings = json.loads(self._private_folder.read_text("store.json"))
        except ValueError as error:
            message = f"{PRIVATE_FOLDER}/store.json is not JSON"
            raise UsageError(message, reason=Reason.MALFORMED) from error
        if (
            not isinstance(stored_settings, dict)
            or stored_settings.get("format") != _FORMAT_VERSION
            or type(stored_settings.get("chunk_bytes")) is not int
        ):
            message = (
                f"{PRIVATE_FOLDER}/store.json must be of format {_FORMAT_VERSION}, not {str(stored_settings)[:80]}"
            )
            raise UsageError(message, reason=Reason.MALFORMED)
        if chunk_bytes is not None and stored_settings["chunk_bytes"] != chunk_bytes:
            message = f"the store has chunks of {stored_settings['chunk_bytes']} bytes, not {chunk_bytes}"
            raise UsageError(message, what_to_do="leave --chunk-bytes out")
        return int(stored_settings["chunk_bytes"])

    def _read_or_create_token(self) -> str:
        """Return the token of the store. Create it if the store is new."""
        if not self._private_folder.has("token"):
            self._private_folder.write_text("token", secrets.token_hex(32) + "\n")
        return read_valid_token(self._private_folder.read_text, "token", self._private_folder.path / "token")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _act_as(user: SetUser) -> Iterator[None]:
    """Use paths with the rights of a user until the block ends, and change files without CAP_FSETID afterwards.

    In the block, root may set the set-group-ID bit of any folder. Outside of the block, a truncation or a hole
    clears the set-user-ID bit of a file, as after a call by the user.
    """
    allow_set_group_id()
    try:
        with acting_as(user.uid, user.gid, user.groups):
            yield
    finally:
        # When a thread becomes root for files again, the kernel gives CAP_FSETID back to it.
        drop_write_capabilities()


@contextlib.contextmanager
def _close_after(descriptor: int) -> Iterator[int]:
    """Yield a descriptor, and close it when the block ends."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def file_stat(status: os.stat_result) -> FileStat:
    """Return the result of stat(2) as the attributes of a reply."""
    return FileStat(
        inode=status.st_ino,
        mode=status.st_mode,
        size_bytes=status.st_size,
        links=status.st_nlink,
        uid=status.st_uid,
        gid=status.st_gid,
        allocated_bytes=status.st_blocks * 512,  # st_blocks counts units of 512 bytes.
        access_time_ns=status.st_atime_ns,
        modification_time_ns=status.st_mtime_ns,
        change_time_ns=status.st_ctime_ns,
    )


def _check_visible(path: str) -> None:
    """Refuse a path that leads out of the store (EXDEV) or to a hidden name (ENOENT)."""
    path_parts = os.fsencode(path).split(b"/")
    if path.startswith("/") or b".." in path_parts:
        raise OSError(errno.EXDEV, "the path must be relative to the store, without ..")
    first_name = next((path_part for path_part in path_parts if path_part not in {b"", b"."}), b"")
    if first_name in _HIDDEN_NAMES:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
