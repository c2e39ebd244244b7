"""The limit of the rate of a case, given by the links that its bytes cross.

The module is pure. The capacity of links comes from :mod:`gdrkit.inventory.limits`. The record of a case says which
links it uses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.inventory import device_limit

if TYPE_CHECKING:
    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record

__all__ = ["limit_gb_per_s"]

# A case with this parameter moves its bytes over the PCIe link of the device.
_COPIES = re.compile(r"\b(host_to_device|device_to_host)\b")


def limit_gb_per_s(record: Record, facts: Facts) -> float | None:
    """Return the limit for the bytes of a case, in 10**9 bytes per second; None if no known link limits them."""
    devices, nics = {route.device_index for route in record.routes}, {route.nic for route in record.routes}
    if not record.routes and _COPIES.search(record.case):
        devices = {0}
    limit = device_limit(facts, devices=devices, nics=nics)
    return None if limit is None else limit.gb_per_s
