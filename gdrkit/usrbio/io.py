"""The user-space I/O interface of hf3fs for Python programs, with the names that programs for 3FS know.

Level 5. An :func:`iovec <make_iovec>` is memory, a :func:`ring <make_ioring>` a queue of reads or of writes; a slice of
an iovec is what one operation moves. A ring keeps the iovecs of its outstanding operations, so dropping a name frees
nothing under the agent's hands. ``gdrkit.usrbio.gpu`` has the same for device memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gdrkit.handles import Handle
from gdrkit.usrbio._library import capabilities, native
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
]


class IorPriority:
    """In which order the agent serves rings."""

    HIGH = -1
    NORMAL = 0
    LOW = 1


class SharedBlock(Protocol):
    """Shared memory as ``multiprocessing.shared_memory.SharedMemory`` is: a name in /dev/shm, and a buffer."""

    @property
    def name(self) -> str:
        """Its name below /dev/shm."""

    @property
    def buf(self) -> memoryview:
        """Its bytes."""


def extract_mount_point(path: str | os.PathLike[str]) -> str | None:
    """The mount point of 3FS (or of an agent) that `path` lies below; None when it lies below none."""
    return native().extract_mount_point(os.fspath(path))


def is_hf3fs(fd: int) -> bool:
    """Whether the file of this descriptor lies in 3FS."""
    return native().is_hf3fs(fd)


def register_fd(fd: int, flags: int = 0) -> None:
    """Let rings use the file of this descriptor.

    Deregister it before it is closed: a later file may get the same number.

    Raises
    ------
    UsrbioError
        An OSError. EBADF: it is no file of 3FS. EINVAL: it is registered already.
    """
    native().register_fd(fd, flags)


def deregister_fd(fd: int) -> None:
    """Take back :func:`register_fd`; what is not registered is left as it is."""
    native().deregister_fd(fd)


def force_fsync(fd: int) -> int:
    """Make the length of a file what was written, for the next ``stat``; 0.

    Raises
    ------
    OSError
        What the file system said. One without this call (the mount of an agent in plain mode) is asked for fsync.
    """
    try:
        # Whoever serves the mount fills in 4 bytes, which mean nothing.
        fcntl.ioctl(fd, FSYNC, bytes(4))
    except OSError as error:
        if error.errno not in {errno.ENOTTY, errno.EINVAL}:
            raise
        os.fsync(fd)
    return 0


def hardlink(target: str | os.PathLike[str], link_name: str | os.PathLike[str]) -> None:
    """Make a second name of a file; the kernel's own ``link`` is not what 3FS answers to.

    Raises
    ------
    UsrbioError
        An OSError with the errno.
    """
    native().hardlink(os.fspath(target), os.fspath(link_name))


def punch_hole(
    filename: int | str | os.PathLike[str], start: Sequence[int], end: Sequence[int], flags: int = 0
) -> None:
    """Make holes in a file: of each pair, the bytes from `start` to before `end`; 1000 pairs at most.

    Parameters
    ----------
    filename : int or path
        A descriptor that may write, or a path.
    start, end : sequence of int
        Offsets in bytes.
    flags : int
        As the C interface has it; 0.

    Raises
    ------
    UsrbioError
        An OSError with the errno.
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
    """Offer shared memory to the agent.

    The link that names it is made first; whoever serves the mount answers there and then.

    Parameters
    ----------
    shm : SharedMemory
        It cannot be closed before the iovec is.
    hf3fs_mount_point : str
        Of 3FS or of an agent.
    block_size : int
        In bytes; the memory is registered in blocks of that size, which no operation may cross. 0: as one.
    numa : int
        The node to bind the memory to; -1: none.

    Returns
    -------
    iovec
        A context manager. ``iovec[a:b]`` is what an operation moves; it has the buffer protocol.

    Raises
    ------
    OSError
        The errno with which the publication was refused.
    UsrbioError
        The library refused it.
    """
    module = native()
    identity = str(uuid.uuid4())
    suffix = f".b{block_size}" if block_size > 0 else ""
    link = Path(hf3fs_mount_point, "3fs-virt", "iovs", f"{identity}{suffix}")
    link.symlink_to(os.path.normpath(f"/dev/shm/{shm.name}"))  # noqa: S108 - by name, as the agent will open it.
    try:
        iovec = module.iovec(shm.buf, identity, hf3fs_mount_point, block_size, numa)
    except BaseException:
        link.unlink(missing_ok=True)
        raise
    _account(iovec, lambda: link.unlink(missing_ok=True))
    return iovec


def create_iovec(hf3fs_mount_point: str, *, length_bytes: int, block_size: int = 0, numa: int = -1) -> Iovec:
    """Memory of the library's own making, published by it; else as :func:`make_iovec`."""
    iovec = native().create_iovec(hf3fs_mount_point, length_bytes, block_size, numa)
    _account(iovec, lambda: None)
    return iovec


