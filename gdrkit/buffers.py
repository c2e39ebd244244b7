"""Interfaces of device memory that exporters and importers share.

``gdrkit.cuda`` and ``gdrkit.gaudi`` *export* device memory as a :class:`DmabufRange`, and ``gdrkit.verbs`` *imports*
it. Only ``gdrkit.registration`` uses both sides. All higher packages use the memory of every exporter through
:class:`DeviceBuffer`. :class:`MemoryResource` is the base of the classes that implement this interface.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from gdrkit.errors import Api, ApiError, ClosedResource, GdrkitWarning, Reason, UsageError, errno_name
from gdrkit.handles import Closeable, Handle, ReleaseStack, Resource
from gdrkit.units import GPU_RDMA_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = [
    "Allocator",
    "DeviceBuffer",
    "DmabufRange",
    "MemoryKind",
    "MemoryResource",
    "RegistrableMemory",
    "check_range",
]


# The lowest number for a duplicate of a descriptor: 0 to 2 are the standard streams, even if they are closed.
_DUPLICATE_FD_MIN = 3


class MemoryKind(enum.Enum):
    """The type of memory: the device that it is in, and the call that allocated it.

    The kind decides by which methods the memory can be registered with a NIC and shared with another process.
    """

    HOST = "host"
    CUDA = "cuda"  # cuMemAlloc
    CUDA_VMM = "cuda_vmm"  # cuMemCreate and cuMemMap
    CUDA_POOL = "cuda_pool"  # cuMemAllocAsync
    CUDA_IMPORTED = "cuda_imported"  # cuIpcOpenMemHandle
    CUDA_MANAGED = "cuda_managed"  # cuMemAllocManaged
    GAUDI = "gaudi"
    DMABUF = "dmabuf"  # Memory of any exporter. gdrkit knows only its dma-buf.


class DmabufRange(Closeable):
    """A part of a dma-buf, with the file descriptor that keeps the dma-buf alive.

    The range owns the descriptor: closing the range closes it, and :meth:`take` passes it to the caller. A memory
    region made from the range keeps its own reference in the kernel, so the range may be closed once the region exists.

    Parameters
    ----------
    fd : int
        A descriptor of a dma-buf. The range owns it from now on. If the constructor raises an error, it has closed the
        descriptor.
    offset_bytes : int
        Offset of the range in the dma-buf.
    length_bytes : int
        Size of the range, above 0.
    address : int
        The iova of the first byte: the address by which RDMA requests of peers name this byte. For memory of a
        device, it is the device address.
    """

    __slots__ = ("_fd", "_handle", "address", "length_bytes", "offset_bytes")

    def __init__(self, fd: int, *, offset_bytes: int, length_bytes: int, address: int) -> None:
        self._fd = fd
        self._handle = Handle("dmabuf_range", size_bytes=max(length_bytes, 0))
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.address = address
        if fd < 0 or offset_bytes < 0 or length_bytes <= 0 or address < 0:
            self.close()
            message = (
                f"a dma-buf range needs a length above 0 and no negative value, not fd {fd}, offset {offset_bytes}, "
                f"length {length_bytes}, address {address:#x}"
            )
            raise UsageError(message)

    @classmethod
    def from_fd(cls, fd: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> Self:
        """Return a range of a dma-buf of any exporter, such as ROCm, Level Zero or a driver of an FPGA.

        In RDMA requests of peers, the first byte of the dma-buf has the address (iova) 64 KiB.

        Parameters
        ----------
        fd : int
            A descriptor of the dma-buf. It is borrowed: the range gets a duplicate (close-on-exec).
        offset_bytes : int
            Offset of the range in the dma-buf.
        length_bytes : int or None
            Size of the range, above 0. None means up to the end of the dma-buf.

        Raises
        ------
        ApiError
            BAD_DESCRIPTOR: the descriptor is not open, or lseek cannot report the size of the dma-buf.
        UsageError
            The range is empty or not inside the dma-buf.
        """
        size_bytes = _query_size(fd)
        length_bytes = size_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=size_bytes)
        # ibv_reg_dmabuf_mr requires that the iova and the offset in the dma-buf have the same offset in a page.
        address = GPU_RDMA_PAGE_BYTES + offset_bytes
        duplicate_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _DUPLICATE_FD_MIN)
        return cls(duplicate_fd, offset_bytes=offset_bytes, length_bytes=length_bytes, address=address)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the dma-buf. They identify the dma-buf while a descriptor of it is open.

        The kernel gives each dma-buf an inode of its own since Linux 5.3.
        """
        stat_result = os.fstat(self.fd)
        return stat_result.st_dev, stat_result.st_ino

    @property
    def size_bytes(self) -> int:
        """Size of the whole dma-buf in bytes."""
        return _query_size(self.fd)

    @property
    def fd(self) -> int:
        """The file descriptor, which the range still owns."""
        if self._fd < 0:
            range_name = "dma-buf range"
            raise ClosedResource(range_name)
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether the descriptor was closed or taken."""
        return self._fd < 0

    def dup(self) -> DmabufRange:
        """Return a second range over the same bytes, with a duplicate of the descriptor (close-on-exec)."""
        fd = fcntl.fcntl(self.fd, fcntl.F_DUPFD_CLOEXEC, _DUPLICATE_FD_MIN)
        return DmabufRange(fd, offset_bytes=self.offset_bytes, length_bytes=self.length_bytes, address=self.address)

    def take(self) -> int:
        """Pass the descriptor to the caller, who has to close it. This closes the range."""
        fd, self._fd = self.fd, -1
        self._handle.release()
        return fd

    def close(self) -> None:
        """Close the descriptor. A second close does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        self._handle.release()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            # The descriptor is closed first, because a warning filter may turn the warning into an error.
            fd = self._fd
            self.close()
            warnings.warn(f"dma-buf range with fd {fd} was never closed", GdrkitWarning, stacklevel=1)

    def __repr__(self) -> str:
        fd_text = "closed" if self.closed else f"fd {self._fd}"
        return f"DmabufRange({fd_text}, offset_bytes={self.offset_bytes}, length_bytes={self.length_bytes})"


