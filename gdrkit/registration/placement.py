"""Which NIC is near to which GPU, by the PCI tree and the memory nodes, as sysfs under a root shows them.

Level 3. The distances are those of :mod:`gdrkit.host.distance`. Among NICs that are equally near, each has its turn.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.host import Distance, HostTree, pci_distance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.verbs import Nic

__all__ = ["Distance", "Placement"]

_RDMA = "/sys/class/infiniband"


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
        return Distance.UNKNOWN if nic_address is None else pci_distance(self._tree, gpu_pci_bus_id, nic_address)

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
