"""Distance between two PCI functions, from sysfs, in the words of ``nvidia-smi topo -m``."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.host.tree import HostTree

__all__ = ["Distance", "pci_distance", "pci_path"]

_PCI = "/sys/bus/pci/devices"


class Distance(enum.IntEnum):
    """Distance between two devices. A smaller value is nearer."""

    PIX = 1  # The path crosses at most one PCIe switch.
    PXB = 2  # The path crosses several PCIe switches and no host bridge.
    PHB = 3  # The path crosses one PCIe host bridge.
    NODE = 4  # The path connects two host bridges of one NUMA node.
    SYS = 5  # The path crosses the link between NUMA nodes.
    UNKNOWN = 6  # sysfs does not show the position of one device.


def pci_path(tree: HostTree, address: str) -> tuple[str, ...]:
    """Return the host bridge, the bridges and the device itself, as the kernel nests them below /sys/devices.

    The result is empty if there is no such device.
    """
    target = tree.link_parts(f"{_PCI}/{address}") if address else ()
    start = next((at for at, part in enumerate(target) if part.startswith("pci") and ":" in part), None)
    return () if start is None else target[start:]


def pci_distance(tree: HostTree, one: str, other: str) -> Distance:
    """Return the distance between two PCI functions, given by their addresses (``0000:1b:00.0``)."""
    first, second = pci_path(tree, one), pci_path(tree, other)
    if not first or not second:
        return Distance.UNKNOWN
    shared = _shared(first, second)
    if shared == 0:
        nodes = {_node(tree, one), _node(tree, other)}
        # On a host with one NUMA node the kernel says -1 for all devices.
        return Distance.NODE if len(nodes) == 1 else Distance.SYS
    if shared == 1:
        return Distance.PHB
    # Each path ends with the device itself. The rest are the bridges that the two paths do not share.
    bridges = max(len(first), len(second)) - 1 - shared
    # A switch is an upstream bridge, which the paths share, and a downstream bridge for each device.
    return Distance.PIX if bridges <= 1 else Distance.PXB


def _node(tree: HostTree, address: str) -> int:
    number = tree.number(f"{_PCI}/{address}/numa_node")
    return -1 if number is None else number


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(one[:-1], other[:-1], strict=False):
        if left != right:
            break
        count += 1
    return count
