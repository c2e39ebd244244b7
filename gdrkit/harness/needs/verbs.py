"""Needs about RDMA: ``verbs.nic()``, ``verbs.dmabuf_region``, ``verbs.peer_memory``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.harness.needs.base import Need, reason_without_facts, software
from gdrkit.report.substrate import is_twin

if TYPE_CHECKING:
    from gdrkit.inventory import Facts

__all__ = ["dmabuf_region", "foreign_dmabuf", "nic", "no_way_to_devices", "peer_memory"]


@dataclass(frozen=True, slots=True)
class _Nic:
    count_min: int

    @property
    def name(self) -> str:
        return f"verbs.nic(count_min={self.count_min})"

    def check(self, facts: Facts) -> str | None:
        if facts.verbs is None:
            return reason_without_facts("verbs", facts.verbs_failure)
        active = sum(bool(device.active_ports) for device in facts.verbs.nics)
        if active >= self.count_min:
            return None
        return f"{self.count_min} NICs with an active port needed, {active} of {len(facts.verbs.nics)} have one"


@dataclass(frozen=True, slots=True)
class _DmabufRegion:
    @property
    def name(self) -> str:
        return "verbs.dmabuf_region"

    def check(self, facts: Facts) -> str | None:
        if facts.verbs is None:
            return reason_without_facts("verbs", facts.verbs_failure)
        active = [device for device in facts.verbs.nics if device.active_ports]
        without = [device.name for device in active if not device.dmabuf]
        if without:
            return f"no dma-buf regions on {', '.join(without)}"
        return None if active else "no NIC with an active port"


@dataclass(frozen=True, slots=True)
class _PeerMemory:
    @property
    def name(self) -> str:
        return "verbs.peer_memory"

    def check(self, facts: Facts) -> str | None:
        if facts.verbs is None:
            return reason_without_facts("verbs", facts.verbs_failure)
        if facts.routes_failure is not None:
            return reason_without_facts("registration", facts.routes_failure)
        if any(route.possible for route in facts.routes if route.way == "peer_memory"):
            return None
        return "no NIC registers device memory by its address"


@dataclass(frozen=True, slots=True)
class _NoWayToDevices:
    @property
    def name(self) -> str:
        return "verbs.no_way_to_devices"

    def check(self, facts: Facts) -> str | None:
        if facts.verbs is None:
            return reason_without_facts("verbs", facts.verbs_failure)
        # A fault plan can make a twin refuse every registration.
        if software("verbs").check(facts) is None:
            return None
        if facts.routes_failure is not None:
            return reason_without_facts("registration", facts.routes_failure)
        possible = sorted({route.way for route in facts.routes if route.possible})
        return f"device memory can be registered here, by {' and '.join(possible)}" if possible else None


@dataclass(frozen=True, slots=True)
class _ForeignDmabuf:
    @property
    def name(self) -> str:
        return "verbs.foreign_dmabuf"

    def check(self, facts: Facts) -> str | None:
        on_twin = [api for api in ("verbs", "cuda") if any(is_twin(library) for library in facts.api_libraries(api))]
        # A process cannot map a dma-buf of a real GPU, so the twin copies by the driver of the GPU, which needs an
        # address of the memory in this process.
        if on_twin == ["verbs"]:
            return "the software twin of verbs reaches memory of a real GPU only where the process has its address"
        return _DmabufRegion().check(facts)


def nic(*, count_min: int = 1) -> Need:
    """Return the need of at least `count_min` NICs with an active port."""
    return _Nic(count_min)


dmabuf_region: Need = _DmabufRegion()
peer_memory: Need = _PeerMemory()
# No NIC of this machine can register device memory, or verbs runs on its twin, which can refuse every registration.
no_way_to_devices: Need = _NoWayToDevices()
# NICs can register a dma-buf of another process, whose memory has no address in this process.
foreign_dmabuf: Need = _ForeignDmabuf()
