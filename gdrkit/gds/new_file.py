"""Creation of a file that gets its name only when it is complete, for copies.

The file is created without a name (O_TMPFILE of open(2)) and gets its name at the end (linkat(2)). So not even SIGKILL
leaves an incomplete file. On a file system without O_TMPFILE, the file has a hidden temporary name until the end. It
is then renamed, or removed after an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit.errors import ApiError, UsageError
from gdrkit.gds.file import File
from gdrkit.gds.opening import make_kernel_error, open_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.gds.opening import Access, DirectPathMode

__all__ = ["Destination", "new_file", "open_destination"]

# Errors of open(2) for O_TMPFILE if the file system, or an old kernel, does not support it.
_NO_TMPFILE_ERRNOS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
# The permission bits that a copy may get: all bits except set-user-id, set-group-id and sticky.
_PERMISSION_BITS = 0o777
_OWNER_READ_WRITE_BITS = 0o600
_GROUP_BITS = 0o070
# Descriptions of the types of a file that cannot be the destination of a copy.
_REFUSED_FILE_TYPES = {
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
        The complete path, for error messages.
    folder_fd : int
        Descriptor of the folder (O_PATH). It is open inside the block of :func:`open_destination`.
    name : str
        The last part of the path: the name in the folder.
    old_status : os.stat_result or None
        The stat result of the regular file that has this name now, if there is one. The new file will replace it.
    """

    path: str
    folder_fd: int
    name: str
    old_status: os.stat_result | None

    def is_same_file(self, file_status: os.stat_result) -> bool:
        """Return whether `file_status` is the stat result of the file that has the name now."""
        return self.old_status is not None and os.path.samestat(self.old_status, file_status)


