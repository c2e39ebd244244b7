"""A pool of device memory with one dma-buf.

The driver exports whole pages of an allocation, and each export has a cost. So a pool is exported once. Each part of
the pool is exported as a duplicate of the pool's descriptor, with an offset. UCX does the same with memory of
SynapseAI, the software of Intel for Gaudi.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from gdrkit.buffers import DmabufRange, MemoryKind
from gdrkit.errors import Api, ApiError, Reason, UsageError, errno_name
from gdrkit.gaudi._ranges import FirstFit
from gdrkit.gaudi.context import MappedRange
from gdrkit.gaudi.memory import Allocation, GaudiMemory
from gdrkit.handles import ReleaseStack, Resource
from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.gaudi.context import GaudiContext

__all__ = ["DmabufPool", "PoolMemory"]


class DmabufPool(Resource):
    """One allocation that is divided into parts. The first export of a part exports the whole pool.

    Parameters
    ----------
    device : GaudiContext
        The device to allocate on.
    length_bytes : int
        Size of the pool in bytes, above 0.

    Raises
    ------
    ApiError, SetupMissing
        See :class:`gdrkit.gaudi.DeviceMemory`.
    """

    def __init__(self, device: GaudiContext, length_bytes: int) -> None:
        self.device = device
        self.allocation = Allocation(device, length_bytes)
        self._allocator = FirstFit(
            self.allocation.address, self.allocation.length_bytes, alignment_bytes=HOST_PAGE_BYTES
        )
        self._export_lock = threading.Lock()
        self._pool_dmabuf: DmabufRange | None = None
        self._part_close_actions = ReleaseStack()
        super().__init__("gaudi.pool", name="Gaudi memory pool", on_close=device.on_close)
        self._remove_mapped_range = device.add_mapped_range(
            MappedRange(MemoryKind.GAUDI, self.address, self.length_bytes, self._export_range)
        )

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self.allocation.address

    @property
    def length_bytes(self) -> int:
        """Size of the pool in bytes, in whole pages."""
        return self.allocation.length_bytes

    def allocate(self, length_bytes: int) -> PoolMemory:
        """Allocate a part of the pool.

        Raises
        ------
        ApiError
            ENOMEM: no free part is large enough.
        """
        self._check_open()
        if length_bytes <= 0:
            message = f"length_bytes must be at least 1, not {length_bytes}"
            raise UsageError(message)
        address = self._allocator.allocate(length_bytes)
        if address is None:
            raise ApiError(
                api=Api.NONE,
                operation="DmabufPool.allocate",
                status=errno.ENOMEM,
                status_name=errno_name(errno.ENOMEM),
                errno=errno.ENOMEM,
                arguments={"length_bytes": length_bytes},
                reason=Reason.OUT_OF_MEMORY,
                what_to_do="close parts of the pool, or make a larger one",
                detail=f"the largest free part has {self._allocator.largest_free_bytes} bytes",
            )
        return PoolMemory(self, offset_bytes=address - self.address, length_bytes=length_bytes)

    def export(self, *, offset_bytes: int, length_bytes: int) -> DmabufRange:
        """Return a part of the pool as a duplicate of the pool's dma-buf. The caller closes the duplicate.

        Raises
        ------
        ApiError
            The driver cannot export the pool.
        """
        with self._export_lock:
            if self._pool_dmabuf is None:
                fd = self.allocation.export(offset_bytes=0, length_bytes=self.length_bytes)
                self._pool_dmabuf = DmabufRange(
                    fd, offset_bytes=0, length_bytes=self.length_bytes, address=self.address
                )
            with self._pool_dmabuf.dup() as duplicate:
                return DmabufRange(
                    duplicate.take(),
                    offset_bytes=offset_bytes,
                    length_bytes=length_bytes,
                    address=self.address + offset_bytes,
                )

    def on_close(self, close: Callable[[], None]) -> Callable[[], None]:
        """Register `close` to be called before the pool is closed, and return a function that cancels the call."""
        return self._part_close_actions.push(close)

    def free_part(self, address: int, length_bytes: int) -> None:
        """Free a part that :meth:`allocate` returned. Only :class:`PoolMemory` calls this."""
        self._allocator.free(address, length_bytes)

    def close(self) -> None:
        """Close the parts, the dma-buf and the allocation, in this order. A second close does nothing.

        Raises
        ------
        ApiError
            EINVAL with the reason BUSY: a duplicate of the dma-buf, or a region made from one, still exists. Close can
            be called again.
        """
        super().close()

    def _release(self) -> None:
        self._part_close_actions.run()
        with self._export_lock:
            if self._pool_dmabuf is not None:
                self._pool_dmabuf.close()
                self._pool_dmabuf = None
        self.allocation.close()
        self._remove_mapped_range()

    def _export_range(self, begin_offset: int, length_bytes: int) -> DmabufRange:
        return self.export(offset_bytes=begin_offset, length_bytes=length_bytes)

    def __repr__(self) -> str:
        return f"DmabufPool({'closed' if self._is_closed else f'{self.address:#x}'}, length_bytes={self.length_bytes})"


class PoolMemory(GaudiMemory):
    """A part of a pool. :meth:`close` returns it to the pool."""

    def __init__(self, pool: DmabufPool, *, offset_bytes: int, length_bytes: int) -> None:
        """Create a part of `pool`. Callers use :meth:`DmabufPool.allocate` instead."""
        super().__init__(pool.allocation, offset_bytes=offset_bytes, length_bytes=length_bytes)
        self._pool = pool
        self._cancel_close_with_pool = pool.on_close(self.close)

    def _release(self) -> None:
        self._pool.free_part(self.address, self.length_bytes)
        self._cancel_close_with_pool()

    def _export(self, begin_offset: int, length_bytes: int) -> DmabufRange:
        return self._pool.export(offset_bytes=begin_offset, length_bytes=length_bytes)