class RegistrableMemory(Protocol):
    """The part of :class:`DeviceBuffer` that the registration of memory with NICs uses."""

    @property
    def kind(self) -> MemoryKind:
        """The type of the memory."""

    @property
    def address(self) -> int:
        """Device address of the first byte, or 0 if the memory has no address in this process."""

    @property
    def length_bytes(self) -> int:
        """Size in bytes."""

    @property
    def closed(self) -> bool:
        """Whether the memory was closed."""

    def export_dmabuf(self) -> DmabufRange:
        """Export exactly this memory as a new dma-buf range. The caller closes it.

        Raises
        ------
        ApiError
            The driver failed. The error is :class:`~gdrkit.errors.Unsupported` if this memory cannot be exported.
        """

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Register `action` to run before the memory is freed, and return a function that removes it.

        The actions run in reverse order: the last registered action runs first.
        """


@runtime_checkable
class DeviceBuffer(RegistrableMemory, Protocol):
    """The interface by which higher packages use memory that can be registered with a NIC.

    The memory belongs to a CUDA or Gaudi device, or it consists of host pages that gdrkit has mapped
    (:class:`gdrkit.host.HostMemory`). For host pages, "device" means "host" below.
    """

    @property
    def address(self) -> int:
        """Device address of the first byte."""

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Return (address, length_bytes, buffer id) of every allocation that contains a part of this memory, in order.

        The buffer id is the driver's number of an allocation. A driver may reuse an address, but never a buffer id. So
        a new buffer id at an address means a new allocation.
        """

    def make_existence_check(self, key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
        """Return a function that checks whether every allocation of `key` still exists.

        `key` is an earlier result of :meth:`allocation_key`. A cache of registrations repeats the check at every
        lookup. This method therefore does all preparations, so that the returned function is fast.
        """

    def allocation(self) -> DeviceBuffer:
        """Return a buffer over all allocations that contain a part of this memory. It does not own them."""

    @property
    def owned(self) -> bool:
        """Whether :meth:`close` frees the memory. If not, other code may free it without informing gdrkit."""

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then free the memory if it is owned."""

    def read(self, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Copy bytes to the host with the device's own copy call, and return them."""

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int) -> None:
        """Copy bytes from the host with the device's own copy call. The copy is complete on return."""


@runtime_checkable
class Allocator(Protocol):
    """An allocator of memory: a device, or the host."""

    def allocate(self, length_bytes: int) -> DeviceBuffer:
        """Allocate memory, which the caller owns."""


