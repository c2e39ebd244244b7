"""One Gaudi device, which allocates memory and creates pools and host mappings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.gaudi.context import GaudiContext
from gdrkit.gaudi.host_mapping import HostMapping
from gdrkit.gaudi.memory import DeviceMemory
from gdrkit.gaudi.pool import DmabufPool
from gdrkit.gaudi.query import AddressInfo, query

if TYPE_CHECKING:
    import mmap

__all__ = ["Device"]


class Device(GaudiContext):
    """One open device, selected by its number, its PCI address or its module id.

    :meth:`close` first closes the objects that were created from the device, newest first.

    Parameters
    ----------
    number : int or None
        Number N of ``/dev/accel/accelN``.
    pci_bus_id : str or None
        The PCI address, such as ``0000:33:00.0``.
    module_id : int or None
        Position of the module on its OCP board.

    Raises
    ------
    ApiError
        EBUSY: another program has the device open. EINVAL: no device has that PCI address.
    UsageError
        NO_DEVICE: no device has this number or module id. BAD_ARGUMENT: not exactly one of the parameters is given.
    Unsupported
        The device is not a Gaudi.
    SetupMissing
        hl-thunk is missing or cannot be used.
    """

    def allocate(self, length_bytes: int) -> DeviceMemory:
        """Allocate and map device memory; see :class:`gdrkit.gaudi.DeviceMemory`."""
        return DeviceMemory(self, length_bytes)

    def pool(self, length_bytes: int) -> DmabufPool:
        """Create a memory pool with one dma-buf; see :class:`gdrkit.gaudi.DmabufPool`."""
        return DmabufPool(self, length_bytes)

    def map_host(self, buffer: bytearray | mmap.mmap | memoryview) -> HostMapping:
        """Map host memory to the device; see :class:`gdrkit.gaudi.HostMapping`."""
        return HostMapping(self, buffer)

    def query(self, address: int, *, length_bytes: int = 1) -> AddressInfo:
        """Return the memory at a device address; see :func:`gdrkit.gaudi.query.query`."""
        return query(self, address, length_bytes=length_bytes)
