"""Needs about Gaudi: ``gaudi.device()``, ``gaudi.mapped_memory``, ``gaudi.physical_memory``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.harness.needs.base import Need, reason_without_facts

if TYPE_CHECKING:
    from gdrkit.inventory import Facts

__all__ = ["device", "mapped_memory", "physical_memory"]


@dataclass(frozen=True, slots=True)
class _Device:
    count_min: int

    @property
    def name(self) -> str:
        return f"gaudi.device(count_min={self.count_min})"

    def check(self, facts: Facts) -> str | None:
        if facts.gaudi is None:
            return reason_without_facts("hlthunk", facts.gaudi_failure)
        found = len(facts.gaudi.devices)
        return None if found >= self.count_min else f"{self.count_min} Gaudis needed, {found} found"


@dataclass(frozen=True, slots=True)
class _MappedMemory:
    @property
    def name(self) -> str:
        return "gaudi.mapped_memory"

    def check(self, facts: Facts) -> str | None:
        if facts.gaudi is None:
            return reason_without_facts("hlthunk", facts.gaudi_failure)
        first = [device for device in facts.gaudi.devices if device.generation == "gaudi"]
        return "the memory of a first Gaudi is not mapped by its driver" if first else None


@dataclass(frozen=True, slots=True)
class _PhysicalMemory:
    @property
    def name(self) -> str:
        return "gaudi.physical_memory"

    def check(self, facts: Facts) -> str | None:
        if facts.gaudi is None:
            return reason_without_facts("hlthunk", facts.gaudi_failure)
        first = [device for device in facts.gaudi.devices if device.generation == "gaudi"]
        return None if first else "no first Gaudi, whose memory is named by physical addresses"


def device(*, count_min: int = 1) -> Need:
    """Return the need of at least `count_min` Gaudis."""
    return _Device(count_min)


# All devices are Gaudi 2 or later, whose driver allocates and maps memory.
mapped_memory: Need = _MappedMemory()
# A device is a first-generation Gaudi, whose driver does neither.
physical_memory: Need = _PhysicalMemory()
