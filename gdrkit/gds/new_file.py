"""Creation of a file that gets its name only when it is complete, and that leaves nothing behind if it fails.

The file is created without a name (open(2), O_TMPFILE) and linked into its folder at the end, so that even SIGKILL
leaves no part of it. On a file system without O_TMPFILE the file has a hidden temporary name instead, and is renamed or
removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import ApiError, UsageError
from gdrkit.gds.file import File
from gdrkit.gds.opening import os_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.gds.file import Access, Direct

__all__ = ["Destination", "new_file", "open_destination"]

# Errors of open(2) for O_TMPFILE if the file system, or an old kernel, does not support it.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
_PERMISSIONS = 0o777
_OWNER_READ_WRITE = 0o600
_GROUP = 0o070
_FILE_TYPES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
}


@dataclass(frozen=True, slots=True)
class Destination:
    """The name that a new file will get.

    Attributes
    ----------
    path : str
        The whole path, for error messages.
    folder : int
        Descriptor of the folder (O_PATH). It is open inside the block of :func:`open_destination`.
    name : str
        The last part of the path.
    old : os.stat_result or None
        The regular file that has this name now, if there is one.
    """

    path: str
    folder: int
    name: str
    old: os.stat_result | None

    def is_same_file(self, info: os.stat_result) -> bool:
        """Return whether the file that has the name now is the one with this stat result."""
        return self.old is not None and os.path.samestat(self.old, info)


@contextlib.contextmanager
def open_destination(path: Path) -> Iterator[Destination]:
    """Open the folder of a path and stat the file with that name. A symbolic link is followed, as cp does.

    Raises
    ------
    ApiError
        The kernel does not open the folder (ENOENT, ENOTDIR, EACCES), or does not follow the link.
    UsageError
        The name belongs to a device, FIFO or socket, or to a symbolic link that leads nowhere.
    """
    path = _follow_link(path)
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise os_error("open", str(path.parent), error) from error
    try:
        yield Destination(str(path), folder, path.name, _stat_regular(folder, path.name, str(path)))
    finally:
        os.close(folder)


@contextlib.contextmanager
def new_file(
    destination: Destination, *, source_mode: int, access: Access, direct: Direct, durable: bool
) -> Iterator[File]:
    """Create a file, give it its name when the block ends without an error, and remove it otherwise.

    A new file gets the permission bits of the source without those of the umask. A file that replaces another one gets
    the permission bits of the replaced file and, if this process may change owners, its owner. Set-user-id,
    set-group-id and sticky bits are never copied. Until a file that replaces another one has the name, only its owner
    can open it.

    Parameters
    ----------
    destination : Destination
        The name of the new file.
    source_mode : int
        ``st_mode`` of the file that is copied.
    access, direct : str
        See :class:`~gdrkit.gds.File`.
    durable : bool
        Wait until the disk has the data, the permission bits and the name (fsync of the file and of the folder).

    Raises
    ------
    ApiError
        The kernel does not create, sync or name the file.
    """
    source_bits = source_mode & _PERMISSIONS
    bits = source_bits | _OWNER_READ_WRITE if destination.old is None else _OWNER_READ_WRITE
    # The name is chosen before the file exists, so that the cleanup after an interrupt can always find the file.
    temporary = f".gdrkit-{uuid.uuid4().hex}.part"
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, destination.folder, temporary)
        folder = _open_to_sync(destination, stack) if durable else None
        fd, is_named = _create(destination, temporary, bits)
        file = stack.enter_context(
            File.from_descriptor(fd, path=destination.path, writable=True, access=access, direct=direct)
        )
        yield file
        try:
            _set_permissions(fd, destination.old, source_bits)
            if durable:
                os.fsync(fd)
            _publish(fd, destination, temporary, is_named=is_named)
            if folder is not None:
                os.fsync(folder)
        except ApiError:
            raise
        except OSError as error:
            raise os_error("create", destination.path, error) from error


def _follow_link(path: Path) -> Path:
    """Return the path that a symbolic link leads to, or the path itself if it is not a link."""
    if not path.is_symlink():
        return path
    try:
        # The kernel must follow the link itself, because it refuses links that other users have created in /tmp
        # (fs.protected_symlinks).
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError as error:
        message = f"{path} is a symbolic link to {path.readlink()}, which does not exist"
        raise UsageError(message, what_to_do="remove the link, or name its destination") from error
    except OSError as error:
        raise os_error("open", str(path), error) from error
    try:
        return Path(f"/proc/self/fd/{fd}").readlink()
    finally:
        os.close(fd)


def _stat_regular(folder: int, name: str, path: str) -> os.stat_result | None:
    """Return the stat result of `name`, or None if it does not exist. Raise UsageError if it is not a regular file."""
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error("stat", path, error) from error
    if not stat.S_ISREG(info.st_mode):
        file_type = _FILE_TYPES.get(stat.S_IFMT(info.st_mode), "not a regular file")
        message = f"{path} is {file_type}; a regular file is required"
        raise UsageError(message, what_to_do="name a regular file or a new one; use cp to write to a device or a FIFO")
    return info


def _open_to_sync(destination: Destination, stack: contextlib.ExitStack) -> int:
    """Open the folder for fsync(2). That needs read permission, so the folder is opened before anything is copied."""
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=destination.folder)
    except OSError as error:
        raise os_error("open", str(Path(destination.path).parent), error) from error
    stack.callback(os.close, fd)
    return fd


def _create(destination: Destination, temporary: str, bits: int) -> tuple[int, bool]:
    """Create an empty file. Return its descriptor, and whether it has the temporary name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        try:
            return os.open(".", flags | os.O_TMPFILE, bits, dir_fd=destination.folder), False
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.open(temporary, flags, bits, dir_fd=destination.folder), True
    except OSError as error:
        raise os_error("create", destination.path, error) from error


def _set_permissions(fd: int, old: os.stat_result | None, source_bits: int) -> None:
    info = os.fstat(fd)
    current_bits = stat.S_IMODE(info.st_mode)
    if old is None:
        # The kernel has applied the umask. The owner bits that only the copy itself needed are removed.
        bits = current_bits & ~(_OWNER_READ_WRITE & ~source_bits)
    else:
        bits = old.st_mode & _PERMISSIONS
        if (info.st_uid, info.st_gid) != (old.st_uid, old.st_gid) and not _set_owner(fd, old):
            bits &= ~_GROUP  # These bits were meant for another group.
    if bits != current_bits:
        os.fchmod(fd, bits)


def _set_owner(fd: int, old: os.stat_result) -> bool:
    """Change owner and group to those of the old file, or at least the group. Return whether the group was set."""
    for owner in (old.st_uid, -1):
        try:
            os.fchown(fd, owner, old.st_gid)
        except PermissionError:
            continue
        return True
    return False


def _publish(fd: int, destination: Destination, temporary: str, *, is_named: bool) -> None:
    """Give the file its final name."""
    name, folder = destination.name, destination.folder
    if not is_named:
        unnamed = f"/proc/self/fd/{fd}"
        if destination.old is None:
            with contextlib.suppress(FileExistsError):
                os.link(unnamed, name, dst_dir_fd=folder)
                return
        # linkat(2) does not replace an existing file; rename(2) does.
        os.link(unnamed, temporary, dst_dir_fd=folder)
    _stat_regular(folder, name, destination.path)
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _remove(folder: int, temporary: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
