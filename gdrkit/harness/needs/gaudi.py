"""Needs about Intel Gaudi devices: ``gaudi.device()``, ``gaudi.mapped_memory``, ``gaudi.physical_memory``."""

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
        device_count = len(facts.gaudi.devices)
        return None if device_count >= self.count_min else f"{self.count_min} Gaudis needed, {device_count} found"


@dataclass(frozen=True, slots=True)
class _MappedMemory:
    @property
    def name(self) -> str:
        return "gaudi.mapped_memory"

    def check(self, facts: Facts) -> str | None:
        if facts.gaudi is None:
            return reason_without_facts("hlthunk", facts.gaudi_failure)
        if not facts.gaudi.devices:
            return "no Gaudi"
        first_generation_devices = [device for device in facts.gaudi.devices if device.generation == "gaudi"]
        return (
            "the memory of a first-generation Gaudi is not mapped by its driver" if first_generation_devices else None
        )


@dataclass(frozen=True, slots=True)
class _PhysicalMemory:
    @property
    def name(self) -> str:
        return "gaudi.physical_memory"

    def check(self, facts: Facts) -> str | None:
        if facts.gaudi is None:
            return reason_without_facts("hlthunk", facts.gaudi_failure)
        first_generation_devices = [device for device in facts.gaudi.devices if device.generation == "gaudi"]
        return (
            None
            if first_generation_devices
            else "no first-generation Gaudi, whose memory is named by physical addresses"
        )


def device(*, count_min: int = 1) -> Need:
    """Return the need of at least `count_min` Gaudis."""
    return _Device(count_min)


# This need is met if all devices are Gaudi 2 or later. Their driver allocates memory and maps it to virtual addresses.
mapped_memory: Need = _MappedMemory()
# This need is met if a device is a first-generation Gaudi. Its memory has physical addresses only.
physical_memory: Need = _PhysicalMemory()
