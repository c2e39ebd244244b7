"""The base class of an open Gaudi device: its descriptor, its copies, and the memory with a device address.

The kernel allows one program at a time to open a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import ClosedResource, UsageError
from gdrkit.gaudi import _hlthunk
from gdrkit.gaudi._copies import Copies
from gdrkit.gaudi._ranges import FirstFit
from gdrkit.gaudi.device_info import Generation, bus_id_of, require_gaudi
from gdrkit.handles import Closeable, Handle, ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.buffers import DmabufRange, MemoryKind

__all__ = ["GaudiContext", "MappedRange"]


@dataclass(frozen=True, slots=True)
class MappedRange:
    """Memory with a device address, which :meth:`Device.query` can find.

    Attributes
    ----------
    base : int
        Device address of the first byte.
    export : callable or None
        A function that exports the whole memory as a dma-buf, or None if the memory cannot be exported. Its arguments
        are the offset and the length of a part of the memory, in bytes. The returned DmabufRange describes where this
        part is in the dma-buf.
    """

    kind: MemoryKind
    base: int
    length_bytes: int
    export: Callable[[int, int], DmabufRange] | None


class GaudiContext(Closeable):
    """An open device with the objects that were created from it; the base of :class:`~gdrkit.gaudi.Device`.

    See :class:`~gdrkit.gaudi.Device` for the parameters and errors.
    """

    def __init__(
        self, number: int | None = None, *, pci_bus_id: str | None = None, module_id: int | None = None
    ) -> None:
        if [number, pci_bus_id, module_id].count(None) != 2:  # noqa: PLR2004 - two of the three are None.
            message = "exactly one of number, pci_bus_id and module_id must be given"
            raise UsageError(message)
        bus_id = bus_id_of(number, module_id) if pci_bus_id is None else pci_bus_id
        self._fd = _hlthunk.call("hlthunk_open", device_name=_hlthunk.ANY_DEVICE_NAME, busid=bus_id.encode())
        release_stack = ReleaseStack()
        release_stack.push(lambda: _hlthunk.close(self._fd))
        try:
            self.pci_bus_id = _hlthunk.pci_bus_id(self._fd)
            self._hardware_info = _hlthunk.hardware_info(self._fd)
            require_gaudi(self._hardware_info.device_id)
        except BaseException as error:
            release_stack.run_after(error)
            raise
        self.module_id = self._hardware_info.module_id
        self.generation = Generation.of(self._hardware_info.device_id)
        self._release_actions = ReleaseStack()
        self._copies = Copies(self._fd, is_gaudi1=not self.generation.maps_memory)
        self._physical_allocator: FirstFit | None = None
        self._mapped_ranges: dict[int, MappedRange] = {}
        self._is_closed = False
        self._handle = Handle("gaudi.device")

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._is_closed

    @property
    def fd(self) -> int:
        """The file descriptor, for other calls of hl-thunk. The caller must not close it."""
        if self._is_closed:
            resource = f"Gaudi device {self.pci_bus_id}"
            raise ClosedResource(resource)
        return self._fd

    @property
    def page_bytes(self) -> int:
        """Size in bytes of the pages in which the driver maps device memory by default, at least a host page."""
        return max(self._hardware_info.default_page_size or self._hardware_info.dram_page_size, HOST_PAGE_BYTES)

    def mapping_alignment_bytes(self, alignment_bytes_max: int) -> int:
        """Return the largest power of two that divides the default page size of device memory.

        The result is at most `alignment_bytes_max`.
        The page size of a Gaudi 2 is not a power of two, because the device has six stacks of memory.
        """
        # x & -x is the largest power of two that divides x.
        return min(self.page_bytes & -self.page_bytes, alignment_bytes_max)

    @property
    def copies(self) -> Copies:
        """The copies between the memory of this device and the host."""
        _ = self.fd  # This raises ClosedResource if the device was closed.
        return self._copies

    @property
    def lost(self) -> bool:
        """Whether the device failed a copy. The driver then resets the device and frees all its memory."""
        return self._copies.is_device_lost

    @property
    def physical_allocator(self) -> FirstFit:
        """The allocator of the physical memory of a Gaudi 1, whose driver does not allocate memory."""
        if self._physical_allocator is None:
            base_address, length_bytes = self._hardware_info.dram_base_address, self._hardware_info.dram_size
            self._physical_allocator = FirstFit(base_address, length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        return self._physical_allocator

    def on_close(self, close: Callable[[], None]) -> Callable[[], None]:
        """Register `close` to be called before the device is closed, and return a function that cancels the call."""
        return self._release_actions.push(close)

    def mapped_ranges(self) -> tuple[MappedRange, ...]:
        """Return the memory that gdrkit itself has allocated or mapped on this device, for :meth:`Device.query`."""
        return tuple(self._mapped_ranges.copy().values())

    def add_mapped_range(self, mapped_range: MappedRange) -> Callable[[], None]:
        """Add memory to :meth:`mapped_ranges`. Return a function that removes it."""
        self._mapped_ranges[mapped_range.base] = mapped_range

        def remove() -> None:
            self._mapped_ranges.pop(mapped_range.base, None)

        return remove

    def close(self) -> None:
        """Close the objects that were created from this device, newest first, and then the device.

        A second close does nothing. The device stays busy while any process has a dma-buf of its memory open.

        Raises
        ------
        ApiError
            An object could not be closed; if several fail, the first error is raised. The device stays open,
            and close can be called again.
        """
        if self._is_closed:
            return
        self._release_actions.run()
        self._copies.close()
        _hlthunk.close(self._fd)
        self._is_closed = True
        self._handle.release()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.pci_bus_id}, {self.generation.value}{', closed' if self._is_closed else ''})"
        )
