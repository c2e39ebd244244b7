"""Which NIC is near to which GPU, by the PCI tree and the memory nodes, as sysfs under a root shows them.

Level 3. The distances are those that ``nvidia-smi topo -m`` prints. Among NICs that are equally near, each has its
turn.
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.host import HostTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.verbs import Nic

__all__ = ["Distance", "Placement"]

_PCI = "/sys/bus/pci/devices"
_RDMA = "/sys/class/infiniband"


class Distance(enum.IntEnum):
    """How far a GPU and a NIC are from each other; less is nearer."""

    PIX = 1  # At most one PCIe switch between them.
    PXB = 2  # Several PCIe switches, below one host bridge.
    PHB = 3  # Over a PCIe host bridge.
    NODE = 4  # Over host bridges of one memory node.
    SYS = 5  # Over the link between memory nodes.
    UNKNOWN = 6  # One of them is not on the PCI bus, or sysfs does not say where.


class Placement:
    """Distances on one host, and whose turn it is.

    Parameters
    ----------
    tree : HostTree or None
        The host's files; this host when None.
    """

    def __init__(self, tree: HostTree | None = None) -> None:
        self._tree = HostTree() if tree is None else tree
        self._turns: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def distance(self, gpu_pci_bus_id: str, nic_name: str) -> Distance:
        """From a GPU, by its PCI address (``0000:1b:00.0``), to an RDMA device, by its name (``mlx5_0``)."""
        nic_address = self._tree.link_name(f"{_RDMA}/{nic_name}/device")
        gpu, nic = self._path(gpu_pci_bus_id), self._path(nic_address or "")
        if not gpu or not nic or nic_address is None:
            return Distance.UNKNOWN
        shared = _shared(gpu, nic)
        if shared == 0:
            nodes = {self._node(gpu_pci_bus_id), self._node(nic_address)}
            # A host with one memory node says -1 for all, and so has nothing between them but host bridges.
            return Distance.NODE if len(nodes) == 1 else Distance.SYS
        if shared == 1:
            return Distance.PHB
        # Both paths end with the device itself; what is left of them are bridges that are not shared.
        bridges = max(len(gpu), len(nic)) - 1 - shared
        # A switch is one bridge above, which they share, and one for each device below it.
        return Distance.PIX if bridges <= 1 else Distance.PXB

    def nearest(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
        """Those of `nics` than which none is nearer, in the order given."""
        if not nics:
            message = "there is no NIC to choose from"
            raise UsageError(message)
        far = {nic: self.distance(gpu_pci_bus_id, nic.name) for nic in nics}
        least = min(far.values())
        return tuple(nic for nic in nics if far[nic] is least)

    def choose(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> Nic:
        """One of the nearest; among equals the next one with each call, counted for each set of equals."""
        equals = self.nearest(gpu_pci_bus_id, nics)
        names = tuple(nic.name for nic in equals)
        with self._lock:
            turn = self._turns.get(names, 0)
            self._turns[names] = turn + 1
        return equals[turn % len(equals)]

    def _path(self, address: str) -> tuple[str, ...]:
        """Host bridge, bridges and the device, as the kernel nests them below /sys/devices."""
        target = self._tree.link_parts(f"{_PCI}/{address}") if address else ()
        start = next((at for at, part in enumerate(target) if part.startswith("pci") and ":" in part), None)
        return () if start is None else target[start:]

    def _node(self, address: str) -> int:
        number = self._tree.number(f"{_PCI}/{address}/numa_node")
        return -1 if number is None else number


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(one[:-1], other[:-1], strict=False):
        if left != right:
            break
        count += 1
    return count
