"""Memory that any exporter shares as a dma-buf.

ROCm, Level Zero, an FPGA driver, the dma-heaps of the kernel and udmabuf export their memory as dma-bufs. gdrkit has no
code for these exporters. The user's program exports the memory itself, and passes the descriptor of the dma-buf to
gdrkit. ``docs/add-a-device.md`` shows how.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gdrkit.buffers import DmabufRange, MemoryKind, MemoryResource
from gdrkit.errors import Api, Reason, Unsupported, errno_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["DmabufMemory"]

# DMA_BUF_IOCTL_SYNC is _IOW('b', 0, struct dma_buf_sync), which has one u64 of flags (linux/dma-buf.h).
_IOCTL_SYNC = 0x40086200
_SYNC_READ, _SYNC_WRITE, _SYNC_END = 1, 2, 4  # DMA_BUF_SYNC_READ, DMA_BUF_SYNC_WRITE, DMA_BUF_SYNC_END
# A region cache finds memory by its address, but a dma-buf has none. So every dma-buf gets an invented range of
# addresses of its own. The ranges lie above all addresses of devices and processes, and are larger than any dma-buf.
_ADDRESS_RANGE_BYTES = 1 << 64


class DmabufMemory(MemoryResource):
    """Memory in a dma-buf of any exporter; see :class:`gdrkit.buffers.DeviceBuffer`.

    NICs register it by its dma-buf. A :class:`~gdrkit.registration.RegionCache` identifies the memory by its dma-buf,
    so that two objects with descriptors of one dma-buf share a registration. The exporter cannot free the memory while
    a descriptor or a registration exists.

    Parameters
    ----------
    dmabuf : DmabufRange
        The memory. This object owns the range from now on, even if the constructor raises.

    Attributes
    ----------
    address : int
        An invented address that identifies the first byte among all dma-bufs. No process or device can access it.
    """

    def __init__(self, dmabuf: DmabufRange) -> None:
        self._dmabuf = dmabuf
        try:
            device_number, self._inode = dmabuf.identity
            self._dmabuf_size_bytes = dmabuf.size_bytes
        except BaseException:
            dmabuf.close()
            raise
        self._base_address = ((device_number << 64 | self._inode) + 1) * _ADDRESS_RANGE_BYTES
        super().__init__(
            MemoryKind.DMABUF, address=self._base_address + dmabuf.offset_bytes, length_bytes=dmabuf.length_bytes
        )

    @property
    def owned(self) -> bool:
        """Always False: the exporter owns the memory. Closing this object only closes its descriptor."""
        return False

    def export_dmabuf(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> DmabufRange:
        """Return a dma-buf range for a part of this memory, with a duplicate of the descriptor. The caller closes it.

        A length of None means up to the end of the memory.
        """
        self._check_open()
        length_bytes = self._resolve_length(offset_bytes, length_bytes)
        return DmabufRange.from_fd(
            self._dmabuf.fd, offset_bytes=self._dmabuf.offset_bytes + offset_bytes, length_bytes=length_bytes
        )

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Return the identity of the whole dma-buf: its first invented address, its size and its inode."""
        self._check_open()
        return ((self._base_address, self._dmabuf_size_bytes, self._inode),)

    def make_existence_check(self, key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
        """Return a function that checks whether this object still holds the dma-buf of `key`.

        While a descriptor of this dma-buf is open, the kernel does not give its inode to another dma-buf. So the key is
        enough for the check.
        """
        is_own_key = key == ((self._base_address, self._dmabuf_size_bytes, self._inode),)
        return lambda: is_own_key and not self.closed

    def allocation(self) -> DmabufMemory:
        """Return an object for the whole dma-buf, with a duplicate of the descriptor."""
        self._check_open()
        return DmabufMemory(DmabufRange.from_fd(self._dmabuf.fd))

    def _release(self) -> None:
        self._dmabuf.close()

    def _copy_to_host(self, address: int, view: memoryview) -> None:
        with self._map_for_access(_SYNC_READ) as mapping:
            dmabuf_offset_bytes = address - self._base_address
            view[:] = memoryview(mapping)[dmabuf_offset_bytes : dmabuf_offset_bytes + view.nbytes]

    def _copy_from_host(self, address: int, view: memoryview) -> None:
        with self._map_for_access(_SYNC_READ | _SYNC_WRITE) as mapping:
            dmabuf_offset_bytes = address - self._base_address
            mapping[dmabuf_offset_bytes : dmabuf_offset_bytes + view.nbytes] = bytes(view)

    @contextmanager
    def _map_for_access(self, sync_flags: int) -> Iterator[mmap.mmap]:
        """Map the dma-buf for an access by the CPU, between the two DMA_BUF_IOCTL_SYNC calls that the kernel requires.

        Raises
        ------
        Unsupported
            The exporter does not let the CPU map its memory.
        """
        try:
            mapping = mmap.mmap(self._dmabuf.fd, self._dmabuf_size_bytes)
            with mapping:
                fcntl.ioctl(self._dmabuf.fd, _IOCTL_SYNC, struct.pack("=Q", sync_flags))
                try:
                    yield mapping
                finally:
                    fcntl.ioctl(self._dmabuf.fd, _IOCTL_SYNC, struct.pack("=Q", sync_flags | _SYNC_END))
        except OSError as error:
            error_number = error.errno or errno.EIO
            raise Unsupported(
                api=Api.KERNEL,
                operation="mmap",
                status=error_number,
                status_name=errno_name(error_number),
                errno=error_number,
                arguments={"fd": self._dmabuf.fd, "length": self._dmabuf_size_bytes},
                reason=Reason.NOT_SUPPORTED,
                what_to_do="copy the bytes with the library of the exporter",
                detail=os.strerror(error_number),
            ) from error
