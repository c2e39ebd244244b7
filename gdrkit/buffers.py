"""Interfaces of device memory that exporters and importers share.

CUDA and Gaudi *export* a :class:`DmabufRange`, and verbs *imports* one; only ``registration`` knows both.
:class:`DeviceBuffer` is the interface of device memory for all higher packages, whichever exporter made it.
"""

from __future__ import annotations

import enum
import fcntl
import os
import warnings
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from gdrkit.errors import ClosedResource, GdrkitWarning, Reason, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Allocator", "DeviceBuffer", "DmabufRange", "MemoryKind", "check_range"]


class MemoryKind(enum.Enum):
    """The place and the allocator of memory. It decides which methods of registration and sharing exist."""

    HOST = "host"
    CUDA = "cuda"  # cuMemAlloc
    CUDA_VMM = "cuda_vmm"  # cuMemCreate and cuMemMap
    CUDA_POOL = "cuda_pool"  # cuMemAllocAsync
    CUDA_IMPORTED = "cuda_imported"  # cuIpcOpenMemHandle
    CUDA_MANAGED = "cuda_managed"
    GAUDI = "gaudi"


class DmabufRange:
    """A part of a dma-buf, with the file descriptor that keeps the dma-buf alive.

    The range owns the descriptor: closing the range closes it, and :meth:`take` passes it to the caller. A memory
    region made from the range keeps its own reference in the kernel, so the range may be closed once the region exists.

    Parameters
    ----------
    fd : int
        An open dma-buf. The range owns it from now on, also if the constructor raises.
    offset_bytes : int
        Offset of the range in the dma-buf.
    length_bytes : int
        Size of the range, above 0.
    address : int
        The device address of the first byte. Peers use it to name this byte (iova).
    """

    __slots__ = ("_fd", "_handle", "address", "length_bytes", "offset_bytes")

    def __init__(self, fd: int, *, offset_bytes: int, length_bytes: int, address: int) -> None:
        self._fd = fd
        self._handle = Handle("dmabuf_range")
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.address = address
        if fd < 0 or offset_bytes < 0 or length_bytes <= 0 or address < 0:
            self.close()
            message = f"no dma-buf range: fd {fd}, offset {offset_bytes}, length {length_bytes}, address {address:#x}"
            raise UsageError(message)

    @property
    def fd(self) -> int:
        """The file descriptor. The range still owns it."""
        if self._fd < 0:
            what = "dma-buf range"
            raise ClosedResource(what)
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether the descriptor was closed or taken."""
        return self._fd < 0

    def dup(self) -> DmabufRange:
        """Return a second range over the same bytes, with a duplicate of the descriptor (close-on-exec)."""
        fd = fcntl.fcntl(self.fd, fcntl.F_DUPFD_CLOEXEC, 3)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            # The descriptor is closed first, because a warning filter may turn the warning into an error.
            fd = self._fd
            self.close()
            warnings.warn(f"dma-buf range with fd {fd} was never closed", GdrkitWarning, stacklevel=1)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd {self._fd}"
        return f"DmabufRange({state}, offset_bytes={self.offset_bytes}, length_bytes={self.length_bytes})"


@runtime_checkable
class DeviceBuffer(Protocol):
    """Memory that can be registered with a NIC, as higher packages use it.

    It is memory of a CUDA or Gaudi device, or host pages that gdrkit has mapped (:class:`gdrkit.host.HostMemory`). For
    host pages, "device" means "host" below.
    """

    @property
    def kind(self) -> MemoryKind:
        """The place and the allocator of the memory."""

    @property
    def address(self) -> int:
        """Device address of the first byte."""

    @property
    def length_bytes(self) -> int:
        """Size in bytes."""

    @property
    def closed(self) -> bool:
        """Whether the memory was closed."""

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Return (base, length_bytes, buffer id) of every chunk under the memory, in order.

        If the buffer id at an address changes, the memory there is another allocation.
        """

    def presence(self, key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
        """Return a function that checks whether every chunk of `key` still exists.

        `key` is an earlier result of :meth:`allocation_key`. A cache repeats the same check many times, so everything
        that can be prepared is prepared here.
        """

    def allocation(self) -> DeviceBuffer:
        """Return all chunks under this memory, borrowed."""

    @property
    def owned(self) -> bool:
        """Whether :meth:`close` frees the memory. If not, other code frees it, without notice."""

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then free the memory if it is owned."""

    def export_dmabuf(self) -> DmabufRange:
        """Export exactly this memory as a new dma-buf range. The caller closes it.

        Raises
        ------
        ApiError
            The driver failed. It is :class:`~gdrkit.errors.Unsupported` if the driver cannot export at all.
        """

    def read(self, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Copy bytes to the host with the device's own copy call, and return them."""

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int) -> None:
        """Copy bytes from the host with the device's own copy call. The copy is complete on return."""

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Run `action` before the memory is freed, last added first. Return a function that cancels this."""


@runtime_checkable
class Allocator(Protocol):
    """An allocator of memory: a device, or the host."""

    def allocate(self, length_bytes: int) -> DeviceBuffer:
        """Allocate memory, which the caller owns."""


def check_range(*, offset_bytes: int, length_bytes: int, size_bytes: int) -> None:
    """Raise :class:`UsageError` unless ``[offset, offset + length)`` is inside ``[0, size)``."""
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > size_bytes:
        message = f"bytes {offset_bytes} to {offset_bytes + length_bytes} are not inside 0 to {size_bytes}"
        raise UsageError(message, reason=Reason.BAD_ARGUMENT)
