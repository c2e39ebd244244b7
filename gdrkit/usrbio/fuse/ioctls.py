"""The ioctls of 3FS, which programs send to open files and folders of a FUSE mount."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from gdrkit.errors import ApiError
from gdrkit.storage import messages
from gdrkit.usrbio import virtual as ioctls
from gdrkit.usrbio.fuse._mfusepy import copy_in, copy_out, omit_result, refuse_restricted_root
from gdrkit.usrbio.fuse.operations import Operations

__all__ = ["MountOperations"]

# The requests that create, move or remove entries of folders. The kernel does not check the rights of the program on
# these folders; see refuse_restricted_root().
_REQUESTS_THAT_CHANGE_FOLDERS = {ioctls.RECURSIVE_RM, ioctls.HARDLINK, ioctls.MOVE, ioctls.REMOVE}


class MountOperations(Operations):
    """The FUSE operations of a mount, with the ioctls of 3FS (interface version 1); see :class:`Operations`."""

    def ioctl(
        self, _path: str | None, request: int, _argument: object, fh: int, _flags: int, data_address: int
    ) -> None:
        """Execute an ioctl, whose argument or result is at `data_address`. Raise ENOTTY if the ioctl is unknown."""
        request &= 0xFFFFFFFF  # Before libfuse 3.5, the number is a signed int.
        if request in _REQUESTS_THAT_CHANGE_FOLDERS:
            refuse_restricted_root()
        if result := self._answer_query(request):
            copy_out(data_address, result)
        elif request == ioctls.FSYNC:
            self.fsync(None, 0, fh)
            # The result is four zero bytes, for a libfuse that cannot omit a result.
            copy_out(data_address, bytes(4))
            omit_result()
        elif request == ioctls.RECURSIVE_RM:
            self._remove_tree(self._get_open_folder(fh)[0])
            copy_out(data_address, bytes(4))
            omit_result()
        elif request == ioctls.HARDLINK:
            self._hardlink(fh, copy_in(data_address, ioctls.HARDLINK_ARGUMENT.size))
        elif request == ioctls.PUNCH_HOLE:
            self._punch_hole(fh, copy_in(data_address, ioctls.PUNCH_HOLE_ARGUMENT.size))
        elif request == ioctls.MOVE:
            self._move(fh, copy_in(data_address, ioctls.MOVE_ARGUMENT.size))
        elif request == ioctls.REMOVE:
            self._remove(fh, copy_in(data_address, ioctls.REMOVE_ARGUMENT.size))
        else:
            raise _make_error(errno.ENOTTY)

    def _answer_query(self, request: int) -> bytes | None:
        """Return the value that an ioctl queries, or None for other ioctls."""
        if request == ioctls.GET_MAGIC:
            return ioctls.MAGIC.to_bytes(4, "little")
        if request == ioctls.GET_IOCTL_VERSION:
            return ioctls.IOCTL_VERSION.to_bytes(4, "little")
        if request == ioctls.GET_PATH_OFFSET:
            # In an absolute path, the path below the mount begins at this offset.
            return len(os.fsencode(self._mount)).to_bytes(4, "little")
        if request == ioctls.GET_MOUNT_NAME:
            name = os.fsencode(Path(self._mount).name)[: ioctls.MOUNT_NAME_BYTES - 1]
            return name.ljust(ioctls.MOUNT_NAME_BYTES, b"\0")
        return None

    def _hardlink(self, fh: int, argument: bytes) -> None:
        folder_inode, padded_name = ioctls.HARDLINK_ARGUMENT.unpack(argument)
        folder_path = self._find_folder_path(folder_inode)
        self.link(_make_entry_path(folder_path, padded_name), self._find_current_path(None, fh))

    def _punch_hole(self, fh: int, argument: bytes) -> None:
        # The bounds are PUNCH_HOLE_MAX begins, and then as many ends.
        range_count, _flags, *bounds = ioctls.PUNCH_HOLE_ARGUMENT.unpack(argument)
        if not 0 <= range_count <= ioctls.PUNCH_HOLE_MAX:
            raise _make_error(errno.EINVAL)
        begins, ends = bounds[:range_count], bounds[ioctls.PUNCH_HOLE_MAX : ioctls.PUNCH_HOLE_MAX + range_count]
        file = self._find_file(fh)
        if not file.writable:
            raise _make_error(errno.EBADF)
        request = messages.PunchHole(handle=file.handle, ranges=tuple(zip(begins, ends, strict=True)))
        self._store.request(request, messages.Done)

    def _move(self, fh: int, argument: bytes) -> None:
        """Rename an entry of the open folder. The flag for the trash has no effect: a store has no trash."""
        inode, padded_name, new_inode, padded_new_name, _to_trash = ioctls.MOVE_ARGUMENT.unpack(argument)
        folder_path = self._find_open_folder_path(fh, inode)
        new_folder_path = self._find_folder_path(new_inode)
        self.rename(_make_entry_path(folder_path, padded_name), _make_entry_path(new_folder_path, padded_new_name))

    def _remove(self, fh: int, argument: bytes) -> None:
        """Remove an entry of the open folder. Only with `is_recursive`, a folder may have contents."""
        inode, padded_name, is_recursive = ioctls.REMOVE_ARGUMENT.unpack(argument)
        path = _make_entry_path(self._find_open_folder_path(fh, inode), padded_name)
        if is_recursive:
            self._remove_tree(path)
            return
        try:
            self.unlink(path)
        except (OSError, ApiError) as error:
            if error.errno != errno.EISDIR:
                raise
            self.rmdir(path)

    def _find_open_folder_path(self, fh: int, inode: int) -> str:
        """Return the path of the open folder `fh`. Raise EINVAL if the folder does not have this inode."""
        path, open_inode = self._get_open_folder(fh)
        if inode != open_inode:
            raise _make_error(errno.EINVAL)
        return path

    def _remove_tree(self, path: str) -> None:
        self._check_in_store(path)
        relative_path = path.lstrip("/")
        if not relative_path:
            raise _make_error(errno.EPERM)
        status = self._store.request(messages.Stat(path=relative_path), messages.FileStat)
        self._store.remove_tree(relative_path, status.mode)


def _make_entry_path(folder_path: str, padded_name: bytes) -> str:
    """Return the path of an entry of a folder. Raise EINVAL if the name is not one path component."""
    name = os.fsdecode(padded_name.partition(b"\0")[0])
    if name in {"", ".", ".."} or "/" in name:
        raise _make_error(errno.EINVAL)
    return f"{folder_path.rstrip('/')}/{name}"


def _make_error(error_number: int) -> OSError:
    return OSError(error_number, os.strerror(error_number))
