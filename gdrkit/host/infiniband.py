"""RDMA devices of the kernel, as sysfs shows them.

:mod:`gdrkit.verbs` lists the devices that a program can open. They may differ from the devices of the kernel, because
the program may use another libibverbs than the system's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["PortFacts", "RdmaDevice", "rdma_devices"]

_RDMA_DEVICES_FOLDER = "/sys/class/infiniband"


@dataclass(frozen=True, slots=True)
class PortFacts:
    """One port of an RDMA device.

    Attributes
    ----------
    number : int
        Port number of verbs, from 1.
    state, physical_state : str or None
        Names of the states, without the numbers that sysfs shows before them, e.g. ``ACTIVE`` and ``LinkUp``.
    rate : str or None
        Signalling rate, e.g. ``400 Gb/sec (4X NDR)``.
    link_layer : str or None
        ``InfiniBand`` or ``Ethernet``.
    lid : int or None
        Local identifier on InfiniBand, from 1. It is 0 if no subnet manager has assigned one, and on Ethernet.
    """

    number: int
    state: str | None
    physical_state: str | None
    rate: str | None
    link_layer: str | None
    lid: int | None = None


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One device below /sys/class/infiniband.

    Attributes
    ----------
    name : str
        Device name, e.g. ``mlx5_0``.
    driver : str or None
        ``rxe`` or ``siw`` for a software device of the kernel, otherwise the driver of the bus device (such as a PCI
        function) to which the RDMA device belongs; None if it is unknown.
    has_device : bool
        Whether sysfs shows a bus device for the RDMA device. False: the RDMA device is a software device of the kernel.
        True: it is hardware, or a software device that uses a network interface with a bus device.
    node_guid : str or None
        Node GUID, e.g. ``b83f:d203:00a1:7c52``.
    firmware : str or None
        Firmware version.
    pci_address : str or None
        Address of the PCI function; None if sysfs shows no bus device.
    numa_node : int or None
        The nearest NUMA node; None if it is unknown.
    ports : tuple of PortFacts
        The ports, by number.
    """

    name: str
    driver: str | None
    has_device: bool
    node_guid: str | None
    firmware: str | None
    pci_address: str | None
    numa_node: int | None
    ports: tuple[PortFacts, ...]


def rdma_devices(tree: HostTree) -> tuple[RdmaDevice, ...]:
    """Return every RDMA device of the kernel, by name."""
    return tuple(_read_device(tree, name) for name in tree.names(_RDMA_DEVICES_FOLDER))


def _read_device(tree: HostTree, name: str) -> RdmaDevice:
    folder = f"{_RDMA_DEVICES_FOLDER}/{name}"
    has_device = tree.exists(f"{folder}/device")
    port_numbers = sorted(int(port_name) for port_name in tree.names(f"{folder}/ports") if port_name.isdecimal())
    numa_node = tree.number(f"{folder}/device/numa_node")
    return RdmaDevice(
        name=name,
        driver=_find_software_driver(tree, folder) or tree.link_name(f"{folder}/device/driver"),
        has_device=has_device,
        node_guid=tree.text(f"{folder}/node_guid"),
        firmware=tree.text(f"{folder}/fw_ver"),
        pci_address=tree.link_name(f"{folder}/device") if has_device else None,
        numa_node=None if numa_node is None or numa_node < 0 else numa_node,
        ports=tuple(_read_port(tree, f"{folder}/ports/{port_number}", port_number) for port_number in port_numbers),
    )


def _find_software_driver(tree: HostTree, folder: str) -> str | None:
    # The driver link of rxe and siw does not distinguish them from hardware, because it is the link of the network
    # interface that they use. rxe has a file `parent` in sysfs. The node description of both begins with their name. A
    # user can change the description, but no hardware driver sets it to these names.
    description = tree.text(f"{folder}/node_desc") or ""
    if description.startswith("rxe") or tree.exists(f"{folder}/parent"):
        return "rxe"
    return "siw" if description.startswith(("siw", "Software iWARP")) else None


def _read_port(tree: HostTree, folder: str, port_number: int) -> PortFacts:
    return PortFacts(
        number=port_number,
        state=_read_enum_name(tree.text(f"{folder}/state")),
        physical_state=_read_enum_name(tree.text(f"{folder}/phys_state")),
        rate=tree.text(f"{folder}/rate"),
        link_layer=tree.text(f"{folder}/link_layer"),
        lid=tree.number(f"{folder}/lid", base=0),
    )


def _read_enum_name(text: str | None) -> str | None:
    # "4: ACTIVE" is the value and the name of the enum.
    return None if text is None else text.partition(":")[2].strip() or text