def open_iovec(
    hf3fs_mount_point: str, identity: str, *, length_bytes: int, block_size: int = 0, numa: int = -1
) -> Iovec:
    """The memory that another process published as `identity`; closing it leaves the publication.

    Operations on it end with EACCES from when its owner takes it back.
    """
    iovec = native().open_iovec(identity, hf3fs_mount_point, length_bytes, block_size, numa)
    _account(iovec, lambda: None)
    return iovec


def make_ioring(  # noqa: PLR0917 - the signature that programs for 3FS call by position.
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,  # noqa: FBT001, FBT002 - as above.
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> Ioring:
    """A queue of reads, or of writes.

    Parameters
    ----------
    hf3fs_mount_point : str
        Of 3FS or of an agent.
    entries : int
        How many operations it holds.
    for_read : bool
        Whether its operations read files.
    io_depth : int
        0: the agent takes what there is. Above 0: only ever exactly that many; with fewer, waiting has no end. Below 0:
        at most that many at once.
    priority : int or None
        One of :class:`IorPriority`.
    timeout : int or None
        With `io_depth` below 0: how many milliseconds the agent may hold a smaller batch.
    numa : int
        The node to bind the ring to; -1: none.
    flags : int
        1: read what is not committed; 2: a read that meets a hole fails with ENODATA.

    Returns
    -------
    ioring
        A context manager with ``prepare(iov, read, fd, off, userdata=None)``, ``submit()``, ``wait(*, max_results=0,
        min_results=0, timeout=None)`` and ``destroy()``. ``wait`` gives iovecs in the order in which they finished,
        with ``result`` (bytes, or a negative errno) and ``userdata``.

    Raises
    ------
    UsrbioError
        An OSError. ENOENT: nobody serves this mount point.
    """
    return native().ioring(hf3fs_mount_point, entries, for_read, io_depth, priority, timeout, numa, flags)


def read_file(  # noqa: PLR0917 - as above.
    fn: str | os.PathLike[str],
    hf3fs_mount_point: str | None = None,
    block_size: int = 1 << 30,
    off: int = 0,
    priority: int | None = None,
    cb: Callable[[memoryview, int], object] | None = None,
) -> bytes | None:
    """Read a file from `off` to its end, block by block.

    Parameters
    ----------
    fn : path
        Of the file.
    hf3fs_mount_point : str or None
        Below which it lies; None: found out.
    block_size : int
        How many bytes one operation reads at most.
    off : int
        Where to begin.
    priority : int or None
        Of the ring.
    cb : callable or None
        Called with the bytes of a block, valid for the call, and its offset. An int that it returns is where to go on;
        anything else that is true ends the reading.

    Returns
    -------
    bytes or None
        What was read; None with `cb`.

    Raises
    ------
    OSError
        What an operation failed with.
    """
    mount = hf3fs_mount_point or extract_mount_point(fn)
    if mount is None:
        raise OSError(errno.EINVAL, "it lies below no mount point of 3FS", os.fspath(fn))
    with ExitStack() as stack:
        fd = os.open(fn, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        register_fd(fd)
        stack.callback(deregister_fd, fd)
        # No more memory than the file can fill now, and a byte that shows its end.
        length_bytes = max(1, min(block_size, os.fstat(fd).st_size - off + 1))
        iov = stack.enter_context(closing(create_iovec(mount, length_bytes=length_bytes)))
        ring = stack.enter_context(make_ioring(mount, 1, priority=priority))
        blocks = _blocks(iov, ring, fd, off, cb)
        if cb is None:
            return b"".join(blocks)
        for _ in blocks:
            pass
    return None


def _blocks(
    iov: Iovec, ring: Ioring, fd: int, offset: int, cb: Callable[[memoryview, int], object] | None
) -> Iterator[bytes]:
    while True:
        done = ring.prepare(iov[:], True, fd, offset).submit().wait(min_results=1)[0]  # noqa: FBT003 - as 3FS has it.
        if done.result < 0:
            raise OSError(-done.result, os.strerror(-done.result))
        if done.result == 0:
            return
        with memoryview(iov) as whole, whole[: done.result] as block:
            if cb is None:
                yield bytes(block)
                answer = None
            else:
                answer = cb(block, offset)
                yield b""
        if isinstance(answer, int) and not isinstance(answer, bool):
            offset = answer
            continue
        if answer or done.result < len(iov):
            return
        offset += done.result


def _account(iovec: Iovec, unpublish: Callable[[], None]) -> None:
    """Have the iovec counted as open until it is closed."""
    handle = Handle("usrbio.iovec")

    def leave() -> None:
        with suppress(FileNotFoundError):
            unpublish()
        handle.release()

    iovec.before_close(leave)
