"""The user-space I/O interface of hf3fs for Python programs, with the names of ``hf3fs_fuse.io`` of 3FS.

An :func:`iovec <make_iovec>` is published memory, and a :func:`ring <make_ioring>` is a queue of reads or of writes. An
operation moves the bytes of an iovec or of a slice of it. A ring keeps references to the iovecs of its outstanding
operations, so their memory is not freed while the agent uses it. ``gdrkit.usrbio.gpu`` makes iovecs of device memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gdrkit.errors import UsageError
from gdrkit.handles import Handle
from gdrkit.units import MIB
from gdrkit.usrbio._library import UsrbioUnsupported, capabilities, native
from gdrkit.usrbio.virtual import FSYNC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gdrkit.usrbio.native_types import Ioring, Iovec

__all__ = [
    "IorPriority",
    "SharedBlock",
    "capabilities",
    "create_iovec",
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "hardlink",
    "is_hf3fs",
    "make_ioring",
    "make_iovec",
    "open_iovec",
    "punch_hole",
    "read_file",
    "register_fd",
    "trim_host_pool",
]


# If a block of read_file() has more bytes, its memory is freed at once, and not kept for later iovecs.
_READ_FILE_IDLE_BYTES_MAX = 32 * MIB


class IorPriority:
    """Priorities of rings. The agent serves rings of a higher priority first."""

    HIGH = -1
    NORMAL = 0
    LOW = 1


class SharedBlock(Protocol):
    """Shared memory with the interface of ``multiprocessing.shared_memory.SharedMemory``."""

    @property
    def name(self) -> str:
        """Name of the memory in /dev/shm."""

    @property
    def buf(self) -> memoryview:
        """The bytes of the memory."""


def extract_mount_point(path: str | os.PathLike[str]) -> str | None:
    """Return the mount point of 3FS or of an agent that contains `path`, or None."""
    return native().extract_mount_point(os.fspath(path))


def is_hf3fs(fd: int) -> bool:
    """Return whether the file of a descriptor is below a mount point of 3FS or of an agent."""
    return native().is_hf3fs(fd)


def register_fd(fd: int, flags: int = 0) -> None:
    """Allow rings to use the file of a descriptor.

    Call :func:`deregister_fd` before you close the descriptor, because a later file may get the same number. `flags` is
    passed to the C interface, which defines no flags.

    Raises
    ------
    UsrbioError
        EBADF: the file is not below a mount point of 3FS or of an agent. EINVAL: the descriptor is already registered.
    """
    native().register_fd(fd, flags)


def deregister_fd(fd: int) -> None:
    """Undo :func:`register_fd`. Do nothing for a descriptor that is not registered."""
    native().deregister_fd(fd)


def force_fsync(fd: int) -> int:
    """Update the length of a file after writes by rings, so that the next ``stat`` reports it. Return 0.

    If the mount point does not support the ioctl of 3FS (an agent in plain mode), this function calls fsync.

    Raises
    ------
    OSError
        The ioctl or fsync failed.
    """
    try:
        # The ioctl returns 4 bytes that have no meaning.
        fcntl.ioctl(fd, FSYNC, bytes(4))
    except OSError as error:
        if error.errno not in {errno.ENOTTY, errno.EINVAL}:
            raise
        os.fsync(fd)
    return 0


def hardlink(target: str | os.PathLike[str], link_name: str | os.PathLike[str]) -> None:
    """Create a hard link, also on 3FS, which has an ioctl in place of link(2).

    Raises
    ------
    UsrbioError
        EXDEV: the paths are not below the same mount point. Other errors have the errno of the file system.
    """
    native().hardlink(os.fspath(target), os.fspath(link_name))


def punch_hole(
    filename: int | str | os.PathLike[str], start: Sequence[int], end: Sequence[int], flags: int = 0
) -> None:
    """Punch holes into a file.

    Parameters
    ----------
    filename : int or path
        The path of the file, or a descriptor that is open for writing.
    start, end : sequence of int
        Begin and end of each hole, in bytes. At most 1000 holes.
    flags : int
        Must be 0.

    Raises
    ------
    UsrbioError
        EINVAL: a hole is not valid, or `flags` is not 0. EBADF: the descriptor is not open for writing. ENOTTY: the
        file is not below a mount point of 3FS or of an agent.
    UsageError
        There are more than 1000 holes, or `start` and `end` differ in length.
    """
    if isinstance(filename, int):
        native().punch_hole(filename, list(start), list(end), flags)
        return
    fd = os.open(filename, os.O_RDWR | os.O_CLOEXEC)
    try:
        native().punch_hole(fd, list(start), list(end), flags)
    finally:
        os.close(fd)


def make_iovec(shm: SharedBlock, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> Iovec:
    """Publish shared memory for rings, by a symbolic link to it, and return its iovec.

    Parameters
    ----------
    shm : SharedMemory
        The shared memory. It cannot be closed while an operation is outstanding or a memoryview of the iovec exists.
        After it is closed, new operations and memoryviews of the iovec fail.
    hf3fs_mount_point : str
        Mount point of 3FS or of an agent.
    block_size : int
        Size in bytes of the blocks in which the memory is registered. No operation may cross the end of a block. 0
        means one block.
    numa : int
        NUMA node to which the memory is bound. -1 means no binding.

    Returns
    -------
    iovec
        A context manager with the buffer protocol. ``iovec[a:b]`` is a slice for one operation.

    Raises
    ------
    OSError
        The agent or 3FS refused the link.
    UsrbioError
        The library refused the memory.
    """
    module = native()
    iovec_id = str(uuid.uuid4())
    # The agent and 3FS read the block size from the name of the link.
    block_size_suffix = f".b{block_size}" if block_size > 0 else ""
    link_path = Path(hf3fs_mount_point, "3fs-virt", "iovs", f"{iovec_id}{block_size_suffix}")
    link_path.symlink_to(os.path.normpath(f"/dev/shm/{shm.name}"))  # noqa: S108 - the agent opens this path.
    try:
        iovec = module.iovec(shm.buf, iovec_id, hf3fs_mount_point, block_size, numa)
    except BaseException:
        link_path.unlink(missing_ok=True)
        raise
    _count_as_open(iovec, lambda: link_path.unlink(missing_ok=True))
    return iovec


def create_iovec(hf3fs_mount_point: str, *, length_bytes: int, block_size: int = 0, numa: int = -1) -> Iovec:
    """Allocate shared memory of `length_bytes`, publish it, and return its iovec; see :func:`make_iovec`."""
    iovec = native().create_iovec(hf3fs_mount_point, length_bytes, block_size, numa)
    _count_as_open(iovec, lambda: None)
    return iovec


def trim_host_pool(*, idle_bytes_max: int = 0) -> None:
    """Free memory of closed iovecs that is kept for later ones, until at most `idle_bytes_max` bytes are idle.

    The memory that is idle longest is freed first. Without this call, idle memory is freed after 3 s.

    Raises
    ------
    Unsupported
        The client library has no pool.
    UsageError
        `idle_bytes_max` is negative.
    """
    if idle_bytes_max < 0:
        message = f"idle_bytes_max must not be negative, not {idle_bytes_max}"
        raise UsageError(message)
    native().trim_host_pool(idle_bytes_max)


def open_iovec(
    hf3fs_mount_point: str, iovec_id: str, *, length_bytes: int, block_size: int = 0, numa: int = -1
) -> Iovec:
    """Return the iovec of memory that another process published; see :func:`make_iovec`.

    `iovec_id` is the ``id`` of the other process's iovec. Closing the returned iovec does not remove the published
    link. After the owner has removed the link, operations fail with EACCES.
    """
    iovec = native().open_iovec(iovec_id, hf3fs_mount_point, length_bytes, block_size, numa)
    _count_as_open(iovec, lambda: None)
    return iovec


def make_ioring(  # noqa: PLR0917 - the signature that programs for 3FS call by position.
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,  # noqa: FBT001, FBT002 - the signature of 3FS.
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> Ioring:
    """Create a ring, which is a queue of reads or of writes.

    Parameters
    ----------
    hf3fs_mount_point : str
        Mount point of 3FS or of an agent.
    entries : int
        Capacity of the ring, in operations.
    for_read : bool
        Whether its operations read files. Otherwise they write files.
    io_depth : int
        Size of a batch. 0: the agent starts every operation at once. Above 0: the agent always starts exactly this
        number of operations together, and waits without a limit while there are fewer. Below 0: the agent starts at
        most ``-io_depth`` operations together.
    priority : int or None
        One of :class:`IorPriority`. None means NORMAL.
    timeout : int or None
        With `io_depth` below 0, the longest time that the agent waits to fill a batch, in milliseconds. None means 0.
    numa : int
        NUMA node to which the memory of the ring is bound. -1 means no binding.
    flags : int
        1 (HF3FS_IOR_ALLOW_READ_UNCOMMITTED): reads return uncommitted data. 2 (HF3FS_IOR_FORBID_READ_HOLES): a read of
        a hole fails with ENODATA. Only a ring of priority NORMAL can have flags.

    Returns
    -------
    ioring
        A context manager with ``prepare(iov, read, fd, off, userdata=None)``, ``submit()``, ``wait(*, max_results=0,
        min_results=0, timeout=None)`` and ``destroy()``. ``wait`` returns iovecs in the order of their completion, with
        ``result`` (a number of bytes, or a negative errno) and ``userdata``.

    Raises
    ------
    UsrbioError
        ENOENT: no agent and no 3FS serves this mount point. EACCES: the agent serves another user.
    UsageError
        The ring would have flags and another priority than NORMAL.
    """
    return native().ioring(hf3fs_mount_point, entries, for_read, io_depth, priority, timeout, numa, flags)


def read_file(  # noqa: PLR0917 - the signature of 3FS.
    fn: str | os.PathLike[str],
    hf3fs_mount_point: str | None = None,
    block_size: int = 1 << 30,
    off: int = 0,
    priority: int | None = None,
    cb: Callable[[memoryview, int], object] | None = None,
) -> bytes | None:
    """Read a file from `off` to its end, in blocks, and return its bytes.

    Parameters
    ----------
    fn : path
        Path of the file.
    hf3fs_mount_point : str or None
        Mount point that contains the file. With None, :func:`extract_mount_point` finds it.
    block_size : int
        Largest size of one read, in bytes.
    off : int
        Offset of the first byte to read.
    priority : int or None
        Priority of the ring.
    cb : callable or None
        Called with each block, as a memoryview that is valid during the call, and its offset. If it returns an int,
        the next read begins at this offset. If it returns another true value, no more blocks are read.

    Returns
    -------
    bytes or None
        The bytes of the file, or None if there is a `cb`.

    Raises
    ------
    OSError
        EINVAL: the file is not below a mount point of 3FS or of an agent. Other errors have the errno of a read.
    """
    mount_point = hf3fs_mount_point or extract_mount_point(fn)
    if mount_point is None:
        raise OSError(errno.EINVAL, "the file is not below a mount point of 3FS or of an agent", os.fspath(fn))
    with ExitStack() as stack:
        fd = os.open(fn, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        register_fd(fd)
        stack.callback(deregister_fd, fd)
        # One byte more than the rest of the file, so that the last read is short. A short read ends the loop.
        length_bytes = max(1, min(block_size, os.fstat(fd).st_size - off + 1))
        if length_bytes > _READ_FILE_IDLE_BYTES_MAX:
            stack.callback(_limit_idle_memory)
        iov = stack.enter_context(closing(create_iovec(mount_point, length_bytes=length_bytes)))
        ring = stack.enter_context(make_ioring(mount_point, 1, priority=priority))
        blocks = _read_blocks(iov, ring, fd, off, cb)
        if cb is None:
            return b"".join(blocks)
        for _ in blocks:
            pass
    return None


def _limit_idle_memory() -> None:
    """Free the idle memory of a large block at once, not only after 3 s. The program possibly reads no other file."""
    with suppress(UsrbioUnsupported):
        trim_host_pool(idle_bytes_max=_READ_FILE_IDLE_BYTES_MAX)


def _read_blocks(
    iov: Iovec, ring: Ioring, fd: int, offset: int, cb: Callable[[memoryview, int], object] | None
) -> Iterator[bytes]:
    """Read blocks from `offset` to the end of the file. Yield the bytes of each, or pass each to `cb` and yield b""."""
    while True:
        completion = ring.prepare(iov[:], True, fd, offset).submit().wait(min_results=1)[0]  # noqa: FBT003 - the signature of 3FS.
        if completion.result < 0:
            raise OSError(-completion.result, os.strerror(-completion.result))
        if completion.result == 0:
            return
        with memoryview(iov) as view, view[: completion.result] as block:
            if cb is None:
                yield bytes(block)
                callback_result = None
            else:
                callback_result = cb(block, offset)
                yield b""
        if isinstance(callback_result, int) and not isinstance(callback_result, bool):
            offset = callback_result
            continue
        if callback_result or completion.result < len(iov):
            return
        offset += completion.result


def _count_as_open(iovec: Iovec, unpublish: Callable[[], None]) -> None:
    """Count the iovec as an open object until it is closed. When it is closed, call `unpublish`."""
    handle = Handle("usrbio.iovec")

    def release() -> None:
        with suppress(FileNotFoundError):
            unpublish()
        handle.release()

    iovec.before_close(release)
