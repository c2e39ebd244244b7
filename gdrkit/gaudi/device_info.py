"""Properties of Gaudi devices, which can also be read while another program has the device open."""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass

from gdrkit.errors import Api, Reason, Unsupported, UsageError
from gdrkit.gaudi import _hlthunk

__all__ = ["DeviceInfo", "Generation", "bus_id_of", "device_count", "list_devices", "require_gaudi"]

# PCI device ids of enum hl_pci_ids. The ids of one generation differ only in the last five bits, which identify the
# board. All ids below the id of Gaudi 2 are Gaudi 1, except Goya.
_GOYA_ID = 0x0001
_GAUDI2_ID = 0x1020
_GAUDI3_ID = 0x1060
_BOARD_BITS = 0x1F


class Generation(enum.Enum):
    """The generation of the ASIC."""

    GAUDI = "gaudi"
    GAUDI2 = "gaudi2"
    GAUDI3 = "gaudi3"
    LATER = "later"

    @classmethod
    def of(cls, pci_device_id: int) -> Generation:
        """Return the generation of a PCI device id. It is `LATER` for an unknown id above the first id of Gaudi 2."""
        if pci_device_id < _GAUDI2_ID:
            return cls.GAUDI
        return {_GAUDI2_ID: cls.GAUDI2, _GAUDI3_ID: cls.GAUDI3}.get(pci_device_id & ~_BOARD_BITS, cls.LATER)

    @property
    def maps_memory(self) -> bool:
        """Whether the driver allocates and maps device memory.

        Gaudi 1 memory is addressed physically, and the program itself has to allocate it.
        """
        return self is not Generation.GAUDI


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a device. They can be read even while another program has the device open.

    Attributes
    ----------
    number : int
        Number N of ``/dev/accel/accelN``.
    pci_bus_id : str
        The PCI address, such as ``0000:33:00.0``.
    module_id : int
        Position of the module on its OCP board.
    pci_device_id : int
        The PCI device id, which identifies the ASIC.
    card_name : str
        The name that the firmware reports.
    memory_bytes : int
        Size of the device memory that programs can use, in bytes.
    page_bytes : int
        Size of the pages to which the driver rounds up an allocation, in bytes.
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


def device_count() -> int:
    """Return the number of devices.

    Raises
    ------
    SetupMissing
        hl-thunk is missing or cannot be used.
    """
    return _hlthunk.device_count()


def list_devices() -> tuple[DeviceInfo, ...]:
    """Return all devices, also those that another program has open, because the query uses their control devices."""
    return tuple(_query_device(number) for number in range(device_count()))


def _query_device(number: int) -> DeviceInfo:
    fd = _hlthunk.call("hlthunk_open_control", dev_id=number, busid=None)
    with contextlib.ExitStack() as stack:
        stack.callback(_hlthunk.close, fd)
        hardware_info = _hlthunk.hardware_info(fd)
        return DeviceInfo(
            number=number,
            pci_bus_id=_hlthunk.pci_bus_id(fd),
            module_id=hardware_info.module_id,
            pci_device_id=hardware_info.device_id,
            card_name=hardware_info.card_name,
            memory_bytes=hardware_info.dram_size,
            page_bytes=hardware_info.default_page_size or hardware_info.dram_page_size,
        )


def bus_id_of(number: int | None, module_id: int | None) -> str:
    """Return the PCI address of the device with this number or this module id. One of the two arguments is None.

    Raises
    ------
    UsageError
        NO_DEVICE: there is no such device.
    """
    for device_info in list_devices():
        if device_info.number == number or device_info.module_id == module_id:
            return device_info.pci_bus_id
    message = (
        f"there is no Gaudi device number {number}"
        if module_id is None
        else f"there is no Gaudi with the module id {module_id}"
    )
    raise UsageError(message, reason=Reason.NO_DEVICE, what_to_do="choose one of gdrkit.gaudi.list_devices()")


def require_gaudi(pci_device_id: int) -> None:
    """Raise :class:`Unsupported` if the device is a Goya, which exports no dma-buf."""
    if pci_device_id == _GOYA_ID:
        raise Unsupported(
            api=Api.HLTHUNK,
            operation="hlthunk_get_hw_ip_info",
            status=pci_device_id,
            status_name="PCI_IDS_GOYA",
            reason=Reason.NOT_SUPPORTED,
            what_to_do="use a Gaudi",
            detail="a Goya exports no dma-buf",
        )
