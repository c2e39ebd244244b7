"""Gaudi devices.

The kernel allows one program at a time to open a device. Its properties can also be read while another program has it.
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ClosedResource, Reason, Unsupported, UsageError
from gdrkit.gaudi import _hlthunk
from gdrkit.gaudi._copies import Copies
from gdrkit.gaudi._ranges import FirstFit
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.buffers import DmabufRange, MemoryKind
    from gdrkit.gaudi.host_mapping import HostMapping
    from gdrkit.gaudi.memory import DeviceMemory
    from gdrkit.gaudi.pool import MemoryPool
    from gdrkit.gaudi.query import AddressInfo

__all__ = ["Device", "DeviceInfo", "Generation", "MappedRange", "device_count", "list_devices"]

_GOYA = 0x0001
# Device ids of one generation differ in the last five bits. All ids below that of Gaudi 2 are Gaudi 1.
_GAUDI2 = 0x1020
_BOARD = 0x1F


class Generation(enum.Enum):
    """The generation of the ASIC. The PCI device ids are those of ``enum hl_pci_ids``."""

    GAUDI = "gaudi"
    GAUDI2 = "gaudi2"
    GAUDI3 = "gaudi3"
    LATER = "later"

    @classmethod
    def of(cls, pci_device_id: int) -> Generation:
        """Return the generation of a PCI device id. An unknown id counts as later than the known ones."""
        if pci_device_id < _GAUDI2:
            return cls.GAUDI
        return {_GAUDI2: cls.GAUDI2, 0x1060: cls.GAUDI3}.get(pci_device_id & ~_BOARD, cls.LATER)

    @property
    def maps_memory(self) -> bool:
        """Whether the driver allocates and maps device memory.

        Gaudi 1 memory is addressed physically, and the program itself has to allocate it.
        """
        return self is not Generation.GAUDI


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a device, which can be read even if another program has it.

    Attributes
    ----------
    number : int
        Number N of ``/dev/accel/accelN``.
    pci_bus_id : str
        The PCI address, such as ``0000:33:00.0``.
    module_id : int
        The position on the board (OCP).
    pci_device_id : int
        The PCI device id, which identifies the ASIC.
    card_name : str
        The name that the firmware reports.
    memory_bytes : int
        Size of the device memory for programs, in bytes.
    page_bytes : int
        Granularity to which the driver rounds up an allocation, in bytes.
    """

    number: int
    pci_bus_id: str
    module_id: int
    pci_device_id: int
    card_name: str
    memory_bytes: int
    page_bytes: int

    @property
    def generation(self) -> Generation:
        """The generation of the ASIC."""
        return Generation.of(self.pci_device_id)


@dataclass(frozen=True, slots=True)
class MappedRange:
    """Memory with a device address, which :meth:`Device.query` can find.

    Attributes
    ----------
    export : callable or None
        A function of offset and length that returns a range of a dma-buf over the whole memory. None if this memory
        cannot be exported.
    """

    kind: MemoryKind
    base: int
    length_bytes: int
    export: Callable[[int, int], DmabufRange] | None


def device_count() -> int:
    """Return the number of devices.

    Raises
    ------
    SetupMissing
        hl-thunk is missing or cannot be used.
    """
    return _hlthunk.count()


def list_devices() -> tuple[DeviceInfo, ...]:
    """Return all devices, also those that another program has. They are queried through their control devices."""
    return tuple(_ask(number) for number in range(device_count()))


