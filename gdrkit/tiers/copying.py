"""A copy of a file with its attributes, and verification of the copy.

Holes stay holes. Mode, owner, extended attributes (including access control lists) and times are kept. If the file
system cannot keep one of them, the copy fails. Only the times of the copy's own inode (ctime, birth) are new.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import stat
from typing import TYPE_CHECKING

from gdrkit.gds.ranges import data_ranges
from gdrkit.tiers.kernel_errors import busy_error, kernel_error
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CHUNK_BYTES", "copy_attributes", "copy_data", "digest_of_copy", "preserve_access_time"]

CHUNK_BYTES = 4 * MIB
# Extended attributes that depend on the location of a file and are not copied.
_LOCATION_ATTRIBUTES = frozenset({"security.selinux", "security.ima", "security.evm"})


def copy_data(source: int, copy: int, *, size_bytes: int, on_part: Callable[[int], None]) -> bytes:
    """Copy all bytes and return a digest of them.

    Parameters
    ----------
    source, copy : int
        Descriptors of the file and of its copy.
    size_bytes : int
        Size of the file, in bytes.
    on_part : callable
        Called before each part with its offset in bytes, and at the end with `size_bytes`.

    Raises
    ------
    OSError
        read(2) or write(2) failed.
    ApiError
        ``BUSY``: the file became shorter during the copy.
    """
    os.ftruncate(copy, size_bytes)
    digest = hashlib.blake2b()
    memory = _buffer()
    for begin, length in _parts(source, size_bytes):
        on_part(begin)
        part = memory[:length]
        _read(source, part, begin)
        digest.update(b"%d:" % begin)
        digest.update(part)
        _write(copy, part, begin)
    on_part(size_bytes)
    return digest.digest()


def digest_of_copy(source: int, copy: int, *, size_bytes: int, on_part: Callable[[int], None]) -> bytes:
    """Return the digest of a synced copy, which is read from the disk as far as the kernel permits.

    The parts are those of the source. A hole of the source must be zero in the copy. The parameters are those of
    :func:`copy_data`.

    Raises
    ------
    ApiError
        ``IO_ERROR``: a hole contains data in the copy.
    """
    os.posix_fadvise(copy, 0, 0, os.POSIX_FADV_DONTNEED)
    digest = hashlib.blake2b()
    end = 0
    memory = _buffer()
    for begin, length in _parts(source, size_bytes):
        on_part(begin)
        _check_zero(copy, end, begin, memory)
        end = begin + length
        part = memory[:length]
        _read(copy, part, begin)
        digest.update(b"%d:" % begin)
        digest.update(part)
    _check_zero(copy, end, size_bytes, memory)
    return digest.digest()


def copy_attributes(source: int, copy: int, info: os.stat_result) -> None:
    """Copy mode, owner, extended attributes and times of the source to the copy.

    Raises
    ------
    OSError
        EPERM: this user may not change the owner. EOPNOTSUPP: the file system has no extended attributes.
    """
    now = os.fstat(copy)
    if (now.st_uid, now.st_gid) != (info.st_uid, info.st_gid):
        os.fchown(copy, info.st_uid, info.st_gid)
    # The mode must be set after the owner, because a change of owner clears set-user-id bits and capabilities.
    os.fchmod(copy, stat.S_IMODE(info.st_mode))
    for name in _attributes(source):
        os.setxattr(copy, name, os.getxattr(source, name))
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))


def preserve_access_time(descriptor: int) -> None:
    """Set O_NOATIME, so that reads do not change the access time, if this user owns the file."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NOATIME)
    except PermissionError:
        return


def _parts(source: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each chunk that is copied at once."""
    for begin, end in data_ranges(source, size_bytes):
        for at in range(begin, end, CHUNK_BYTES):
            yield at, min(CHUNK_BYTES, end - at)


def _attributes(descriptor: int) -> list[str]:
    try:
        return [name for name in os.listxattr(descriptor) if name not in _LOCATION_ATTRIBUTES]
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:
            return []
        raise


def _buffer() -> memoryview:
    """Return a page-aligned buffer, for file systems that copy whole pages by reference."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def _read(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < len(part):
        count = os.preadv(descriptor, [part[done:]], offset + done)
        if count == 0:
            raise busy_error("read", "the file became shorter", offset_bytes=offset + done)
        done += count


def _write(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(descriptor, part[done:], offset + done)


def _check_zero(descriptor: int, begin: int, end: int, memory: memoryview) -> None:
    """Raise EIO unless the range contains only holes or zeros."""
    at = begin
    while at < end:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno != errno.EINVAL:
                raise
        if at >= end:
            return
        part = memory[: min(CHUNK_BYTES, end - at)]
        _read(descriptor, part, at)
        if bytes(part).count(0) != len(part):
            failed = OSError(errno.EIO, "a hole of the file has data in the copy")
            raise kernel_error(failed, "read", offset_bytes=at)
        at += len(part)
