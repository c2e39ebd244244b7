"""What the bytes of a case cannot exceed, by the links that they cross.

Level 5, pure. What links carry is in :mod:`gdrkit.inventory.limits`; which of them a case uses, its record says.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.inventory import device_limit

if TYPE_CHECKING:
    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record

__all__ = ["limit_gb_per_s"]

# A parameter of a case by which its bytes cross the PCIe link of the device.
_COPIES = re.compile(r"\b(host_to_device|device_to_host)\b")


def limit_gb_per_s(record: Record, facts: Facts) -> float | None:
    """For the bytes of a case, in 10**9 bytes a second; None where no link that is known bounds them."""
    devices, nics = {route.device_index for route in record.routes}, {route.nic for route in record.routes}
    if not record.routes and _COPIES.search(record.case):
        devices = {0}
    limit = device_limit(facts, devices=devices, nics=nics)
    return None if limit is None else limit.gb_per_s
