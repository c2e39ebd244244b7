"""Comparison of the links of a machine with the links that its profile expects: PCIe, NVLink and the ports of the NICs.

A link that trained below its expected speed still works, so no case fails because of it; only this comparison shows it.
All functions here are pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.inventory.limits import PCIE_SPEEDS_GT_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gdrkit.inventory.facts import Facts

__all__ = ["LINK_QUANTITIES", "ExpectedLink", "link_shortfalls"]

_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,9})?")
_LISTED_DEVICES_MAX = 4


@dataclass(frozen=True, slots=True)
class ExpectedLink:
    """The expected value of a property of the links of a machine.

    Attributes
    ----------
    quantity : str
        ``gpu_pcie_generation``, ``gpu_pcie_lanes``, ``gpu_nvlinks`` (active NVLinks of a GPU) or ``nic_gbit_per_s``
        (signalling rate of an active port).
    at_least : float
        Smallest accepted value.
    count : int
        Number of GPUs or ports that must have at least this value. Other NICs of the machine may be slower.
    source : str
        Measurement or publication of the value and the count.
    """

    quantity: str
    at_least: float
    count: int
    source: str


def link_shortfalls(links: Iterable[ExpectedLink], facts: Facts) -> tuple[str, ...]:
    """Return a sentence for each expected link that the machine does not have.

    A quantity that is unknown for every device is not compared, for example NVLinks without NVML.
    """
    shortfall_texts = []
    for link in links:
        known_values = [(name, value) for name, value in LINK_QUANTITIES[link.quantity](facts) if value is not None]
        too_small_texts = [f"{name} has {value:g}" for name, value in known_values if value < link.at_least]
        sufficient_count = len(known_values) - len(too_small_texts)
        if known_values and sufficient_count < link.count:
            too_small_text = f" ({_join_shortened(too_small_texts)})" if too_small_texts else ""
            shortfall_texts.append(
                f"{link.quantity}: {sufficient_count} of {link.count} have {link.at_least:g}{too_small_text}; "
                f"source: {link.source}"
            )
    return tuple(shortfall_texts)


def _join_shortened(texts: Sequence[str]) -> str:
    remaining_text = f" and {len(texts) - _LISTED_DEVICES_MAX} more" if len(texts) > _LISTED_DEVICES_MAX else ""
    return ", ".join(texts[:_LISTED_DEVICES_MAX]) + remaining_text


def _list_pcie_generations(facts: Facts) -> list[tuple[str, float | None]]:
    # The current generation is not compared, because an idle GPU trains its link for a lower speed. NVML has the
    # largest generation that both ends support, sysfs only the largest generation of the GPU.
    if facts.nvml is not None:
        return [(gpu.pci_bus_id, gpu.link_generation_max) for gpu in facts.nvml.gpus]
    generation_by_speed = {speed: generation for generation, speed in PCIE_SPEEDS_GT_PER_S.items()}
    return [
        (gpu.address, generation_by_speed.get(_parse_first_number(gpu.link_speed_max or gpu.link_speed) or 0.0))
        for gpu in facts.gpus
    ]


def _list_pcie_lanes(facts: Facts) -> list[tuple[str, float | None]]:
    if facts.nvml is not None:
        return [(gpu.pci_bus_id, gpu.link_width) for gpu in facts.nvml.gpus]
    return [(gpu.address, _parse_first_number(gpu.link_width)) for gpu in facts.gpus]


def _list_nvlinks(facts: Facts) -> list[tuple[str, float | None]]:
    gpus = facts.nvml.gpus if facts.nvml else ()
    return [(gpu.pci_bus_id, gpu.health.active_nvlinks if gpu.health else None) for gpu in gpus]


def _list_port_rates(facts: Facts) -> list[tuple[str, float | None]]:
    # A port that is not active does not meet any expectation, so it has the rate 0 here.
    return [
        (f"{device.name} port {port.number}", _parse_first_number(port.rate) if port.state == "ACTIVE" else 0.0)
        for device in facts.rdma_devices
        for port in device.ports
    ]


def _parse_first_number(text: str | None) -> float | None:
    match = _NUMBER.match(text or "")
    return float(match[0]) if match else None


# For each quantity, the function that returns the name and the value of each GPU or port. An unknown value is None.
LINK_QUANTITIES: dict[str, Callable[[Facts], list[tuple[str, float | None]]]] = {
    "gpu_nvlinks": _list_nvlinks,
    "gpu_pcie_generation": _list_pcie_generations,
    "gpu_pcie_lanes": _list_pcie_lanes,
    "nic_gbit_per_s": _list_port_rates,
}
