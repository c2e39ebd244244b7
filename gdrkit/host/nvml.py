"""What NVIDIA's management library says about links and BAR1 of each GPU.

Level 2. Importing this opens no library; the call does. The link of an idle GPU is slow on purpose, so its speed says
something only under load.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdrkit.host import _nvml

__all__ = ["GpuLink", "NvmlFacts", "nvml_facts"]


@dataclass(frozen=True, slots=True)
class GpuLink:
    """One GPU as NVML shows it; None for what it does not support.

    Attributes
    ----------
    pci_bus_id : str
        As sysfs names it.
    link_generation, link_generation_max, link_width, link_width_max : int or None
        Of the PCIe link now, and what GPU and slot can both do.
    replay_count : int or None
        Transfers that the link had to repeat.
    bar1_bytes, bar1_free_bytes : int or None
        The window through which a NIC or an NVMe reaches its memory.
    common_ancestor : mapping
        To each other GPU by its PCI address: nvmlGpuTopologyLevel_t (0 the same board, 10 PIX, 20 PXB, 30 PHB, 40 NODE,
        50 SYS).
    """

    pci_bus_id: str
    link_generation: int | None
    link_generation_max: int | None
    link_width: int | None
    link_width_max: int | None
    replay_count: int | None
    bar1_bytes: int | None
    bar1_free_bytes: int | None
    common_ancestor: dict[str, int]


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What NVML answered."""

    driver_version: str
    gpus: tuple[GpuLink, ...]


def nvml_facts() -> NvmlFacts:
    """Ask it.

    Raises
    ------
    SetupMissing
        There is no library that answers.
    ApiError
        It refused a question that it must answer.
    """
    with _nvml.opened() as library:
        handles = {_nvml.pci_bus_id(library, handle): handle for handle in _nvml.device_handles(library)}
        links = []
        for address, handle in handles.items():
            bar1 = _nvml.bar1_bytes(library, handle)
            ancestors = {
                other: level
                for other, its in handles.items()
                if other != address
                and (level := _nvml.number(library, "nvmlDeviceGetTopologyCommonAncestor", handle, its)) is not None
            }
            links.append(
                GpuLink(
                    pci_bus_id=address,
                    link_generation=_nvml.number(library, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
                    link_generation_max=_nvml.number(library, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
                    link_width=_nvml.number(library, "nvmlDeviceGetCurrPcieLinkWidth", handle),
                    link_width_max=_nvml.number(library, "nvmlDeviceGetMaxPcieLinkWidth", handle),
                    replay_count=_nvml.number(library, "nvmlDeviceGetPcieReplayCounter", handle),
                    bar1_bytes=None if bar1 is None else bar1[0],
                    bar1_free_bytes=None if bar1 is None else bar1[1],
                    common_ancestor=ancestors,
                )
            )
        return NvmlFacts(driver_version=_nvml.driver_version(library), gpus=tuple(links))
