"""What is at a device address, as UCX's ``mem_query`` answers it: type, device, base, length and dma-buf.

Level 2. hl-thunk has no call for this, so the answer is about what gdrkit itself allocated or mapped on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.buffers import DmabufRange, MemoryKind
    from gdrkit.gaudi.device import Device

__all__ = ["AddressFacts", "query"]


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """The answer; closing it closes the dma-buf.

    Attributes
    ----------
    kind : MemoryKind
        Memory of the device, or host memory that it has mapped.
    device : Device
        Whose address it is.
    base, length_bytes : int
        The whole piece of memory that holds the address: an allocation, or a mapping.
    dmabuf : DmabufRange or None
        The bytes that were asked about, in a dma-buf of the base; None: there is none of this memory. Owned by the
        answer, unless its ``take()`` was called.
    """

    kind: MemoryKind
    device: Device
    base: int
    length_bytes: int
    dmabuf: DmabufRange | None

    def close(self) -> None:
        """Close the dma-buf; a second close does nothing."""
        if self.dmabuf is not None:
            self.dmabuf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def query(device: Device, address: int, *, length_bytes: int = 1) -> AddressFacts:
    """Ask about ``[address, address + length)``.

    Raises
    ------
    UsageError
        NOT_DEVICE_MEMORY: nothing that gdrkit allocated or mapped on this device holds all of it.
    ApiError
        The driver does not export the memory.
    """
    if length_bytes <= 0:
        message = f"{length_bytes} bytes are nothing to ask about"
        raise UsageError(message)
    for piece in device.pieces():
        if piece.base <= address and address + length_bytes <= piece.base + piece.length_bytes:
            dmabuf = None if piece.export is None else piece.export(address - piece.base, length_bytes)
            return AddressFacts(
                kind=piece.kind, device=device, base=piece.base, length_bytes=piece.length_bytes, dmabuf=dmabuf
            )
    message = f"{length_bytes} bytes at {address:#x} are not in one piece of memory of this device"
    raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY)
