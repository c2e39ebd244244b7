"""The measurement of RDMA transfers between each GPU of this machine and its NICs.

gdrkit.registration chooses the NICs for a GPU by the results.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import permutations
from typing import TYPE_CHECKING

from gdrkit import cuda, verbs
from gdrkit.host import HostTree
from gdrkit.registration import ReachTable, measure_balance, measure_devices

if TYPE_CHECKING:
    from gdrkit.registration import Balance, Reach

__all__ = ["measure_machine"]


def measure_machine(*, balance_s: float = 0) -> tuple[tuple[Reach, ...], Balance | None]:
    """Measure transfers between the memory of every GPU and every pair of NICs, and store and return the results.

    A pair may also be one NIC in loopback. There are no results without a GPU or a NIC.

    If `balance_s` is above 0, also measure how many bytes each NIC carries when all NICs transfer for `balance_s`
    seconds.

    Raises
    ------
    SetupMissing
        libibverbs, pyverbs or the CUDA driver is missing.
    ApiError
        A device could not be opened, or memory of a GPU could not be allocated.
    """
    with ExitStack() as stack:
        nics = verbs.open_active_nics()
        for nic in nics:
            stack.callback(nic.close)
        devices = [stack.enter_context(cuda.Device(index)) for index in range(cuda.device_count())]
        pairs = [*((nic, nic) for nic in nics), *permutations(nics, 2)]
        results = measure_devices(devices, pairs, tree=HostTree()) if pairs else ()
        ReachTable().store(results)
        balance = measure_balance(devices, nics, duration_s=balance_s) if balance_s and results else None
        return results, balance
