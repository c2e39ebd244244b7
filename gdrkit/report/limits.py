"""The highest rate that a case can reach, given by the PCIe and network links that its bytes cross.

:mod:`gdrkit.inventory.limits` computes the capacity of the links from the facts. The record of a case says which GPUs
and NICs the bytes cross. The plots of the report show the limit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.inventory import device_limit

if TYPE_CHECKING:
    from gdrkit.inventory import Facts, Limit
    from gdrkit.report.record import Record

__all__ = ["link_limit"]

# A case with this parameter copies between host and device 0, over the PCIe link of the device.
_COPY_PARAMETER = re.compile(r"\b(host_to_device|device_to_host)\b")


def link_limit(record: Record, facts: Facts) -> Limit | None:
    """Return the limit of the rate of a case, or None if it is unknown."""
    device_indices = {route.device_index for route in record.routes}
    nic_names = {route.nic for route in record.routes}
    # A case that uses several devices records the NUMA node of each. Its rates may be sums over several links, so the
    # limit of one link does not apply.
    numa_nodes = record.evidence.get("numa_nodes")
    has_one_device = not isinstance(numa_nodes, dict) or len(numa_nodes) == 1
    if not record.routes and has_one_device and _COPY_PARAMETER.search(record.case):
        device_indices = {0}
    return device_limit(facts, devices=device_indices, nics=nic_names)
