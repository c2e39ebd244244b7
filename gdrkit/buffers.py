"""What exporters and importers of device memory share.

Level 1. CUDA and Gaudi *export* a :class:`DmabufRange`, verbs *imports* one, and only ``registration`` knows both.
:class:`DeviceBuffer` is what any room above may ask of a piece of device memory, whoever made it.
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
    """Where bytes live and who made them; it decides which ways of registration and sharing exist."""

    HOST = "host"
    CUDA = "cuda"  # cuMemAlloc
    CUDA_VMM = "cuda_vmm"  # cuMemCreate and cuMemMap
    CUDA_POOL = "cuda_pool"  # cuMemAllocAsync
    CUDA_IMPORTED = "cuda_imported"  # cuIpcOpenMemHandle
    CUDA_MANAGED = "cuda_managed"
    GAUDI = "gaudi"


class DmabufRange:
    """A part of a dma-buf, and the file descriptor that keeps it alive.

    The range owns the descriptor: closing the range closes it, ``take()`` hands it on. A memory region made from the
    range keeps its own reference in the kernel, so the range may be closed once the region stands.

    Parameters
    ----------
    fd : int
        An open dma-buf; owned from now on, also when the constructor raises.
    offset_bytes : int
        Where the range begins in the dma-buf.
    length_bytes : int
        Its size, above 0.
    address : int
        The device address of its first byte, by which peers will name it (iova).
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
        """The descriptor, still owned by the range."""
        if self._fd < 0:
            what = "dma-buf range"
            raise ClosedResource(what)
        return self._fd

    @property
    def closed(self) -> bool:
        """Whether the descriptor was closed or taken."""
        return self._fd < 0

    def dup(self) -> DmabufRange:
        """A second range over the same bytes with a descriptor of its own (close-on-exec)."""
        fd = fcntl.fcntl(self.fd, fcntl.F_DUPFD_CLOEXEC, 3)
        return DmabufRange(fd, offset_bytes=self.offset_bytes, length_bytes=self.length_bytes, address=self.address)

    def take(self) -> int:
        """Give the descriptor to the caller, who closes it from now on; the range is closed."""
        fd, self._fd = self.fd, -1
        self._handle.release()
        return fd

    def close(self) -> None:
        """Close the descriptor; a second close does nothing."""
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
            # Closed first: a warning may be made an error.
            fd = self._fd
            self.close()
            warnings.warn(f"dma-buf range with fd {fd} was never closed", GdrkitWarning, stacklevel=1)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd {self._fd}"
        return f"DmabufRange({state}, offset_bytes={self.offset_bytes}, length_bytes={self.length_bytes})"


@runtime_checkable
class DeviceBuffer(Protocol):
    """Memory that a NIC can be given, as the rooms above see it: that of a CUDA or Gaudi device, and pages of the host
    that gdrkit has mapped (:class:`gdrkit.host.HostMemory`), for which "device" reads "host" below.
    """

    @property
    def kind(self) -> MemoryKind:
        """Who made it."""

    @property
    def address(self) -> int:
        """Device address of its first byte."""

    @property
    def length_bytes(self) -> int:
        """Its size."""

    @property
    def closed(self) -> bool:
        """Whether it was released."""

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """(base, length_bytes, buffer id) of every chunk under it, in order; another id at one address is another
        memory.
        """

    def presence(self, key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
        """What says whether every chunk of `key`, an earlier answer of :meth:`allocation_key`, is still there.

        A function, since a cache asks the same again and again: what can be prepared is prepared here.
        """

    def allocation(self) -> DeviceBuffer:
        """The whole of the chunks under this memory, borrowed."""

    @property
    def owned(self) -> bool:
        """Whether :meth:`close` gives the memory back; if not, somebody else does, unseen."""

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then give back what is owned."""

    def export_dmabuf(self) -> DmabufRange:
        """A new dma-buf range over exactly this memory; the caller closes it.

        Raises
        ------
        ApiError
            The driver refused; :class:`~gdrkit.errors.Unsupported` when it cannot export at all.
        """

    def read(self, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Copy bytes to the host by the device's own copy call, and wait for them."""

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int) -> None:
        """Copy bytes from the host by the device's own copy call, and wait until they are there."""

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Have `action` run before the memory is freed (last added first); returns what takes the action back."""


@runtime_checkable
class Allocator(Protocol):
    """What gives memory: a device, or the host."""

    def allocate(self, length_bytes: int) -> DeviceBuffer:
        """New memory, owned by the caller."""


def check_range(*, offset_bytes: int, length_bytes: int, size_bytes: int) -> None:
    """Raise :class:`UsageError` unless ``[offset, offset + length)`` lies inside ``[0, size)``."""
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > size_bytes:
        message = f"bytes {offset_bytes} to {offset_bytes + length_bytes} are not inside 0 to {size_bytes}"
        raise UsageError(message, reason=Reason.BAD_ARGUMENT)
