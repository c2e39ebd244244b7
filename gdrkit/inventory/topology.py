"""PCI topology of GPUs, NICs and NVMe controllers: NUMA nodes, host bridges, switches and the distance of each pair."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import host, serialization
from gdrkit.host import Distance

if TYPE_CHECKING:
    from gdrkit.host import PciDevice
    from gdrkit.inventory.machine import Machine

__all__ = ["Place", "Topology", "topology"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Place:
    """One device that is the source or the destination of transfers.

    Attributes
    ----------
    name : str
        ``GPU0``, ``mlx5_0``, ``nvme0``; the PCI address if the device has no name.
    kind : str
        ``gpu``, ``nic`` or ``nvme``.
    address : str
        Address of its PCI function.
    numa_node : int or None
        The nearest NUMA node.
    path : tuple of str
        The host bridge and the bridges above the device, from the top.
    link : str
        The PCIe link as trained; empty if it is unknown.
    """

    name: str
    kind: str
    address: str
    numa_node: int | None
    path: tuple[str, ...]
    link: str


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of a host and the distances between them.

    Attributes
    ----------
    places : tuple of Place
        GPUs, then NICs, then NVMe controllers.
    distances : mapping
        Distance (``PIX`` to ``SYS``) by the names of two places. Each pair is in it in both orders.
    bridges : mapping
        Description of each bridge above a place (root ports and ports of switches), by address.
    virtual_machine : str or None
        The evidence that the machine is virtual, in which case the tree may differ from the hardware; None if there is
        none.
    """

    schema_version: int
    places: tuple[Place, ...]
    distances: dict[str, dict[str, str]]
    bridges: dict[str, str]
    virtual_machine: str | None

    def to_json(self) -> str:
        """Return the topology as indented JSON."""
        return json.dumps(serialization.to_json_data(self), indent=2, ensure_ascii=False) + "\n"

    def distance(self, one: str, other: str) -> Distance:
        """Return the distance between two places, given by their names."""
        return Distance[self.distances[one][other]]


def topology(machine: Machine) -> Topology:
    """Return the topology of `machine`."""
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
