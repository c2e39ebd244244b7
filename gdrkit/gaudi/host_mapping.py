"""Host memory that is mapped to a Gaudi device, so that the device can access it.

The mapping has a device address, but the kernel exports no dma-buf of host memory. To let a NIC access the memory,
register the memory by its host address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from gdrkit.buffers import MemoryKind
from gdrkit.errors import Api, Reason, Unsupported, UsageError
from gdrkit.gaudi import _hlthunk
from gdrkit.gaudi.context import MappedRange
from gdrkit.handles import Resource

if TYPE_CHECKING:
    import mmap

    from gdrkit.gaudi.context import GaudiContext

__all__ = ["HostMapping"]


class HostMapping(Resource):
    """A host buffer with a device address. It is pinned until the mapping is closed.

    Parameters
    ----------
    device : GaudiContext
        The device to map to.
    buffer : bytearray, mmap or memoryview
        A writable and contiguous buffer. It cannot be resized or closed until the mapping is closed.

    Raises
    ------
    ApiError
        EFAULT: a part of the buffer is not mapped, or not writable. ENOMEM: there is no free device address.
    UsageError
        The buffer is empty, read-only or not contiguous.
    """

    def __init__(self, device: GaudiContext, buffer: bytearray | mmap.mmap | memoryview) -> None:
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous or not view.nbytes:
            message = "buffer must be writable, contiguous and not empty"
            raise UsageError(message)
        self.device = device
        self.length_bytes = view.nbytes
        self._view: memoryview | None = view.cast("B")
        self.address = _hlthunk.call(
            "hlthunk_host_memory_map",
            fd=device.fd,
            host_virt_addr=_hlthunk.address_of(self._view),
            hint_addr=0,
            host_size=view.nbytes,
        )
        super().__init__(
            "gaudi.host_mapping", name="Gaudi host mapping", on_close=device.on_close, size_bytes=view.nbytes
        )
        self._remove_mapped_range = device.add_mapped_range(
            MappedRange(MemoryKind.HOST, self.address, self.length_bytes, None)
        )

    def export_dmabuf(self) -> NoReturn:
        """Always raise, because host memory cannot be exported.

        Raises
        ------
        Unsupported
            DMABUF_EXPORT_UNSUPPORTED. The driver is not called, because it would return EINVAL, which does not explain
            the cause.
        """
        raise Unsupported(
            api=Api.HLTHUNK,
            operation="hlthunk_device_mapped_memory_export_dmabuf_fd",
            status=None,
            status_name="not called",
            arguments={"addr": self.address, "size": self.length_bytes},
            reason=Reason.DMABUF_EXPORT_UNSUPPORTED,
            what_to_do="allocate device memory, or register the host memory by its host address",
            detail="the memory is host memory that is mapped to the device, and the kernel exports only device memory",
        )

    def _release(self) -> None:
        self.device.copies.wait_for_pending_copy()
        if not self.device.lost:
            _hlthunk.call("hlthunk_memory_unmap", fd=self.device.fd, device_virt_addr=self.address)
        self._view = None
        self._remove_mapped_range()

    def __repr__(self) -> str:
        return f"HostMapping({'closed' if self.closed else f'{self.address:#x}'}, length_bytes={self.length_bytes})"
