"""Query of the memory at a device address: type, device, base, length and dma-buf, like UCX's ``mem_query``.

hl-thunk has no call for such a query. gdrkit knows the memory that it allocated or mapped itself. Other code of the
process may have allocated memory with the same descriptor of the device. To find such memory, gdrkit tries to export
ranges: the driver exports a range only if it is inside a mapping and the call names the first address of the mapping.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.buffers import DmabufRange, MemoryKind
from gdrkit.errors import ApiError, Reason, UsageError
from gdrkit.gaudi import _hlthunk
from gdrkit.handles import Closeable
from gdrkit.units import HOST_PAGE_BYTES, MIB, align_down, align_up

if TYPE_CHECKING:
    from gdrkit.gaudi.context import GaudiContext

__all__ = ["AddressInfo", "query"]

_EXPORT_FLAGS = os.O_RDWR | os.O_CLOEXEC  # The library accepts only these flags.
# A mapping begins at a multiple of this size, or of a smaller power of two that divides the device's default page.
_MAPPING_ALIGNMENT_BYTES = 2 * MIB
# Largest number of exports that gdrkit attempts in the search for the beginning of a mapping.
_EXPORT_ATTEMPTS_MAX = 8192


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
        A dma-buf of the whole memory, with the offset of the queried bytes in it. None if this memory cannot be
        exported. :meth:`close` closes the dma-buf, unless the caller has taken its descriptor with ``take()``.
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

    Memory that other code allocated is found under three conditions. It was allocated and mapped with the same
    descriptor of the device (:attr:`Device.fd`). The device is not a first-generation Gaudi. The range begins in the
    first 16 GiB of its mapping. The search exports pages for a moment, during which the driver refuses to unmap the
    memory.

    Raises
    ------
    UsageError
        NOT_DEVICE_MEMORY: no single allocation or mapping on this device contains the whole range. Host memory that
        other code has mapped is not found, because the driver does not export it.
    ApiError
        The driver cannot export the memory.
    """
    if length_bytes <= 0:
        message = f"length_bytes must be at least 1, not {length_bytes}"
        raise UsageError(message)
    for mapped_range in device.mapped_ranges():
        if mapped_range.base <= address and address + length_bytes <= mapped_range.base + mapped_range.length_bytes:
            dmabuf = (
                None if mapped_range.export is None else mapped_range.export(address - mapped_range.base, length_bytes)
            )
            return AddressInfo(
                kind=mapped_range.kind,
                device=device,
                base=mapped_range.base,
                length_bytes=mapped_range.length_bytes,
                dmabuf=dmabuf,
            )
    foreign_memory = _query_driver(device, address, length_bytes) if device.generation.maps_memory else None
    if foreign_memory is not None:
        return foreign_memory
    message = f"the {length_bytes} bytes at {address:#x} must be in one allocation or mapping of this device"
    raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY)


def _query_driver(device: GaudiContext, address: int, length_bytes: int) -> AddressInfo | None:
    """Return memory that other code allocated, or None if the driver exports no mapping that contains the range."""
    alignment_bytes = device.mapping_alignment_bytes(_MAPPING_ALIGNMENT_BYTES)
    highest_base = align_down(address, alignment_bytes=alignment_bytes)
    end_base = max(highest_base - _EXPORT_ATTEMPTS_MAX * alignment_bytes, 0)  # range() below excludes this address.
    # Try every address at which the mapping may begin, downwards from the address nearest to the range.
    for base_address in range(highest_base, end_base, -alignment_bytes):
        offset_bytes = align_down(address - base_address, alignment_bytes=HOST_PAGE_BYTES)
        end_offset = align_up(address - base_address + length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        if _can_export(device, base_address, offset_bytes, end_offset - offset_bytes):
            mapping_bytes = _count_mapping_bytes(
                device, base_address, align_up(end_offset, alignment_bytes=alignment_bytes), alignment_bytes
            )
            dmabuf = DmabufRange(
                _export(device, base_address, 0, mapping_bytes),
                offset_bytes=address - base_address,
                length_bytes=length_bytes,
                address=address,
            )
            return AddressInfo(
                kind=MemoryKind.GAUDI, device=device, base=base_address, length_bytes=mapping_bytes, dmabuf=dmabuf
            )
    return None


def _count_mapping_bytes(device: GaudiContext, base_address: int, mapping_bytes_min: int, unit_bytes: int) -> int:
    """Return the size of the mapping at `base_address`: a multiple of `unit_bytes`, at least `mapping_bytes_min`."""

    def has_page_before(end_offset: int) -> bool:
        """Return whether the mapping contains the page that ends at this offset."""
        return _can_export(device, base_address, end_offset - HOST_PAGE_BYTES, HOST_PAGE_BYTES)

    # Double the step until it leads beyond the end of the mapping, then search the end by bisection.
    step_bytes = unit_bytes
    while has_page_before(mapping_bytes_min + step_bytes):
        mapping_bytes_min, step_bytes = mapping_bytes_min + step_bytes, 2 * step_bytes
    # The mapping ends at or after `mapping_bytes_min`, and before `mapping_bytes_min + step_bytes`.
    while step_bytes > unit_bytes:
        step_bytes //= 2
        if has_page_before(mapping_bytes_min + step_bytes):
            mapping_bytes_min += step_bytes
    return mapping_bytes_min


def _can_export(device: GaudiContext, base_address: int, offset_bytes: int, length_bytes: int) -> bool:
    """Return whether `base_address` is the address of a mapping that contains this range of whole host pages."""
    try:
        fd = _export(device, base_address, offset_bytes, length_bytes)
    except ApiError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    os.close(fd)
    return True


def _export(device: GaudiContext, base_address: int, offset_bytes: int, length_bytes: int) -> int:
    return _hlthunk.call(
        "hlthunk_device_mapped_memory_export_dmabuf_fd",
        fd=device.fd,
        addr=base_address,
        size=length_bytes,
        offset=offset_bytes,
        flags=_EXPORT_FLAGS,
    )
