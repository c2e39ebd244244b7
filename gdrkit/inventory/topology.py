"""Where GPUs, NICs and NVMe controllers sit: memory nodes, host bridges, switches, and how far any two are apart.

Level 4.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import host, plain
from gdrkit.host import Distance

if TYPE_CHECKING:
    from gdrkit.host import PciDevice
    from gdrkit.inventory.machine import Machine

__all__ = ["Place", "Topology", "topology"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Place:
    """One device that bytes begin or end in.

    Attributes
    ----------
    name : str
        ``GPU0``, ``mlx5_0``, ``nvme0``; an address where it has no name.
    kind : str
        ``gpu``, ``nic`` or ``nvme``.
    address : str
        Its PCI function.
    numa_node : int or None
        The memory node next to it.
    path : tuple of str
        Host bridge and bridges above it, from the top.
    link : str
        The PCIe link as trained; empty where nobody says.
    """

    name: str
    kind: str
    address: str
    numa_node: int | None
    path: tuple[str, ...]
    link: str


@dataclass(frozen=True, slots=True)
class Topology:
    """The places of a host.

    Attributes
    ----------
    places : tuple of Place
        GPUs, NICs, NVMe controllers, by address.
    distances : mapping
        By the names of two places, ``PIX`` to ``SYS``, each pair both ways.
    bridges : mapping
        For each bridge that is a port of a switch or a root port, what it is.
    virtual_machine : str or None
        Where it shows that this is one: then the tree need not be that of the hardware.
    """

    schema_version: int
    places: tuple[Place, ...]
    distances: dict[str, dict[str, str]]
    bridges: dict[str, str]
    virtual_machine: str | None

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(plain.to_plain(self), indent=2, ensure_ascii=False) + "\n"

    def distance(self, one: str, other: str) -> Distance:
        """Between two places, by their names."""
        return Distance[self.distances[one][other]]


def topology(machine: Machine) -> Topology:
    """Find it."""
    tree = host.HostTree.of(machine.files)
    places = tuple(_places(machine, tree))
    ends = {place.address for place in places}
    known = {one.address: one for one in machine.functions}
    above = dict.fromkeys(part for place in places for part in place.path[1:] if part not in ends)
    return Topology(
        schema_version=SCHEMA_VERSION,
        places=places,
        distances={
            one.name: {
                other.name: host.pci_distance(tree, one.address, other.address).name
                for other in places
                if other.name != one.name
            }
            for one in places
        },
        bridges={address: _bridge_words(known[address]) for address in above if address in known},
        virtual_machine=machine.facts.virtual_machine,
    )


def _places(machine: Machine, tree: host.HostTree) -> list[Place]:
    found: list[Place] = []
    cuda = {
        device.pci_bus_id.lower(): device.index for device in (machine.facts.cuda.devices if machine.facts.cuda else ())
    }
    gpus = [one for one in machine.functions if host.is_gpu(one)]
    for number, gpu in enumerate(gpus):
        found.append(_place(tree, f"GPU{cuda.get(gpu.address, number)}", "gpu", gpu))
    known = {one.address: one for one in machine.functions}
    named: set[str] = set()
    for device in machine.facts.rdma_devices:
        if device.pci_address in known:
            found.append(_place(tree, device.name, "nic", known[device.pci_address]))
            named.add(device.pci_address)
    found += [
        _place(tree, one.address, "nic", one)
        for one in machine.functions
        if host.is_nic(one) and one.address not in named
    ]
    controllers = {item.pci_address: item.name for item in machine.facts.nvme if item.pci_address}
    found += [
        _place(tree, controllers.get(one.address, one.address), "nvme", one)
        for one in machine.functions
        if host.is_nvme(one)
    ]
    return found


def _place(tree: host.HostTree, name: str, kind: str, device: PciDevice) -> Place:
    speed, width = device.link_speed, device.link_width
    known = speed is not None and speed[:1].isdigit()
    return Place(
        name=name,
        kind=kind,
        address=device.address,
        numa_node=device.numa_node,
        path=host.pci_path(tree, device.address)[:-1],
        link=f"{speed} x{width}" if known and width else "",
    )


def _bridge_words(bridge: PciDevice) -> str:
    if bridge.vendor_id == 0:
        return "bridge"
    return f"bridge {bridge.vendor_id:04x}:{bridge.device_id:04x}"
