"""A copy of a file with everything that belongs to it, and the proof that it is one.

Level 4. Holes stay holes; mode, owner, extended attributes (access control lists among them) and times are kept. What a
file system cannot keep is an error and no silent loss; only the times of the copy's own inode (ctime, birth) are new.
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
from gdrkit.gds.tiers.refusal import busy, kernel_error
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CHUNK_BYTES", "copy_attributes", "copy_data", "keep_access_time", "read_back"]

CHUNK_BYTES = 4 * MIB
# What belongs to the place where a file lies, and not to the file.
_OF_THE_PLACE = frozenset({"security.selinux", "security.ima", "security.evm"})


def copy_data(source: int, copy: int, *, size_bytes: int, go_on: Callable[[int], None]) -> bytes:
    """Copy every byte; `go_on` is called before each part with the offset. Returns a digest of what was read.

    Raises
    ------
    OSError
        As of read(2) and write(2).
    ApiError
        ``BUSY``: the file became shorter meanwhile.
    """
    os.ftruncate(copy, size_bytes)
    digest = hashlib.blake2b()
    memory = _buffer()
    for begin, length in _parts(source, size_bytes):
        go_on(begin)
        part = memory[:length]
        _read(source, part, begin)
        digest.update(b"%d:" % begin)
        digest.update(part)
        _write(copy, part, begin)
    go_on(size_bytes)
    return digest.digest()


def read_back(source: int, copy: int, *, size_bytes: int, go_on: Callable[[int], None]) -> bytes:
    """The digest of a copy that is on its device, read from there as far as the kernel lets us.

    The parts are those of the source, and what is a hole there must be zero in the copy.

    Raises
    ------
    ApiError
        ``IO_ERROR``: a hole came back as something else.
    """
    os.posix_fadvise(copy, 0, 0, os.POSIX_FADV_DONTNEED)
    digest = hashlib.blake2b()
    end = 0
    memory = _buffer()
    for begin, length in _parts(source, size_bytes):
        go_on(begin)
        _check_zero(copy, end, begin, memory)
        end = begin + length
        part = memory[:length]
        _read(copy, part, begin)
        digest.update(b"%d:" % begin)
        digest.update(part)
    _check_zero(copy, end, size_bytes, memory)
    return digest.digest()


def copy_attributes(source: int, copy: int, info: os.stat_result) -> None:
    """Give the copy the mode, the owner, the extended attributes and the times of the source.

    Raises
    ------
    OSError
        EPERM: this user may not give a file to its owner; EOPNOTSUPP: that file system has no extended attributes.
    """
    now = os.fstat(copy)
    if (now.st_uid, now.st_gid) != (info.st_uid, info.st_gid):
        os.fchown(copy, info.st_uid, info.st_gid)
    # After the owner, whose change takes set-user-id bits and capabilities away.
    os.fchmod(copy, stat.S_IMODE(info.st_mode))
    for name in _attributes(source):
        os.setxattr(copy, name, os.getxattr(source, name))
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))


def keep_access_time(descriptor: int) -> None:
    """Read without leaving a trace, where the file is this user's."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NOATIME)
    except PermissionError:
        return


def _parts(source: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each piece that is moved at once."""
    for begin, end in data_ranges(source, size_bytes):
        for at in range(begin, end, CHUNK_BYTES):
            yield at, min(CHUNK_BYTES, end - at)


def _attributes(descriptor: int) -> list[str]:
    try:
        return [name for name in os.listxattr(descriptor) if name not in _OF_THE_PLACE]
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:
            return []
        raise


def _buffer() -> memoryview:
    """Whole pages, for file systems that copy those by reference."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def _read(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < len(part):
        count = os.preadv(descriptor, [part[done:]], offset + done)
        if count == 0:
            raise busy("read", "the file became shorter", offset_bytes=offset + done)
        done += count


def _write(descriptor: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(descriptor, part[done:], offset + done)


def _check_zero(descriptor: int, begin: int, end: int, memory: memoryview) -> None:
    """See that what should be a hole is one, or zeros."""
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
            failed = OSError(errno.EIO, "a hole came back as data")
            raise kernel_error(failed, "read", offset_bytes=at)
        at += len(part)
