"""Gaudi devices.

Level 2. The kernel gives a device to one program at a time; what a device says about itself can be asked beside that.
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
    from gdrkit.gaudi.query import AddressFacts

__all__ = ["Device", "DeviceInfo", "Generation", "Piece", "device_count", "list_devices"]

_GOYA = 0x0001
# Boards of a generation differ in the last five bits; those before Gaudi 2 are all of the first.
_GAUDI2 = 0x1020
_BOARD = 0x1F


class Generation(enum.Enum):
    """Which ASIC; the PCI device ids are those of ``enum hl_pci_ids``."""

    GAUDI = "gaudi"
    GAUDI2 = "gaudi2"
    GAUDI3 = "gaudi3"
    LATER = "later"

    @classmethod
    def of(cls, pci_device_id: int) -> Generation:
        """The generation of a device id; one that is not known is later than those that are."""
        if pci_device_id < _GAUDI2:
            return cls.GAUDI
        return {_GAUDI2: cls.GAUDI2, 0x1060: cls.GAUDI3}.get(pci_device_id & ~_BOARD, cls.LATER)

    @property
    def maps_memory(self) -> bool:
        """Whether the driver allocates and maps device memory. That of the first Gaudi is named by physical addresses,
        and shared out by the program.
        """
        return self is not Generation.GAUDI


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device says about itself, whoever has it.

    Attributes
    ----------
    number : int
        That of ``/dev/accel/accelN``.
    pci_bus_id : str
        ``0000:33:00.0``.
    module_id : int
        The place on the board (OCP).
    pci_device_id : int
        Which ASIC.
    card_name : str
        As the firmware has it.
    memory_bytes : int
        Device memory for programs.
    page_bytes : int
        By which the driver rounds an allocation up.
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
        """Which one."""
        return Generation.of(self.pci_device_id)


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory with an address of a device, which :meth:`Device.query` knows.

    Attributes
    ----------
    export : callable or None
        From offset and length to a range of a dma-buf over the whole piece; None: there is none of this memory.
    """

    kind: MemoryKind
    base: int
    length_bytes: int
    export: Callable[[int, int], DmabufRange] | None


def device_count() -> int:
    """How many devices there are.

    Raises
    ------
    SetupMissing
        There is no hl-thunk that can be used.
    """
    return _hlthunk.count()


def list_devices() -> tuple[DeviceInfo, ...]:
    """All of them, by their control devices: also those that another program has."""
    return tuple(_ask(number) for number in range(device_count()))


class Device:
    """One open device: by its number, its PCI bus id or its module id.

    :meth:`close` closes what was made from it first, last made first.

    Parameters
    ----------
    number : int or None
        That of ``/dev/accel/accelN``.
    pci_bus_id : str or None
        ``0000:33:00.0``.
    module_id : int or None
        The place on the board.

    Raises
    ------
    ApiError
        EBUSY: another program has it. EINVAL: no device has that bus id.
    UsageError
        NO_DEVICE: no such number or module. BAD_ARGUMENT: not exactly one of the three.
    Unsupported
        It is no Gaudi.
    SetupMissing
        There is no hl-thunk that can be used.
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
        self._pieces: dict[int, Piece] = {}
        self._closed = False
        self._handle = Handle("gaudi.device")

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def fd(self) -> int:
        """The descriptor, for other uses of hl-thunk; still owned by the device."""
        if self._closed:
            what = f"Gaudi device {self.pci_bus_id}"
            raise ClosedResource(what)
        return self._fd

    @property
    def copies(self) -> Copies:
        """Its own copies, between its memory and the host's."""
        _ = self.fd
        return self._copies

    @property
    def lost(self) -> bool:
        """Whether it failed a copy: then its driver resets it, and takes everything back by itself."""
        return self._copies.lost

    @property
    def physical(self) -> FirstFit:
        """Of a first Gaudi: the memory that nobody has taken yet."""
        if self._physical is None:
            base, length_bytes = self._info.dram_base_address, self._info.dram_size
            self._physical = FirstFit(base, length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        return self._physical

    def allocate(self, length_bytes: int) -> DeviceMemory:
        """New device memory, mapped; see :class:`gdrkit.gaudi.DeviceMemory`."""
        from gdrkit.gaudi.memory import DeviceMemory

        return DeviceMemory(self, length_bytes)

    def pool(self, length_bytes: int) -> MemoryPool:
        """New device memory to be shared out, under one dma-buf; see :class:`gdrkit.gaudi.MemoryPool`."""
        from gdrkit.gaudi.pool import MemoryPool

        return MemoryPool(self, length_bytes)

    def map_host(self, buffer: bytearray | mmap.mmap | memoryview) -> HostMapping:
        """Let the device reach host memory; see :class:`gdrkit.gaudi.HostMapping`."""
        from gdrkit.gaudi.host_mapping import HostMapping

        return HostMapping(self, buffer)

    def query(self, address: int, *, length_bytes: int = 1) -> AddressFacts:
        """What is at a device address; see :func:`gdrkit.gaudi.query.query`."""
        from gdrkit.gaudi.query import query

        return query(self, address, length_bytes=length_bytes)

    def adopt(self, close: Callable[[], None]) -> Callable[[], None]:
        """Have `close` called before the device is closed; returns what takes it back."""
        return self._children.push(close)

    def pieces(self) -> tuple[Piece, ...]:
        """All memory that :meth:`query` knows."""
        return tuple(self._pieces.copy().values())

    def enter(self, piece: Piece) -> Callable[[], None]:
        """Let :meth:`query` know a piece of memory; returns what takes it back."""
        self._pieces[piece.base] = piece

        def forget() -> None:
            self._pieces.pop(piece.base, None)

        return forget

    def close(self) -> None:
        """Close what was made from this device, last made first, then the device; a second close does nothing.

        A dma-buf that is alive somewhere keeps the device busy until it goes.

        Raises
        ------
        ApiError
            Of the first child that could not be closed. The device stays open and may be closed again.
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
