"""What the links of a machine can carry at most, by how they are trained.

Level 4. A limit is what no transfer can exceed: the bytes that a link carries in a second, headers included. A transfer
that seems to be faster did not go that way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.inventory.facts import Facts
    from gdrkit.inventory.topology import Topology

__all__ = ["Limit", "way_limit"]

_LINK = re.compile(r"(\d+(?:\.\d+)?) GT/s(?: PCIe)? x(\d+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
# From this speed on, 130 bits carry 128; below, 10 bits carry 8 (PCI Express Base Specification, 4.2). From 64 GT/s on,
# 256 bytes of a flit carry 236.
_LONG_CODE_GT_PER_S, _FLIT_GT_PER_S = 8.0, 64.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The slowest part of a way.

    Attributes
    ----------
    gb_per_s : float
        In one direction, 10**9 bytes.
    why : str
        Which part, and how it is trained.
    """

    gb_per_s: float
    why: str


def way_limit(topology: Topology, facts: Facts, names: Sequence[str]) -> Limit | None:
    """The limit of a way through these places (``GPU0``, ``mlx5_0``); None where no part of it says how it is trained.

    In a virtual machine the tree is what the hypervisor shows, and no limit of the hardware.
    """
    if topology.virtual_machine is not None:
        return None
    found = [limit for place in topology.places if place.name in names if (limit := _of_link(place.name, place.link))]
    for device in facts.rdma_devices:
        if device.name in names:
            found += [limit for port in device.ports if (limit := _of_rate(device.name, port.rate or ""))]
    return min(found, key=lambda limit: limit.gb_per_s, default=None)


def _of_link(name: str, link: str) -> Limit | None:
    parsed = _LINK.fullmatch(link)
    if parsed is None:
        return None
    speed, width = float(parsed[1]), int(parsed[2])
    share = 236 / 256 if speed >= _FLIT_GT_PER_S else 128 / 130 if speed >= _LONG_CODE_GT_PER_S else 8 / 10
    return Limit(gb_per_s=speed * width * share / 8, why=f"the link of {name}, {link}")


def _of_rate(name: str, rate: str) -> Limit | None:
    parsed = _RATE.match(rate)
    return None if parsed is None else Limit(gb_per_s=float(parsed[1]) / 8, why=f"the port of {name}, {rate}")