class Device:
    """One open device, selected by its number, its PCI address or its module id.

    :meth:`close` first closes everything that was made from the device, in the reverse order.

    Parameters
    ----------
    number : int or None
        Number N of ``/dev/accel/accelN``.
    pci_bus_id : str or None
        The PCI address, such as ``0000:33:00.0``.
    module_id : int or None
        The position on the board.

    Raises
    ------
    ApiError
        EBUSY: another program has the device. EINVAL: no device has that PCI address.
    UsageError
        NO_DEVICE: there is no such number or module id. BAD_ARGUMENT: not exactly one of the three is given.
    Unsupported
        The device is not a Gaudi.
    SetupMissing
        hl-thunk is missing or cannot be used.
    """

    def __init__(
        self, number: int | None = None, *, pci_bus_id: str | None = None, module_id: int | None = None
    ) -> None:
        if [number, pci_bus_id, module_id].count(None) != 2:  # noqa: PLR2004 - one of three.
            message = "a device is opened by its number, its PCI bus id or its module id"
            raise UsageError(message)
        bus_id = _bus_id_of(number, module_id) if pci_bus_id is None else pci_bus_id
        self._fd = _hlthunk.call("hlthunk_open", device_name=_hlthunk.DONT_CARE, busid=bus_id.encode())
        undo = ReleaseStack()
        undo.push(lambda: _hlthunk.close(self._fd))
        try:
            self.pci_bus_id = _hlthunk.pci_bus_id(self._fd)
            self._info = _hlthunk.hardware_info(self._fd)
            _require_gaudi(self._info.device_id)
        except BaseException as error:
            undo.run_after(error)
            raise
        self.module_id = self._info.module_id
        self.generation = Generation.of(self._info.device_id)
        self._children = ReleaseStack()
        self._copies = Copies(self._fd, is_gaudi1=not self.generation.maps_memory)
        self._physical: FirstFit | None = None
        self._mapped_ranges: dict[int, MappedRange] = {}
        self._closed = False
        self._handle = Handle("gaudi.device")

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._closed

    @property
    def fd(self) -> int:
        """The file descriptor, for other calls of hl-thunk. The device still owns it."""
        if self._closed:
            what = f"Gaudi device {self.pci_bus_id}"
            raise ClosedResource(what)
        return self._fd

    @property
    def copies(self) -> Copies:
        """The copies between the memory of this device and the host."""
        _ = self.fd
        return self._copies

    @property
    def lost(self) -> bool:
        """Whether the device failed a copy. Then its driver resets it and frees everything itself."""
        return self._copies.lost

    @property
    def physical(self) -> FirstFit:
        """The free physical memory of a Gaudi 1."""
        if self._physical is None:
            base, length_bytes = self._info.dram_base_address, self._info.dram_size
            self._physical = FirstFit(base, length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        return self._physical

    def allocate(self, length_bytes: int) -> DeviceMemory:
        """Allocate and map device memory; see :class:`gdrkit.gaudi.DeviceMemory`."""
        from gdrkit.gaudi.memory import DeviceMemory

        return DeviceMemory(self, length_bytes)

    def pool(self, length_bytes: int) -> MemoryPool:
        """Create a memory pool with one dma-buf; see :class:`gdrkit.gaudi.MemoryPool`."""
        from gdrkit.gaudi.pool import MemoryPool

        return MemoryPool(self, length_bytes)

    def map_host(self, buffer: bytearray | mmap.mmap | memoryview) -> HostMapping:
        """Map host memory to the device; see :class:`gdrkit.gaudi.HostMapping`."""
        from gdrkit.gaudi.host_mapping import HostMapping

        return HostMapping(self, buffer)

    def query(self, address: int, *, length_bytes: int = 1) -> AddressInfo:
        """Return the memory at a device address; see :func:`gdrkit.gaudi.query.query`."""
        from gdrkit.gaudi.query import query

        return query(self, address, length_bytes=length_bytes)

    def on_close(self, close: Callable[[], None]) -> Callable[[], None]:
        """Call `close` before the device is closed. Return a function that cancels this."""
        return self._children.push(close)

    def mapped_ranges(self) -> tuple[MappedRange, ...]:
        """Return all memory that :meth:`query` can find."""
        return tuple(self._mapped_ranges.copy().values())

    def add_mapped(self, mapped: MappedRange) -> Callable[[], None]:
        """Add memory that :meth:`query` can find. Return a function that removes it."""
        self._mapped_ranges[mapped.base] = mapped

        def forget() -> None:
            self._mapped_ranges.pop(mapped.base, None)

        return forget

    def close(self) -> None:
        """Close everything that was made from this device, in the reverse order, then the device.

        A second close does nothing. An open dma-buf in any process keeps the device busy until it is closed.

        Raises
        ------
        ApiError
            Some objects could not be closed (the error of the first one). The device stays open and can be closed
            again.
        """
        if self._closed:
            return
        self._children.run()
        self._copies.close()
        _hlthunk.close(self._fd)
        self._closed = True
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Device({self.pci_bus_id}, {self.generation.value}{', closed' if self._closed else ''})"


def _ask(number: int) -> DeviceInfo:
    fd = _hlthunk.call("hlthunk_open_control", dev_id=number, busid=None)
    with contextlib.ExitStack() as stack:
        stack.callback(_hlthunk.close, fd)
        info = _hlthunk.hardware_info(fd)
        return DeviceInfo(
            number=number,
            pci_bus_id=_hlthunk.pci_bus_id(fd),
            module_id=info.module_id,
            pci_device_id=info.device_id,
            card_name=info.card_name,
            memory_bytes=info.dram_size,
            page_bytes=info.default_page_size or info.dram_page_size,
        )


def _bus_id_of(number: int | None, module_id: int | None) -> str:
    for info in list_devices():
        if info.number == number or info.module_id == module_id:
            return info.pci_bus_id
    what = f"no Gaudi with the number {number}" if module_id is None else f"no Gaudi with the module id {module_id}"
    raise UsageError(what, reason=Reason.NO_DEVICE, what_to_do="gdrkit.gaudi.list_devices() says which there are")


def _require_gaudi(pci_device_id: int) -> None:
    if pci_device_id == _GOYA:
        raise Unsupported(
            api=Api.HLTHUNK,
            operation="hlthunk_get_hw_ip_info",
            status=pci_device_id,
            status_name="PCI_IDS_GOYA",
            reason=Reason.NOT_SUPPORTED,
            what_to_do="use a Gaudi",
            detail="a Goya exports no dma-buf",
        )
