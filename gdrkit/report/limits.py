"""What a transfer cannot exceed, by the links that it crosses.

Level 5, pure. The rate of a port is what its link carries; that of PCIe is less its encoding, and nothing else: headers
cost some percent more, by the size of the packets, so that even a perfect transfer stays below.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.inventory import Facts
    from gdrkit.report.record import Record

__all__ = ["limit_gb_per_s", "link_gb_per_s", "port_gb_per_s"]

# Transfers a second on each lane in 10**9, by generation, and which part of them are data.
_GENERATIONS = {1: (2.5, 0.8), 2: (5.0, 0.8), 3: (8.0, 128 / 130), 4: (16.0, 128 / 130), 5: (32.0, 128 / 130)}
_FLITS = {6: (64.0, 236 / 256)}
_BITS = 8
# A parameter of a case by which its bytes cross the PCIe link of the device.
_COPIES = re.compile(r"\b(host_to_device|device_to_host)\b")


def limit_gb_per_s(record: Record, facts: Facts) -> float | None:
    """For the bytes of a case, in 10**9 bytes a second; None where no link that is known bounds them."""
    if record.routes:
        bounds = [_device_link(route.device_index, facts) for route in record.routes]
        bounds += [_port(route.nic, facts) for route in record.routes]
        known = [bound for bound in bounds if bound is not None]
        return min(known, default=None)
    return _device_link(0, facts) if _COPIES.search(record.case) else None


def link_gb_per_s(speed: str | None, width: str | None) -> float | None:
    """Of ``32.0 GT/s PCIe`` and ``16``, as sysfs has them: 63.0; None where they say nothing."""
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", speed or "")
    if found is None or not (width or "").isdecimal():
        return None
    rates = {**_GENERATIONS, **_FLITS}.values()
    part = next((part for rate, part in rates if rate == float(found[1])), None)
    return None if part is None else round(float(found[1]) * part * int(width or 0) / _BITS, 1)


def port_gb_per_s(rate: str | None) -> float | None:
    """Of ``400 Gb/sec (4X NDR)``, as sysfs has it: 50.0; None where it says nothing."""
    found = re.match(r"(\d+(?:\.\d+)?) Gb/sec", rate or "")
    return None if found is None else float(found[1]) / _BITS


def _device_link(index: int, facts: Facts) -> float | None:
    """What GPU and slot can do together, by NVML; else the link as trained, which is slower while the GPU is idle."""
    device = next((it for it in (facts.cuda.devices if facts.cuda else ()) if it.index == index), None)
    if device is None:
        return None
    address = device.pci_bus_id.lower()
    link = next((it for it in (facts.nvml.gpus if facts.nvml else ()) if it.pci_bus_id.lower() == address), None)
    if link is not None and link.link_generation_max in _GENERATIONS and link.link_width_max:
        rate, part = _GENERATIONS[link.link_generation_max]
        return round(rate * part * link.link_width_max / _BITS, 1)
    function = next((it for it in facts.gpus if it.address.lower() == address), None)
    return None if function is None else link_gb_per_s(function.link_speed, function.link_width)


def _port(nic: str, facts: Facts) -> float | None:
    device = next((it for it in facts.rdma_devices if it.name == nic), None)
    rates = [port_gb_per_s(port.rate) for port in (device.ports if device else ()) if port.state == "ACTIVE"]
    known = [rate for rate in rates if rate is not None]
    return min(known, default=None)
