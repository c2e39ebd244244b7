"""Distance between two PCI functions, from sysfs, in the words of ``nvidia-smi topo -m``."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.host.tree import HostTree

__all__ = ["Distance", "pci_distance", "pci_path"]

_PCI_DEVICES_FOLDER = "/sys/bus/pci/devices"


class Distance(enum.IntEnum):
    """Distance between two devices. A smaller value means that the devices are nearer to each other."""

    PIX = 1  # The path crosses at most one PCIe switch.
    PXB = 2  # The path crosses several PCIe switches and no host bridge.
    PHB = 3  # The path crosses one PCIe host bridge.
    NODE = 4  # The path connects two host bridges of one NUMA node.
    SYS = 5  # The path crosses the link between NUMA nodes.
    UNKNOWN = 6  # sysfs does not show the position of one device.


def pci_path(tree: HostTree, address: str) -> tuple[str, ...]:
    """Return the names of the host bridge, the bridges and the device, as the kernel nests them below /sys/devices.

    The result is empty if there is no such device.
    """
    path_parts = tree.link_parts(f"{_PCI_DEVICES_FOLDER}/{address}") if address else ()
    # The host bridge is the part of the path with a name such as pci0000:16.
    start_index = next((index for index, part in enumerate(path_parts) if part.startswith("pci") and ":" in part), None)
    return () if start_index is None else path_parts[start_index:]


def pci_distance(tree: HostTree, first_address: str, second_address: str) -> Distance:
    """Return the distance between two PCI functions, given by their addresses (``0000:1b:00.0``)."""
    first_path, second_path = pci_path(tree, first_address), pci_path(tree, second_address)
    if not first_path or not second_path:
        return Distance.UNKNOWN
    shared_count = _count_shared_parts(first_path, second_path)
    if shared_count == 0:
        numa_nodes = {_read_numa_node(tree, first_address), _read_numa_node(tree, second_address)}
        # On a host with one NUMA node, numa_node of every device is -1, so the set has one number.
        return Distance.NODE if len(numa_nodes) == 1 else Distance.SYS
    if shared_count == 1:
        return Distance.PHB
    # Each path ends with the device itself. The parts between the shared parts and the device are bridges.
    bridge_count = max(len(first_path), len(second_path)) - 1 - shared_count
    # A switch consists of one upstream bridge, which both paths have, and a downstream bridge for each device below it.
    return Distance.PIX if bridge_count <= 1 else Distance.PXB


def _read_numa_node(tree: HostTree, address: str) -> int:
    numa_node = tree.number(f"{_PCI_DEVICES_FOLDER}/{address}/numa_node")
    return -1 if numa_node is None else numa_node


def _count_shared_parts(first_path: Sequence[str], second_path: Sequence[str]) -> int:
    """Return the number of parts with which both paths begin, without the devices at their ends."""
    count = 0
    for first_part, second_part in zip(first_path[:-1], second_path[:-1], strict=False):
        if first_part != second_part:
            break
        count += 1
    return count
