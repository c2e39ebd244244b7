"""Upper bounds of the transfer rate, computed from the links of a machine.

A limit is the number of bytes that a link carries in a second, headers included. No transfer can exceed it. If a
transfer seems to be faster, it did not use that link. All functions here are pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from gdrkit.inventory.facts import Facts
    from gdrkit.inventory.topology import Topology

__all__ = ["PCIE_SPEEDS_GT_PER_S", "Limit", "device_limit", "path_limit"]

_LINK_TEXT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) GT/s(?: PCIe)? x(\d{1,9})")
_PORT_RATE_TEXT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) Gb/sec")
# Speeds at which the encoding changes (PCI Express Base Specification, 4.2). Below 8 GT/s, 10 bits on the link carry 8
# bits of data. From 8 GT/s on, 130 bits carry 128. From 64 GT/s on, a flit of 256 bytes carries 236.
_ENCODING_128B_130B_GT_PER_S, _FLIT_ENCODING_GT_PER_S = 8.0, 64.0
# PCIe speeds by the generation numbers that NVML uses.
PCIE_SPEEDS_GT_PER_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of the slowest link of a path.

    Attributes
    ----------
    gb_per_s : float
        Rate in one direction, in 10**9 bytes per second.
    source : str
        Name of the link or port, with the speed and width of the link or the rate of the port.
    """

    gb_per_s: float
    source: str


def path_limit(topology: Topology, facts: Facts, names: Collection[str]) -> Limit | None:
    """Return the limit of a path through the devices `names` (``GPU0``, ``mlx5_0``), or None if it is unknown.

    It is unknown if no link reports its speed and width. It is also unknown in a virtual machine, whose PCI tree comes
    from the hypervisor and says nothing about the hardware.
    """
    if topology.virtual_machine is not None:
        return None
    devices = [device for device in topology.places if device.name in names]
    return _find_slowest(
        *(
            _compute_link_limit(device.name, _find_best_link(device.address, facts) or device.link)
            for device in devices
        ),
        *_compute_port_limits(facts, names),
    )


def device_limit(facts: Facts, *, devices: Collection[int], nics: Collection[str]) -> Limit | None:
    """Return the limit of a path through these CUDA devices and NICs, without a topology.

    The facts have the links of GPUs and the ports of NICs. They do not have the PCIe links of NICs, which are in the
    topology; see :func:`path_limit`.
    """
    if facts.virtual_machine is not None:
        return None
    all_limits: list[Limit | None] = [*_compute_port_limits(facts, nics)]
    for device in facts.cuda.devices if facts.cuda else ():
        address = device.pci_bus_id.lower()
        function = next((function for function in facts.gpus if function.address.lower() == address), None)
        trained_link = "" if function is None else f"{function.link_speed} x{function.link_width}"
        if device.index in devices:
            all_limits.append(
                _compute_link_limit(f"GPU{device.index}", _find_best_link(address, facts) or trained_link)
            )
    return _find_slowest(*all_limits)


def _find_slowest(*all_limits: Limit | None) -> Limit | None:
    # The kernel reports a width or a rate of 0 if it does not know the value.
    known_limits = [limit for limit in all_limits if limit is not None and limit.gb_per_s > 0]
    return min(known_limits, key=lambda limit: limit.gb_per_s, default=None)


def _find_best_link(address: str, facts: Facts) -> str:
    """Return speed and width of the fastest link that a GPU and its slot support together; empty if they are unknown.

    NVML reports these values. The trained speed is not used, because an idle GPU trains its link for a lower speed than
    a busy one.
    """
    for gpu in facts.nvml.gpus if facts.nvml else ():
        speed_gt_per_s = PCIE_SPEEDS_GT_PER_S.get(gpu.link_generation_max or 0)
        if gpu.pci_bus_id.lower() == address.lower() and speed_gt_per_s and gpu.link_width_max:
            return f"{speed_gt_per_s} GT/s PCIe x{gpu.link_width_max}"
    return ""


def _compute_link_limit(device_name: str, link_text: str) -> Limit | None:
    match = _LINK_TEXT.fullmatch(link_text)
    if match is None:
        return None
    speed_gt_per_s, lanes = float(match[1]), int(match[2])
    efficiency = (
        236 / 256
        if speed_gt_per_s >= _FLIT_ENCODING_GT_PER_S
        else 128 / 130
        if speed_gt_per_s >= _ENCODING_128B_130B_GT_PER_S
        else 8 / 10
    )
    return Limit(gb_per_s=speed_gt_per_s * lanes * efficiency / 8, source=f"the link of {device_name}, {link_text}")


def _compute_port_limits(facts: Facts, nic_names: Collection[str]) -> Iterator[Limit]:
    for device in facts.rdma_devices:
        for port in device.ports if device.name in nic_names else ():
            match = _PORT_RATE_TEXT.match(port.rate or "")
            # The rate of a port that is down is not a limit.
            if match is not None and port.state == "ACTIVE":
                yield Limit(gb_per_s=float(match[1]) / 8, source=f"the port of {device.name}, {port.rate}")
