"""Distances between GPUs and NICs in the PCI tree and by NUMA nodes, as sysfs below a root shows them.

The distances are those of :mod:`gdrkit.host.distance`. NICs that are equally near take turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import SetupMissing, UsageError
from gdrkit.forks import ForkSafeLock
from gdrkit.host import Distance, HostTree, pci_distance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.verbs import Nic

__all__ = ["Distance", "Placement"]

_RDMA = "/sys/class/infiniband"


class Placement:
    """The distances on one host, with the turns of equally near NICs.

    Parameters
    ----------
    tree : HostTree or None
        The files of the host. With None, this host.
    """

    def __init__(self, tree: HostTree | None = None) -> None:
        self._tree = HostTree() if tree is None else tree
        self._turns: dict[tuple[str, ...], int] = {}
        self._lock = ForkSafeLock()

    def distance(self, gpu_pci_bus_id: str, nic_name: str) -> Distance:
        """Return how far a GPU (its PCI address: ``0000:1b:00.0``) is from an RDMA device (its name: ``mlx5_0``).

        ``Distance.UNKNOWN`` says that sysfs does not show the position of one of them.

        Raises
        ------
        UsageError
            There is no RDMA device with that name, neither in sysfs nor, on this host, in libibverbs.
        """
        known = set(self._tree.names(_RDMA))
        if nic_name not in known and self._tree.is_this_host:
            known |= _nics_of_verbs()
        if nic_name not in known:
            message = f"there is no RDMA device {nic_name!r}"
            raise UsageError(message, what_to_do=f"choose from {', '.join(sorted(known))}" if known else "")
        return self._distance(gpu_pci_bus_id, nic_name)

    def _distance(self, gpu_pci_bus_id: str, nic_name: str) -> Distance:
        nic_address = self._tree.link_name(f"{_RDMA}/{nic_name}/device")
        return Distance.UNKNOWN if nic_address is None else pci_distance(self._tree, gpu_pci_bus_id, nic_address)

    def nearest(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
        """Return the NICs with the smallest distance to the GPU, in the order of `nics`."""
        if not nics:
            message = "there is no NIC to choose from"
            raise UsageError(message)
        far = {nic: self._distance(gpu_pci_bus_id, nic.name) for nic in nics}
        least = min(far.values())
        return tuple(nic for nic in nics if far[nic] is least)

    def choose(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> Nic:
        """Return one of the nearest NICs. Equally near NICs take turns; each set of such NICs has its own count."""
        equals = self.nearest(gpu_pci_bus_id, nics)
        names = tuple(nic.name for nic in equals)
        with self._lock:
            turn = self._turns.get(names, 0)
            self._turns[names] = turn + 1
        return equals[turn % len(equals)]


def _nics_of_verbs() -> set[str]:
    """Return the names of the devices that libibverbs lists. It is empty without libibverbs.

    Some of these devices are not in sysfs.
    """
    from gdrkit.verbs import list_nics

    try:
        return {info.name for info in list_nics()}
    except SetupMissing:
        return set()
