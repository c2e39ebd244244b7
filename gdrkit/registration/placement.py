"""The choice of the NICs through which the memory of a GPU is transferred. Every part of gdrkit uses this choice.

Only NICs whose DMA reaches the memory of the GPU (:mod:`gdrkit.registration.reach`) are used. Of these, the nearest
NICs are chosen, and of the nearest, the NICs with the fastest link. Several equal NICs take turns. Distances
(:mod:`gdrkit.host.distance`) and link rates are read from the sysfs of a :class:`HostTree`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.errors import BrokenResource, Reason, RegistrationFailed, SetupMissing, UsageError
from gdrkit.forks import ForkSafeLock
from gdrkit.host import Distance, HostTree, pci_distance
from gdrkit.registration.reach_table import ReachTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.cuda import PrimaryContext
    from gdrkit.registration.reach import Reach
    from gdrkit.verbs import Nic

__all__ = ["Distance", "Placement"]

_RDMA_DEVICES_FOLDER = "/sys/class/infiniband"
# The beginning of a port's file `rate`, such as "400 Gb/sec (4X NDR)".
_RATE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


class Placement:
    """The choice of NICs on one host. It counts the choices, so that equal NICs take turns.

    Parameters
    ----------
    tree : HostTree or None
        The host whose sysfs is read. With None, this host.
    reach : ReachTable or None
        The measured reach. With None, a new table, which begins with the results that other processes of the user
        stored in a file.

    Attributes
    ----------
    reach : ReachTable
        The measured reach.
    """

    def __init__(self, tree: HostTree | None = None, *, reach: ReachTable | None = None) -> None:
        self._tree = HostTree() if tree is None else tree
        self.reach = ReachTable() if reach is None else reach
        # For each set of equally near NICs, the number of choices so far. The key has the names of the NICs.
        self._turn_count_by_nics: dict[tuple[str, ...], int] = {}
        # The results of nearest_nics(): the indices of the nearest NICs in its argument `nics`. The key has the PCI
        # address of the GPU and the names of `nics`.
        self._nearest_indices_by_query: dict[tuple[str, tuple[str, ...]], tuple[int, ...]] = {}
        # The lock is reentrant, because a signal handler may choose a NIC while its thread has the lock.
        self._lock = ForkSafeLock(reentrant=True)

    def distance(self, gpu_pci_bus_id: str, nic_name: str) -> Distance:
        """Return how far a GPU (its PCI address: ``0000:1b:00.0``) is from an RDMA device (its name: ``mlx5_0``).

        The result is ``Distance.UNKNOWN`` if sysfs does not show the PCI position of the GPU or of the NIC.

        Raises
        ------
        UsageError
            No RDMA device with that name is in sysfs or, if the tree is this host, in the list of libibverbs.
        """
        device_names = set(self._tree.names(_RDMA_DEVICES_FOLDER))
        if nic_name not in device_names and self._tree.is_this_host:
            device_names |= _list_libibverbs_names()
        if nic_name not in device_names:
            message = f"there is no RDMA device {nic_name!r}"
            raise UsageError(
                message, what_to_do=f"choose from {', '.join(sorted(device_names))}" if device_names else ""
            )
        return self._find_distance(gpu_pci_bus_id, nic_name)

    def _find_distance(self, gpu_pci_bus_id: str, nic_name: str) -> Distance:
        nic_address = self._tree.link_name(f"{_RDMA_DEVICES_FOLDER}/{nic_name}/device")
        return Distance.UNKNOWN if nic_address is None else pci_distance(self._tree, gpu_pci_bus_id, nic_address)

    def link_gbit_per_s(self, nic: Nic) -> float:
        """Return the rate of the NIC's link in Gbit/s, or 0 if sysfs does not show it."""
        rate_text = self._tree.text(f"{_RDMA_DEVICES_FOLDER}/{nic.name}/ports/{nic.port.number}/rate")
        match = _RATE_PATTERN.match(rate_text or "")
        return 0.0 if match is None else float(match[1])

    def usable_nics(self, device: PrimaryContext, nics: Sequence[Nic]) -> tuple[Nic, ...]:
        """Return the NICs that reach the GPU, in the order of `nics`. Measure the NICs whose reach is unknown.

        Raises
        ------
        RegistrationFailed
            No NIC reaches the GPU. ``causes`` has one reason for each NIC.
        ApiError
            Memory of the GPU could not be allocated for a measurement.
        """
        _require_nics(nics)
        results = self.reach.get_results(device, nics)
        usable_nics = tuple(nic for nic, result in zip(nics, results, strict=True) if result.moved)
        if not usable_nics:
            message = f"no NIC reaches the memory of GPU {device.index}"
            causes = tuple(_make_reach_error(result) for result in results)
            raise RegistrationFailed(
                message,
                causes=causes,
                reason=causes[0].reason,
                what_to_do="remove one of the causes; each cause has its advice. `gdrkit doctor` finds known causes",
            )
        return usable_nics

    def nearest_nics(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
        """Return the NICs with the smallest distance to the GPU and, of these, the fastest, in the order of `nics`."""
        _require_nics(nics)
        query = (gpu_pci_bus_id, tuple(nic.name for nic in nics))
        nearest_indices = self._nearest_indices_by_query.get(query)
        if nearest_indices is None:
            # Each transfer calls this function, so the files of sysfs are read only once. The smallest rank is the
            # best.
            ranks = [(self._find_distance(gpu_pci_bus_id, nic.name), -self.link_gbit_per_s(nic)) for nic in nics]
            best_rank = min(ranks)
            nearest_indices = self._nearest_indices_by_query[query] = tuple(
                index for index, rank in enumerate(ranks) if rank == best_rank
            )
        return tuple(nics[index] for index in nearest_indices)

    def choose(self, gpu_pci_bus_id: str, nics: Sequence[Nic]) -> Nic:
        """Return one of the :meth:`nearest_nics`. They take turns, and each set of nearest NICs has its own turn."""
        nearest_nics = self.nearest_nics(gpu_pci_bus_id, nics)
        nic_names = tuple(nic.name for nic in nearest_nics)
        with self._lock:
            turn_count = self._turn_count_by_nics.get(nic_names, 0)
            self._turn_count_by_nics[nic_names] = turn_count + 1
        return nearest_nics[turn_count % len(nearest_nics)]


def _require_nics(nics: Sequence[Nic]) -> None:
    if not nics:
        message = "there is no NIC to choose from"
        raise UsageError(message)


def _make_reach_error(result: Reach) -> RegistrationFailed | BrokenResource:
    """Return the reason why a NIC does not reach a GPU, as an error."""
    message = f"NIC {result.nic} does not reach the GPU"
    if isinstance(result.failure, RegistrationFailed):
        return result.failure.clone()
    if result.failure is not None:
        causes = (result.failure.clone(),)
        return RegistrationFailed(message, causes=causes, reason=causes[0].reason, what_to_do=causes[0].what_to_do)
    # The result was read from the file: another process measured it, and the file does not store errors.
    return BrokenResource(f"{message}: {result.cause}", reason=Reason.NO_ROUTE)


def _list_libibverbs_names() -> set[str]:
    """Return the names of the devices that libibverbs lists. The set is empty without libibverbs.

    Some of these devices are not in sysfs.
    """
    from gdrkit.verbs import list_nics

    try:
        return {nic_info.name for nic_info in list_nics()}
    except SetupMissing:
        return set()
