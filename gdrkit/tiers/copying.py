"""A copy of a file with its attributes, and verification of the copy.

Holes stay holes. Mode, owner, extended attributes (including access control lists) and times are kept. If the file
system cannot store one of them, the copy fails. The change time (ctime) and the birth time are new, because no system
call can set them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import stat
from typing import TYPE_CHECKING

from gdrkit import pattern
from gdrkit.gds.ranges import data_ranges
from gdrkit.tiers.kernel_errors import busy_error, kernel_error
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "CHUNK_BYTES",
    "compute_copy_digest",
    "copy_attributes",
    "copy_data",
    "find_first_difference",
    "preserve_access_time",
]

# Length of one read and one write, unless a rate limit requires shorter ones.
CHUNK_BYTES = 4 * MIB
# Extended attributes that depend on the location of a file and are not copied.
_LOCATION_ATTRIBUTES = frozenset({"security.selinux", "security.ima", "security.evm"})


def copy_data(
    source_fd: int,
    copy_fd: int,
    *,
    size_bytes: int,
    on_chunk: Callable[[int, int], None],
    chunk_bytes: int = CHUNK_BYTES,
) -> bytes:
    """Copy all data ranges of a file and return a digest of the bytes and their offsets.

    Parameters
    ----------
    source_fd, copy_fd : int
        Descriptors of the file and of its copy.
    size_bytes : int
        Size of the file, in bytes.
    on_chunk : callable
        Called before each chunk with its offset and length in bytes, and at the end with `size_bytes` and 0.
    chunk_bytes : int
        Length of one read and one write, at most :data:`CHUNK_BYTES`.

    Raises
    ------
    OSError
        read(2) or write(2) failed.
    ApiError
        ``BUSY``: the file became shorter during the copy.
    """
    os.ftruncate(copy_fd, size_bytes)
    digest = hashlib.blake2b()
    buffer = _allocate_buffer()
    for offset, length in _list_chunks(source_fd, size_bytes, chunk_bytes):
        on_chunk(offset, length)
        chunk = buffer[:length]
        _read_chunk(source_fd, chunk, offset)
        digest.update(b"%d:" % offset)
        digest.update(chunk)
        _write_chunk(copy_fd, chunk, offset)
    on_chunk(size_bytes, 0)
    return digest.digest()


def compute_copy_digest(
    source_fd: int,
    copy_fd: int,
    *,
    size_bytes: int,
    on_chunk: Callable[[int, int], None],
    chunk_bytes: int = CHUNK_BYTES,
) -> bytes:
    """Read a synced copy and return its digest.

    The kernel is advised to drop the copy from the page cache, so that the bytes come from the disk. The digest covers
    the same chunks as the digest of :func:`copy_data`, so both digests are equal if the copy is correct. The copy must
    have zeros for each hole of the source. For the parameters see :func:`copy_data`.

    Raises
    ------
    ApiError
        ``IO_ERROR``: the copy has other bytes than zeros for a hole of the source.
    """
    os.posix_fadvise(copy_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    digest = hashlib.blake2b()
    previous_end = 0
    buffer = _allocate_buffer()
    for offset, length in _list_chunks(source_fd, size_bytes, chunk_bytes):
        on_chunk(offset, length)
        _check_hole_is_zero(copy_fd, previous_end, offset, buffer)
        previous_end = offset + length
        chunk = buffer[:length]
        _read_chunk(copy_fd, chunk, offset)
        digest.update(b"%d:" % offset)
        digest.update(chunk)
    _check_hole_is_zero(copy_fd, previous_end, size_bytes, buffer)
    return digest.digest()


def find_first_difference(
    source_fd: int,
    copy_fd: int,
    *,
    size_bytes: int,
    on_chunk: Callable[[int, int], None],
    chunk_bytes: int = CHUNK_BYTES,
) -> int | None:
    """Compare the data ranges of a file with its copy, and return the offset of the first byte that differs, or None.

    For the parameters see :func:`copy_data`.
    """
    source_buffer, copy_buffer = _allocate_buffer(), _allocate_buffer()
    for offset, length in _list_chunks(source_fd, size_bytes, chunk_bytes):
        on_chunk(offset, length)
        _read_chunk(source_fd, source_buffer[:length], offset)
        _read_chunk(copy_fd, copy_buffer[:length], offset)
        mismatch_offset = pattern.find_mismatch(source_buffer[:length], copy_buffer[:length])
        if mismatch_offset is not None:
            return offset + mismatch_offset
    return None


def copy_attributes(source_fd: int, copy_fd: int, source_status: os.stat_result) -> None:
    """Copy mode, owner, extended attributes and times of the source to the copy.

    Raises
    ------
    OSError
        EPERM: this user may not change the owner. EOPNOTSUPP: the file system has no extended attributes.
    """
    copy_status = os.fstat(copy_fd)
    if (copy_status.st_uid, copy_status.st_gid) != (source_status.st_uid, source_status.st_gid):
        os.fchown(copy_fd, source_status.st_uid, source_status.st_gid)
    # The mode must be set after the owner, because a change of owner clears set-user-id bits and capabilities.
    os.fchmod(copy_fd, stat.S_IMODE(source_status.st_mode))
    for attribute_name in _list_attributes_to_copy(source_fd):
        os.setxattr(copy_fd, attribute_name, os.getxattr(source_fd, attribute_name))
    os.utime(copy_fd, ns=(source_status.st_atime_ns, source_status.st_mtime_ns))


def preserve_access_time(descriptor: int) -> None:
    """Set O_NOATIME, so that reads do not change the access time. Do nothing if this user may not set it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NOATIME)
    except PermissionError:
        return