class MemoryResource(Resource):
    """Base of the memory classes of CUDA, Gaudi and the host.

    It checks the range of every copy, and runs the actions of :meth:`before_release` before the memory is freed.
    `on_close` is described at :class:`~gdrkit.handles.Resource`.

    Attributes
    ----------
    kind : MemoryKind
        The type of the memory.
    address : int
        Device address of the first byte.
    length_bytes : int
        Size in bytes.
    """

    def __init__(
        self,
        kind: MemoryKind,
        *,
        address: int,
        length_bytes: int,
        on_close: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        self.kind = kind
        self.address = address
        self.length_bytes = length_bytes
        self._release_actions = ReleaseStack()
        self._is_closing = False
        super().__init__(f"memory.{kind.value}", name=f"{kind.value} memory at {address:#x}", on_close=on_close)

    @property
    def owned(self) -> bool:
        """Whether :meth:`close` frees the memory. If not, other code may free it without informing gdrkit."""
        return True

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager that makes the CUDA context of this memory current on the calling thread.

        For memory without a CUDA context the manager does nothing.
        """
        return contextlib.nullcontext()

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Copy bytes to the host and return them. A length of None means up to the end of the memory."""
        data = bytearray(self._resolve_length(offset_bytes, length_bytes))
        self.read_into(data, offset_bytes=offset_bytes)
        return bytes(data)

    def read_into(self, buffer: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Fill a host buffer from this memory. The copy is complete on return."""
        view = self._make_checked_view(buffer, offset_bytes)
        if view.nbytes:
            self._copy_to_host(self.address + offset_bytes, view)

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Copy bytes from the host into this memory. The copy is complete on return."""
        view = self._make_checked_view(data, offset_bytes)
        if view.nbytes:
            self._copy_from_host(self.address + offset_bytes, view)

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Register `action` to run before the memory is freed, and return a function that removes it.

        The actions run in reverse order: the last registered action runs first.

        Raises
        ------
        ClosedResource
            The memory was freed, or :meth:`close` is running: in another thread, or in the code that a signal handler
            interrupted before the handler called this method.
        """
        self._check_open()
        if self._is_closing:
            raise ClosedResource(self._name)
        return self._release_actions.push(action)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then free the memory if it is owned. A second close does nothing.

        Raises
        ------
        Exception
            An action failed. The error of the first failed action is raised, with the errors of other actions as its
            notes. The memory is *not* freed then, because a NIC may still access it. The next close tries again.
        """
        if self._is_closed:
            return
        self._is_closing = True
        try:
            self._release_actions.run()
            with self.current():
                super().close()
        finally:
            self._is_closing = False

    @abstractmethod
    def _copy_to_host(self, address: int, view: memoryview) -> None:
        """Fill `view`, which has at least one byte, from the memory at `address`."""

    @abstractmethod
    def _copy_from_host(self, address: int, view: memoryview) -> None:
        """Copy `view`, which has at least one byte, to the memory at `address`."""

    def _resolve_length(self, offset_bytes: int, length_bytes: int | None) -> int:
        """Return the length of a range of this memory. A length of None means up to the end of the memory.

        Raises
        ------
        UsageError
            The range is not inside the memory.
        """
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return length_bytes

    def _make_checked_view(self, data: bytes | bytearray | memoryview, offset_bytes: int) -> memoryview:
        """Return the bytes of a host buffer, and raise UsageError if they do not fit into this memory at the offset."""
        self._check_open()
        view = memoryview(data)
        if not view.c_contiguous:
            message = "the host buffer must be C-contiguous"
            raise UsageError(message)
        check_range(offset_bytes=offset_bytes, length_bytes=view.nbytes, size_bytes=self.length_bytes)
        return view.cast("B") if view.nbytes else view

    def __repr__(self) -> str:
        address_text = "closed" if self._is_closed else f"{self.address:#x}"
        return f"{type(self).__name__}({address_text}, length_bytes={self.length_bytes}, kind={self.kind.value})"


def _query_size(fd: int) -> int:
    """Return the size of a dma-buf in bytes, as lseek to its end reports it."""
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    except OSError as error:
        error_number = error.errno or errno.EBADF
        raise ApiError(
            api=Api.KERNEL,
            operation="lseek",
            status=error_number,
            status_name=errno_name(error_number),
            errno=error_number,
            arguments={"fd": fd},
            reason=Reason.BAD_DESCRIPTOR,
        ) from error


def check_range(*, offset_bytes: int, length_bytes: int, size_bytes: int) -> None:
    """Raise :class:`UsageError` unless ``[offset, offset + length)`` is inside ``[0, size)``."""
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > size_bytes:
        message = f"bytes {offset_bytes} to {offset_bytes + length_bytes} are not inside 0 to {size_bytes}"
        raise UsageError(message, reason=Reason.BAD_ARGUMENT)
