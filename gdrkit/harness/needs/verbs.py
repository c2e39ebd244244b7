"""Needs about RDMA NICs: a number of active NICs, and the methods by which they can register device memory.

Facts.routes has an entry for each combination of a GPU, a NIC and a registration method (`way`: ``dmabuf`` or
``peer_memory``). The entry says whether the NIC can register memory of the GPU by this method. These routes are not the
data paths that the glossary calls routes.

Some needs depend on the software twin of verbs, a library that emulates libibverbs and the NICs below it.
"""

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
        active_count = sum(bool(nic_facts.active_ports) for nic_facts in facts.verbs.nics)
        if active_count >= self.count_min:
            return None
        return f"{self.count_min} NICs with an active port needed, {active_count} of {len(facts.verbs.nics)} have one"


@dataclass(frozen=True, slots=True)
class _DmabufRegion:
    @property
    def name(self) -> str:
        return "verbs.dmabuf_region"

    def check(self, facts: Facts) -> str | None:
        if facts.verbs is None:
            return reason_without_facts("verbs", facts.verbs_failure)
        active_nics = [nic_facts for nic_facts in facts.verbs.nics if nic_facts.active_ports]
        nics_without_dmabuf = [nic_facts.name for nic_facts in active_nics if not nic_facts.dmabuf]
        if nics_without_dmabuf:
            causes = dict.fromkeys(
                nic_facts.failure.message for nic_facts in active_nics if nic_facts.failure is not None
            )
            return ": ".join((f"no dma-buf regions on {', '.join(nics_without_dmabuf)}", *causes))
        return None if active_nics else "no NIC with an active port"


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
class _NoDeviceRegistration:
    @property
    def name(self) -> str:
        return "verbs.no_way_to_devices"

    def check(self, facts: Facts) -> str | None:
        if facts.verbs is None:
            return reason_without_facts("verbs", facts.verbs_failure)
        # On the twin, the need is met: the case itself makes the twin refuse every registration, by a fault plan.
        if software("verbs").check(facts) is None:
            return None
        if facts.routes_failure is not None:
            return reason_without_facts("registration", facts.routes_failure)
        possible_methods = sorted({route.way for route in facts.routes if route.possible})
        return (
            f"device memory can be registered here, by {' and '.join(possible_methods)}" if possible_methods else None
        )


@dataclass(frozen=True, slots=True)
class _ForeignDmabuf:
    @property
    def name(self) -> str:
        return "verbs.foreign_dmabuf"

    def check(self, facts: Facts) -> str | None:
        twin_apis = [api for api in ("verbs", "cuda") if any(is_twin(library) for library in facts.api_libraries(api))]
        # The verbs twin accesses memory of a real GPU by copy calls of the CUDA driver, because a process cannot map a
        # dma-buf of a real GPU. The copy calls need an address, and memory of another process has no address in this
        # process.
        if twin_apis == ["verbs"]:
            return (
                "the software twin of verbs can access memory of a real GPU only if the memory has an address in this "
                "process"
            )
        return _DmabufRegion().check(facts)


def nic(*, count_min: int = 1) -> Need:
    """Return the need of at least `count_min` NICs with an active port."""
    return _Nic(count_min)


# This need is met if every NIC with an active port can register a dma-buf (ibv_reg_dmabuf_mr).
dmabuf_region: Need = _DmabufRegion()
# This need is met if a NIC can register device memory by its address (ibv_reg_mr with nvidia-peermem).
peer_memory: Need = _PeerMemory()
# This need is met if no NIC can register device memory, or if verbs runs on its twin, which can refuse registrations.
no_way_to_devices: Need = _NoDeviceRegistration()
# This need is met if NICs can register a dma-buf of another process, whose memory has no address in this process.
foreign_dmabuf: Need = _ForeignDmabuf()