def _list_chunks(source_fd: int, size_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each chunk of the data ranges. Holes are skipped."""
    for begin, end in data_ranges(source_fd, size_bytes):
        for offset in range(begin, end, chunk_bytes):
            yield offset, min(chunk_bytes, end - offset)


def _list_attributes_to_copy(descriptor: int) -> list[str]:
    try:
        return [name for name in os.listxattr(descriptor) if name not in _LOCATION_ATTRIBUTES]
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:
            return []
        raise


def _allocate_buffer() -> memoryview:
    """Return a page-aligned buffer, because some file systems pass on whole pages without copying them."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def _read_chunk(descriptor: int, chunk: memoryview, offset: int) -> None:
    read_bytes = 0
    while read_bytes < len(chunk):
        new_bytes = os.preadv(descriptor, [chunk[read_bytes:]], offset + read_bytes)
        if new_bytes == 0:
            raise busy_error("read", "the file became shorter", offset_bytes=offset + read_bytes)
        read_bytes += new_bytes


def _write_chunk(descriptor: int, chunk: memoryview, offset: int) -> None:
    written_bytes = 0
    while written_bytes < len(chunk):
        written_bytes += os.pwrite(descriptor, chunk[written_bytes:], offset + written_bytes)


def _check_hole_is_zero(descriptor: int, begin: int, end: int, buffer: memoryview) -> None:
    """Raise an error (EIO) if a byte from offset `begin` to `end` is not zero. `buffer` is memory for the reads."""
    offset = begin
    while offset < end:
        try:
            offset = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as seek_error:
            # ENXIO: no data follows. EINVAL: the file system does not support SEEK_DATA, so every byte is read.
            if seek_error.errno == errno.ENXIO:
                return
            if seek_error.errno != errno.EINVAL:
                raise
        if offset >= end:
            return
        chunk = buffer[: min(CHUNK_BYTES, end - offset)]
        _read_chunk(descriptor, chunk, offset)
        if bytes(chunk).count(0) != len(chunk):
            error = OSError(errno.EIO, "a hole of the file has data in the copy")
            raise kernel_error(error, "read", offset_bytes=offset)
        offset += len(chunk)
