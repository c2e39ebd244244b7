"""PCIe links, BAR1, firmware and errors of each GPU, from NVML.

The library is loaded by the call of :func:`nvml_facts`, not by the import of this module. The PCIe link of an idle GPU
is slowed down to save power, so its generation is meaningful only under load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gdrkit.errors import ApiError
from gdrkit.host import _nvml

__all__ = ["GpuHealth", "GpuLink", "NvmlFacts", "nvml_facts"]


_CORRECTED, _UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
_VOLATILE_ECC = 0  # nvmlEccCounterType_t: errors since the driver was loaded.


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """Identity, firmware and errors of one GPU. A quantity that the GPU does not support is None.

    Attributes
    ----------
    serial, vbios, gsp_firmware : str or None
        Serial number of the board, and the versions of its VBIOS and of the firmware of its GPU system processor
        (GSP).
    is_ecc_enabled : bool or None
        Whether ECC is on.
    corrected_errors, uncorrected_errors : int or None
        Memory errors since the driver was loaded.
    is_remapping_pending, has_remapping_failed : bool or None
        Whether the next reset of the GPU will replace a defective row of memory, and whether such a replacement failed.
    active_nvlinks : int
        Number of NVLinks that are active.
    """

    serial: str | None
    vbios: str | None
    gsp_firmware: str | None
    is_ecc_enabled: bool | None
    corrected_errors: int | None
    uncorrected_errors: int | None
    is_remapping_pending: bool | None
    has_remapping_failed: bool | None
    active_nvlinks: int


@dataclass(frozen=True, slots=True)
class GpuLink:
    """One GPU as NVML shows it. A quantity that the GPU does not support is None.

    Attributes
    ----------
    pci_bus_id : str
        PCI address as sysfs writes it.
    link_generation, link_generation_max, link_width, link_width_max : int or None
        PCIe generation and lanes of the link now, and the most that both GPU and slot support.
    replay_count : int or None
        Number of PCIe packets that the link sent again after an error.
    bar1_bytes, bar1_free_bytes : int or None
        Size and free part of BAR1, through which a NIC or an NVMe controller accesses GPU memory.
    common_ancestor : mapping
        Distance to every other GPU, by the PCI address of that GPU, as nvmlGpuTopologyLevel_t: 0 same board, 10 PIX,
        20 PXB, 30 PHB, 40 NODE, 50 SYS.
    health : GpuHealth or None
        Firmware and errors. None in facts that gdrkit 0.1.0 wrote.
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
    health: GpuHealth | None = None


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """Driver version and GPUs, as NVML reports them."""

    driver_version: str
    gpus: tuple[GpuLink, ...]


def nvml_facts() -> NvmlFacts:
    """Query NVML about the driver and every GPU.

    Raises
    ------
    SetupMissing
        The library or the driver is missing.
    ApiError
        NVML failed a query that every GPU supports.
    """
    with _nvml.initialized():
        gpu_count = _nvml.call("nvmlDeviceGetCount")
        handles = [_nvml.call("nvmlDeviceGetHandleByIndex", index) for index in range(gpu_count)]
        handle_by_address = {_nvml.pci_bus_id(handle): handle for handle in handles}
        gpus = tuple(_query_gpu_link(address, handle_by_address) for address in handle_by_address)
        return NvmlFacts(driver_version=_nvml.call("nvmlSystemGetDriverVersion"), gpus=gpus)


def _query_gpu_link(address: str, handle_by_address: dict[str, Any]) -> GpuLink:
    handle = handle_by_address[address]
    ancestor_levels = {
        other_address: _nvml.call_if_supported("nvmlDeviceGetTopologyCommonAncestor", handle, other_handle)
        for other_address, other_handle in handle_by_address.items()
        if other_address != address
    }
    bar1_info = _nvml.call_if_supported("nvmlDeviceGetBAR1MemoryInfo", handle)
    return GpuLink(
        pci_bus_id=address,
        link_generation=_nvml.call_if_supported("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        link_generation_max=_nvml.call_if_supported("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        link_width=_nvml.call_if_supported("nvmlDeviceGetCurrPcieLinkWidth", handle),
        link_width_max=_nvml.call_if_supported("nvmlDeviceGetMaxPcieLinkWidth", handle),
        replay_count=_nvml.call_if_supported("nvmlDeviceGetPcieReplayCounter", handle),
        bar1_bytes=None if bar1_info is None else int(bar1_info.bar1Total),
        bar1_free_bytes=None if bar1_info is None else int(bar1_info.bar1Free),
        common_ancestor={
            other_address: int(level) for other_address, level in ancestor_levels.items() if level is not None
        },
        health=_query_gpu_health(handle),
    )


def _query_gpu_health(handle: object) -> GpuHealth:
    # The result is a list: the current mode, and the mode after the next reboot.
    ecc_modes = _nvml.call_if_supported("nvmlDeviceGetEccMode", handle)
    # A tuple: the numbers of corrected and of uncorrected rows, whether a replacement is pending, whether one failed.
    remapped_rows = _nvml.call_if_supported("nvmlDeviceGetRemappedRows", handle)
    return GpuHealth(
        serial=_nvml.call_if_supported("nvmlDeviceGetSerial", handle),
        vbios=_nvml.call_if_supported("nvmlDeviceGetVbiosVersion", handle),
        gsp_firmware=_nvml.call_if_supported("nvmlDeviceGetGspFirmwareVersion", handle),
        is_ecc_enabled=None if ecc_modes is None else bool(ecc_modes[0]),
        corrected_errors=_query_error_count(handle, _CORRECTED),
        uncorrected_errors=_query_error_count(handle, _UNCORRECTED),
        is_remapping_pending=None if remapped_rows is None else bool(remapped_rows[2]),
        has_remapping_failed=None if remapped_rows is None else bool(remapped_rows[3]),
        active_nvlinks=_count_active_nvlinks(handle),
    )


def _query_error_count(handle: object, error_type: int) -> int | None:
    count = _nvml.call_if_supported("nvmlDeviceGetTotalEccErrors", handle, error_type, _VOLATILE_ECC)
    return None if count is None else int(count)


def _count_active_nvlinks(handle: object) -> int:
    active_count = 0
    for link in range(_nvml.NVLINKS_MAX):
        try:
            state = _nvml.call_if_supported("nvmlDeviceGetNvLinkState", handle, link)
        except ApiError as error:
            if error.status_name == "NVML_ERROR_INVALID_ARGUMENT":
                break  # The GPU has fewer links.
            raise
        active_count += bool(state)
    return active_count
