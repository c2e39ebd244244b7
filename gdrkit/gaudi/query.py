"""Query of the memory at a device address: type, device, base, length and dma-buf, like UCX's ``mem_query``.

hl-thunk has no call for this. The query only finds memory that gdrkit itself allocated or mapped on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import Reason, UsageError
from gdrkit.handles import Closeable

if TYPE_CHECKING:
    from gdrkit.buffers import DmabufRange, MemoryKind
    from gdrkit.gaudi.context import GaudiContext

__all__ = ["AddressInfo", "query"]


@dataclass(frozen=True, slots=True)
class AddressInfo(Closeable):
    """The result of a query. Closing it closes the dma-buf.

    Attributes
    ----------
    kind : MemoryKind
        Whether the memory is device memory, or host memory that is mapped to the device.
    device : GaudiContext
        The device of the address.
    base, length_bytes : int
        Address and size in bytes of the whole allocation or mapping that contains the queried range.
    dmabuf : DmabufRange or None
        The queried bytes, in a dma-buf over the whole memory. None if this memory cannot be exported. :meth:`close`
        closes the dma-buf, unless the caller has taken its descriptor with ``take()``.
    """

    kind: MemoryKind
    device: GaudiContext
    base: int
    length_bytes: int
    dmabuf: DmabufRange | None

    def close(self) -> None:
        """Close the dma-buf. A second close does nothing."""
        if self.dmabuf is not None:
            self.dmabuf.close()


def query(device: GaudiContext, address: int, *, length_bytes: int = 1) -> AddressInfo:
    """Return the memory at ``[address, address + length_bytes)``.

    Raises
    ------
    UsageError
        NOT_DEVICE_MEMORY: no single allocation or mapping of gdrkit on this device contains the whole range.
    ApiError
        The driver cannot export the memory.
    """
    if length_bytes <= 0:
        message = f"length_bytes must be at least 1, not {length_bytes}"
        raise UsageError(message)
    for mapped in device.mapped_ranges():
        if mapped.base <= address and address + length_bytes <= mapped.base + mapped.length_bytes:
            dmabuf = None if mapped.export is None else mapped.export(address - mapped.base, length_bytes)
            return AddressInfo(
                kind=mapped.kind, device=device, base=mapped.base, length_bytes=mapped.length_bytes, dmabuf=dmabuf
            )
    message = f"the {length_bytes} bytes at {address:#x} must be in one allocation or mapping of this device"
    raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY)
