"""Distances between GPUs and NICs in the PCI tree and by NUMA nodes, read from the sysfs of a :class:`HostTree`.

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

_RDMA_CLASS = "/sys/class/infiniband"


class Placement:
    """The distances on one host, with the turns of equally near NICs.

    Parameters
    ----------
    tree : HostTree or None
        The host whose sysfs is read. With None, this host.
    """

    def __init__(self, tree: HostTree | None = None) -> None:
        self._tree = HostTree() if tree is None else tree
        self._turns: dict[tuple[str, ...], int] = {}  # The number of choices by the names of the equally near NICs.
        self._lock = ForkSafeLock()

    def distance(self, gpu_pci_bus_id: str, nic_name: str) -> Distance:
        """Return how far a GPU (its PCI address: ``0000:1b:00.0``) is from an RDMA device (its name: ``mlx5_0``).

        ``Distance.UNKNOWN`` says that sysfs does not show the position of one of them.

        Raises
        ------
        UsageError
            There is no RDMA device with that name in sysfs. For this host, libibverbs does not list it either.
        """
        device_names = set(self._tree.names(_RDMA_CLASS))
        if nic_name not in device_names and self._tree.is_this_host:
            device_names |= _names_in_libibverbs()
        if nic_name not in device_names:
            message = f"there is no RDMA device {nic_name!r}"
            raise UsageError(
                message, what_to_do=f"choose from {', '.join(sorted(device_names))}" if device_names else ""
            )
        return self._distance(gpu_pci_bus_id, nic_name)

    def _distance(self, gpu_pci_bus_id: str, nic_name: str) -> Distance:
        nic_address = self._tree.link_name(f"{_RDMA_CLASS}/{nic_name}/device")
        return Distance.UNKNOWN if nic_address is None else pci_distance(self._tree, gpu_pci_bus_id, nic_address)

    def nearest(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
        """Return the NICs with the smallest distance to the GPU, in the order of `nics`."""
        if not nics:
            message = "there is no NIC to choose from"
            raise UsageError(message)
        distances = {nic: self._distance(gpu_pci_bus_id, nic.name) for nic in nics}
        smallest = min(distances.values())
        return tuple(nic for nic in nics if distances[nic] is smallest)

    def choose(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> Nic:
        """Return one of the nearest NICs. Equally near NICs take turns; each set of such NICs has its own count."""
        nearest = self.nearest(gpu_pci_bus_id, nics)
        names = tuple(nic.name for nic in nearest)
        with self._lock:
            turn = self._turns.get(names, 0)
            self._turns[names] = turn + 1
        return nearest[turn % len(nearest)]


def _names_in_libibverbs() -> set[str]:
    """Return the names of the devices that libibverbs lists. It is empty without libibverbs.

    Some of these devices are not in sysfs.
    """
    from gdrkit.verbs import list_nics

    try:
        return {info.name for info in list_nics()}
    except SetupMissing:
        return set()
