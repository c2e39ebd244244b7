"""PCI topology of GPUs, NICs and NVMe controllers: NUMA nodes, host bridges, switches and the distance of each pair."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from gdrkit import host, serialization
from gdrkit.host import Distance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.host import PciDevice
    from gdrkit.inventory.machine import Machine

__all__ = ["Topology", "TopologyDevice", "topology"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TopologyDevice:
    """One device that is the source or the destination of transfers.

    Attributes
    ----------
    name : str
        Name of the device, e.g. ``GPU0``, ``mlx5_0``, ``nvme0``, or its PCI address if it has no name.
    kind : str
        ``gpu``, ``nic`` or ``nvme``.
    address : str
        Address of its PCI function.
    numa_node : int or None
        The nearest NUMA node.
    path : tuple of str
        The host bridge and the bridges above the device, from the top.
    link : str
        Speed and width of the trained PCIe link, e.g. ``32.0 GT/s PCIe x16``; empty if they are unknown.
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
    places : tuple of TopologyDevice
        GPUs, then NICs, then NVMe controllers.
    distances : mapping
        Distance (``PIX`` to ``SYS``) by the names of two devices. The mapping contains each pair in both orders.
    bridges : mapping
        Description of each bridge above a device (root ports and ports of switches), by address.
    virtual_machine : str or None
        The evidence that the machine is virtual; None if there is none. In a virtual machine the PCI tree may differ
        from the hardware.
    numa_cpus : mapping
        The CPUs of each NUMA node that has a device, as in the kernel's cpulist (``0-31,64-95``), by the number of the
        node. A node whose list cannot be read is left out.
    """

    schema_version: int
    places: tuple[TopologyDevice, ...]
    distances: dict[str, dict[str, str]]
    bridges: dict[str, str]
    virtual_machine: str | None
    numa_cpus: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the topology as indented JSON."""
        return json.dumps(serialization.to_json_data(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "topology") -> Self:
        """Parse the output of :meth:`to_json`. `where` is the name of the text in error messages, e.g. a file name.

        Raises
        ------
        UsageError
            ``MALFORMED``: the text is not JSON, has an unsupported version, or has an invalid field.
        """
        return serialization.parse_versioned(cls, text, version=SCHEMA_VERSION, where=where)

    def distance(self, first_name: str, second_name: str) -> Distance:
        """Return the distance between two devices, given by their names."""
        return Distance[self.distances[first_name][second_name]]


def topology(machine: Machine) -> Topology:
    """Return the topology of `machine`."""
    tree = host.HostTree.of(machine.files)
    devices = tuple(_list_devices(machine, tree))
    addresses = {device.address for device in devices}
    function_by_address = {function.address: function for function in machine.pci_functions}
    bridge_addresses = dict.fromkeys(
        address for device in devices for address in device.path[1:] if address not in addresses
    )
    return Topology(
        schema_version=SCHEMA_VERSION,
        places=devices,
        distances={
            first.name: {
                second.name: host.pci_distance(tree, first.address, second.address).name
                for second in devices
                if second.name != first.name
            }
            for first in devices
        },
        bridges={
            address: _describe_bridge(function_by_address[address])
            for address in bridge_addresses
            if address in function_by_address
        },
        virtual_machine=machine.facts.virtual_machine,
        numa_cpus=_read_numa_cpus(tree, devices),
    )


def _read_numa_cpus(tree: host.HostTree, devices: Iterable[TopologyDevice]) -> dict[str, str]:
    numa_nodes = sorted({device.numa_node for device in devices if device.numa_node is not None})
    cpu_list_by_node = {str(node): tree.text(f"/sys/devices/system/node/node{node}/cpulist") for node in numa_nodes}
    return {node: cpu_list for node, cpu_list in cpu_list_by_node.items() if cpu_list}


def _list_devices(machine: Machine, tree: host.HostTree) -> list[TopologyDevice]:
    devices: list[TopologyDevice] = []
    cuda_index_by_address = {
        device.pci_bus_id.lower(): device.index for device in (machine.facts.cuda.devices if machine.facts.cuda else ())
    }
    gpus = [function for function in machine.pci_functions if host.is_gpu(function)]
    for gpu_index, gpu in enumerate(gpus):
        devices.append(_make_device(tree, f"GPU{cuda_index_by_address.get(gpu.address, gpu_index)}", "gpu", gpu))
    function_by_address = {function.address: function for function in machine.pci_functions}
    rdma_device_addresses: set[str] = set()
    for rdma_device in machine.facts.rdma_devices:
        if rdma_device.pci_address in function_by_address:
            function = function_by_address[rdma_device.pci_address]
            devices.append(_make_device(tree, rdma_device.name, "nic", function))
            rdma_device_addresses.add(rdma_device.pci_address)
    # These NICs have no RDMA device, e.g. because its driver is not loaded.
    devices += [
        _make_device(tree, function.address, "nic", function)
        for function in machine.pci_functions
        if host.is_nic(function) and function.address not in rdma_device_addresses
    ]
    nvme_name_by_address = {
        controller.pci_address: controller.name for controller in machine.facts.nvme if controller.pci_address
    }
    devices += [
        _make_device(tree, nvme_name_by_address.get(function.address, function.address), "nvme", function)
        for function in machine.pci_functions
        if host.is_nvme(function)
    ]
    return devices


def _make_device(tree: host.HostTree, name: str, kind: str, function: PciDevice) -> TopologyDevice:
    # The kernel reports a speed that it cannot determine as a text that begins with "Unknown".
    speed, width = function.link_speed, function.link_width
    is_speed_known = speed is not None and speed[:1].isdigit()
    return TopologyDevice(
        name=name,
        kind=kind,
        address=function.address,
        numa_node=function.numa_node,
        path=host.pci_path(tree, function.address)[:-1],
        link=f"{speed} x{width}" if is_speed_known and width else "",
    )


def _describe_bridge(bridge: PciDevice) -> str:
    if bridge.vendor_id == 0:
        return "bridge"
    return f"bridge {bridge.vendor_id:04x}:{bridge.device_id:04x}"
