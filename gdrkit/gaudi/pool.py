"""Device memory that is shared out under one dma-buf.

Level 2. The driver exports whole pages of an allocation, at some cost each time; a pool is exported once, and every
part of it goes out as a duplicate of that descriptor and an offset. UCX does the same with the memory of SynapseAI.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import DmabufRange, MemoryKind
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError, errno_name
from gdrkit.gaudi._ranges import FirstFit
from gdrkit.gaudi.device import Piece
from gdrkit.gaudi.memory import Allocation, GaudiMemory
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.gaudi.device import Device

__all__ = ["MemoryPool", "PoolMemory"]


class MemoryPool:
    """One allocation, exported at the first need and then as long as the pool lives.

    Parameters
    ----------
    device : Device
        Where.
    length_bytes : int
        How much there is to share out, above 0.

    Raises
    ------
    ApiError, SetupMissing
        As :class:`gdrkit.gaudi.DeviceMemory`.
    """

    def __init__(self, device: Device, length_bytes: int) -> None:
        self.device = device
        self.storage = Allocation(device, length_bytes)
        self._free = FirstFit(self.storage.address, self.storage.length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        self._exporting = threading.Lock()
        self._whole: DmabufRange | None = None
        self._parts = ReleaseStack()
        self._closed = False
        self._handle = Handle("gaudi.pool")
        self._leave = device.adopt(self.close)
        self._forget = device.enter(Piece(MemoryKind.GAUDI, self.address, self.length_bytes, self._exported))

    @property
    def address(self) -> int:
        """Device address of its first byte."""
        return self.storage.address

    @property
    def length_bytes(self) -> int:
        """Its size, whole pages."""
        return self.storage.length_bytes

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def allocate(self, length_bytes: int) -> PoolMemory:
        """A part of it that nobody else has.

        Raises
        ------
        ApiError
            ENOMEM: no free part is so large.
        """
        if self._closed:
            what = "Gaudi memory pool"
            raise ClosedResource(what)
        if length_bytes <= 0:
            message = f"cannot allocate {length_bytes} bytes"
            raise UsageError(message)
        address = self._free.take(length_bytes)
        if address is None:
            raise ApiError(
                api=Api.NONE,
                operation="MemoryPool.allocate",
                status=errno.ENOMEM,
                status_name=errno_name(errno.ENOMEM),
                errno=errno.ENOMEM,
                arguments={"length_bytes": length_bytes},
                reason=Reason.OUT_OF_MEMORY,
                what_to_do="close parts of the pool, or make a larger one",
                detail=f"the largest free part has {self._free.largest_bytes} bytes",
            )
        return PoolMemory(self, offset_bytes=address - self.address, length_bytes=length_bytes)

    def export(self, *, offset_bytes: int, length_bytes: int) -> DmabufRange:
        """Any part of it, by a duplicate of the one dma-buf; the caller closes it.

        Raises
        ------
        ApiError
            The driver does not export the pool.
        """
        with self._exporting:
            if self._whole is None:
                fd = self.storage.export(offset_bytes=0, length_bytes=self.length_bytes)
                self._whole = DmabufRange(fd, offset_bytes=0, length_bytes=self.length_bytes, address=self.address)
            with self._whole.dup() as copy:
                return DmabufRange(
                    copy.take(),
                    offset_bytes=offset_bytes,
                    length_bytes=length_bytes,
                    address=self.address + offset_bytes,
                )

    def adopt(self, close: Callable[[], None]) -> Callable[[], None]:
        """Have `close` called before the pool is closed; returns what takes it back."""
        return self._parts.push(close)

    def give_back(self, address: int, length_bytes: int) -> None:
        """Take back what :meth:`allocate` gave; for :class:`PoolMemory`."""
        self._free.give_back(address, length_bytes)

    def close(self) -> None:
        """Close its parts, the dma-buf and the allocation, in this order; a second close does nothing.

        Raises
        ------
        ApiError
            EINVAL, BUSY: a duplicate of the dma-buf, or a region made from one, is alive somewhere. Closing again
            tries again.
        """
        if self._closed:
            return
        self._parts.run()
        with self._exporting:
            if self._whole is not None:
                self._whole.close()
                self._whole = None
        self.storage.close()
        self._closed = True
        self._forget()
        self._leave()
        self._handle.release()

    def _exported(self, begin: int, length_bytes: int) -> DmabufRange:
        return self.export(offset_bytes=begin, length_bytes=length_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MemoryPool({'closed' if self._closed else f'{self.address:#x}'}, length_bytes={self.length_bytes})"


class PoolMemory(GaudiMemory):
    """A part of a pool; :meth:`close` gives it back to the pool."""

    def __init__(self, pool: MemoryPool, *, offset_bytes: int, length_bytes: int) -> None:
        """Not for direct use; see :meth:`MemoryPool.allocate`."""
        super().__init__(pool.storage, offset_bytes=offset_bytes, length_bytes=length_bytes)
        self._pool = pool
        self._leave_pool = pool.adopt(self.close)

    def _release(self) -> None:
        self._pool.give_back(self.address, self.length_bytes)
        self._leave_pool()

    def _export(self, begin: int, length_bytes: int) -> DmabufRange:
        return self._pool.export(offset_bytes=begin, length_bytes=length_bytes)
