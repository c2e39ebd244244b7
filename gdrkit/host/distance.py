"""How far two PCI functions are from each other, as sysfs under a root shows it.

Level 2. The words are those that ``nvidia-smi topo -m`` prints.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.host.tree import HostTree

__all__ = ["Distance", "pci_distance", "pci_path"]

_PCI = "/sys/bus/pci/devices"


class Distance(enum.IntEnum):
    """How far two devices are from each other; less is nearer."""

    PIX = 1  # At most one PCIe switch between them.
    PXB = 2  # Several PCIe switches, below one host bridge.
    PHB = 3  # Over a PCIe host bridge.
    NODE = 4  # Over host bridges of one memory node.
    SYS = 5  # Over the link between memory nodes.
    UNKNOWN = 6  # One of them is not on the PCI bus, or sysfs does not say where.


def pci_path(tree: HostTree, address: str) -> tuple[str, ...]:
    """Host bridge, bridges and the device itself, as the kernel nests them below /sys/devices; nothing for a device
    that is not there.
    """
    target = tree.link_parts(f"{_PCI}/{address}") if address else ()
    start = next((at for at, part in enumerate(target) if part.startswith("pci") and ":" in part), None)
    return () if start is None else target[start:]


def pci_distance(tree: HostTree, one: str, other: str) -> Distance:
    """Between two PCI functions, by their addresses (``0000:1b:00.0``)."""
    first, second = pci_path(tree, one), pci_path(tree, other)
    if not first or not second:
        return Distance.UNKNOWN
    shared = _shared(first, second)
    if shared == 0:
        nodes = {_node(tree, one), _node(tree, other)}
        # A host with one memory node says -1 for all, and so has nothing between them but host bridges.
        return Distance.NODE if len(nodes) == 1 else Distance.SYS
    if shared == 1:
        return Distance.PHB
    # Both paths end with the device itself; what is left of them are bridges that are not shared.
    bridges = max(len(first), len(second)) - 1 - shared
    # A switch is one bridge above, which they share, and one for each device below it.
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