@contextlib.contextmanager
def open_destination(path: Path) -> Iterator[Destination]:
    """Open the folder of the path, and stat the file that has this path now, if there is one.

    If the path is a symbolic link, the destination is the target of the link, as for cp.

    Raises
    ------
    ApiError
        The kernel does not open the folder (ENOENT, ENOTDIR, EACCES), or does not follow the link.
    UsageError
        The name belongs to a device, FIFO or socket, or to a symbolic link whose target does not exist.
    """
    path = _follow_link(path)
    try:
        folder = open_file(str(path.parent), os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise make_kernel_error("open", str(path.parent), error) from error
    try:
        folder_fd = folder.fileno()
        yield Destination(str(path), folder_fd, path.name, _stat_regular(folder_fd, path.name, str(path)))
    finally:
        folder.close()


@contextlib.contextmanager
def new_file(
    destination: Destination, *, source_mode: int, access: Access, direct: DirectPathMode, durable: bool
) -> Iterator[File]:
    """Create a file, give it its name when the block ends without an error, and remove it otherwise.

    If the file replaces no other file, it gets the permission bits of the source without the bits of the umask. If it
    replaces a file, only its owner can open it during the block. At the end of the block, it then gets the permission
    bits of the replaced file and, as far as this process may set them, its owner and its group. Without that group, it
    does not get the group bits. Set-user-id, set-group-id and sticky bits are never copied.

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
    source_bits = source_mode & _PERMISSION_BITS
    creation_bits = source_bits | _OWNER_READ_WRITE_BITS if destination.old_status is None else _OWNER_READ_WRITE_BITS
    # The temporary name is chosen before the file exists, so that the cleanup can remove the file after an interrupt.
    temporary_name = f".gdrkit-{uuid.uuid4().hex}.part"
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_temporary_name, destination.folder_fd, temporary_name)
        sync_folder_fd = _open_folder_to_sync(destination, stack) if durable else None
        native_file, has_temporary_name = _create_file(destination, temporary_name, creation_bits)
        file = stack.enter_context(
            File.from_native(native_file, path=destination.path, writable=True, access=access, direct=direct)
        )
        yield file
        fd = file.fileno()
        try:
            _set_permissions(fd, destination.old_status, source_bits)
            if durable:
                os.fsync(fd)
            _set_final_name(fd, destination, temporary_name, has_temporary_name=has_temporary_name)
            if sync_folder_fd is not None:
                os.fsync(sync_folder_fd)
        except ApiError:
            raise
        except OSError as error:
            raise make_kernel_error("create", destination.path, error) from error


def _follow_link(path: Path) -> Path:
    """Return the target of a symbolic link, or the path itself if it is not a link."""
    if not path.is_symlink():
        return path
    try:
        # open(2) follows the link, so that the kernel can refuse a link that another user has created in /tmp
        # (fs.protected_symlinks).
        target_file = open_file(str(path), os.O_PATH)
    except FileNotFoundError as error:
        message = f"{path} is a symbolic link to {path.readlink()}, which does not exist"
        raise UsageError(message, what_to_do="remove the link, or create its target") from error
    except OSError as error:
        raise make_kernel_error("open", str(path), error) from error
    try:
        return Path(f"/proc/self/fd/{target_file.fileno()}").readlink()
    finally:
        target_file.close()


def _stat_regular(folder_fd: int, name: str, path: str) -> os.stat_result | None:
    """Return the stat result of `name`, or None if it does not exist. Raise UsageError if it is not a regular file."""
    try:
        file_status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise make_kernel_error("stat", path, error) from error
    if not stat.S_ISREG(file_status.st_mode):
        file_type = _REFUSED_FILE_TYPES.get(stat.S_IFMT(file_status.st_mode), "not a regular file")
        message = f"{path} is {file_type}; a regular file is required"
        raise UsageError(
            message,
            what_to_do="choose a regular file or a path that does not exist; cp can write to a device or a FIFO",
        )
    return file_status


def _open_folder_to_sync(destination: Destination, stack: contextlib.ExitStack) -> int:
    """Open the folder for reading, so that fsync(2) can sync it. Fail before the copy begins if it is not readable."""
    try:
        folder = open_file(".", os.O_RDONLY | os.O_DIRECTORY, folder_fd=destination.folder_fd)
    except OSError as error:
        raise make_kernel_error("open", str(Path(destination.path).parent), error) from error
    stack.callback(folder.close)
    return int(folder.fileno())


def _create_file(destination: Destination, temporary_name: str, mode_bits: int) -> tuple[Any, bool]:
    """Create an empty file. Return it as a file of the native engine, and whether it has the temporary name."""
    flags = os.O_RDWR
    try:
        try:
            return open_file(".", flags | os.O_TMPFILE, mode_bits, folder_fd=destination.folder_fd), False
        except OSError as error:
            if error.errno not in _NO_TMPFILE_ERRNOS:
                raise
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return open_file(temporary_name, flags, mode_bits, folder_fd=destination.folder_fd), True
    except OSError as error:
        raise make_kernel_error("create", destination.path, error) from error


def _set_permissions(fd: int, old_status: os.stat_result | None, source_bits: int) -> None:
    """Set the permission bits and the owner of the complete file; see :func:`new_file`."""
    file_status = os.fstat(fd)
    current_bits = stat.S_IMODE(file_status.st_mode)
    if old_status is None:
        # The kernel has applied the umask. Remove the owner bits that the source does not have: only the copying needed
        # them.
        mode_bits = current_bits & ~(_OWNER_READ_WRITE_BITS & ~source_bits)
    else:
        mode_bits = old_status.st_mode & _PERMISSION_BITS
        if (file_status.st_uid, file_status.st_gid) != (old_status.st_uid, old_status.st_gid) and not _set_owner(
            fd, old_status
        ):
            mode_bits &= ~_GROUP_BITS  # The old file gave these permissions to another group.
    if mode_bits != current_bits:
        os.fchmod(fd, mode_bits)


def _set_owner(fd: int, old_status: os.stat_result) -> bool:
    """Set the owner and the group of the old file, or only the group. Return whether the group was set."""
    for user_id in (old_status.st_uid, -1):  # -1 keeps the owner.
        try:
            os.fchown(fd, user_id, old_status.st_gid)
        except PermissionError:
            continue
        return True
    return False


def _set_final_name(fd: int, destination: Destination, temporary_name: str, *, has_temporary_name: bool) -> None:
    """Give the file its final name, and replace a regular file that has this name."""
    name, folder_fd = destination.name, destination.folder_fd
    if not has_temporary_name:
        fd_path = f"/proc/self/fd/{fd}"
        if destination.old_status is None:
            # If another process has created a file of this name meanwhile, that file is replaced below.
            with contextlib.suppress(FileExistsError):
                os.link(fd_path, name, dst_dir_fd=folder_fd)
                return
        # linkat(2) does not replace an existing file, but rename(2) does, and it needs a name to rename.
        os.link(fd_path, temporary_name, dst_dir_fd=folder_fd)
    _stat_regular(folder_fd, name, destination.path)  # Do not replace a device or FIFO that got the name meanwhile.
    os.rename(temporary_name, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


def _remove_temporary_name(folder_fd: int, temporary_name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary_name, dir_fd=folder_fd)
