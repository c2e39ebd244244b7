"""Rules about GPUs, drivers and NICs that are too old for GPUDirect RDMA or for dma-bufs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RULES"]

_VENDOR_NVIDIA, _VENDOR_MELLANOX = 0x10DE, 0x15B3
# Compute capabilities of the first Kepler GPUs, which brought GPUDirect RDMA, and of the Turing GPUs.
_KEPLER_CAPABILITY, _TURING_CAPABILITY = (3, 0), (7, 5)
# The smallest PCI device ID in the list of GPUs that the open kernel modules support. All older GPUs have smaller IDs.
_TURING_DEVICE_ID_MIN = 0x1E02
_DMABUF_DRIVER_MIN = 515
_DMABUF_CUDA_MIN = (11, 7)
# PCI device ID of ConnectX-4, the oldest NIC that the manual of GPUDirect RDMA and MLNX_OFED 5.1 and later support.
# The file hca_type of an RDMA device has the same number in decimal, after "MT".
_CONNECTX_4_DEVICE_ID = 0x1013
# NICs before ConnectX-3 have PCI device IDs in this range, which are larger than the IDs of newer NICs.
_OLDEST_NIC_DEVICE_IDS = range(23000, 27000)
# The oldest firmware that NVIDIA's tools of 2022 support. These tools are the last ones that support all NICs of this
# table. The key is the first number of the firmware version, which identifies the model. The value is the smallest
# second number: 12.28 for ConnectX-4. Sources: MFT 4.22.1 LTS; for ConnectX-4 (12) mlxup 4.22.1.
_FIRMWARE_MIN_BY_MODEL = {12: 28, 14: 32, 16: 35, 18: 33, 20: 35, 22: 35, 24: 35, 26: 35, 28: 35}
# Parts of the lines with which mlx5_core and mlx4_core report in the kernel log that they refuse old firmware.
_FIRMWARE_REFUSAL_MESSAGES = ("Driver cmdif rev(", "Installed FW has unsupported command interface revision")


def _list_gpu_ages(context: RuleContext) -> Iterator[tuple[str, bool, bool]]:
    """Yield for each GPU of NVIDIA: its name, whether it is older than Kepler, and whether it is older than Turing."""
    capability_by_address = {}
    for device in context.facts.cuda.devices if context.facts.cuda else ():
        major = device.attributes.get("COMPUTE_CAPABILITY_MAJOR")
        if major is not None:
            capability = (major, device.attributes.get("COMPUTE_CAPABILITY_MINOR", 0))
            context.record(f"compute capability of GPU {device.index}", f"{capability[0]}.{capability[1]}")
            capability_by_address[device.pci_bus_id.lower()] = capability
            name = f"GPU {device.index} ({device.name}, compute capability {capability[0]}.{capability[1]})"
            yield name, capability < _KEPLER_CAPABILITY, capability < _TURING_CAPABILITY
    for gpu in context.gpus:
        # An imported capture may lack the device ID, which is then 0.
        if gpu.vendor_id == _VENDOR_NVIDIA and gpu.device_id and gpu.address.lower() not in capability_by_address:
            context.record(f"PCI device ID of {gpu.address}", f"{gpu.device_id:04x}")
            # A PCI device ID does not show whether the GPU is older than Kepler.
            is_before_turing = gpu.device_id < _TURING_DEVICE_ID_MIN
            yield f"the GPU {gpu.address} (PCI device ID {gpu.device_id:04x})", False, is_before_turing


@rule(
    code="gpu-too-old",
    title="the GPU or its driver is too old for GPUDirect RDMA or dma-bufs",
    why="Before Kepler there is no GPUDirect RDMA. dma-bufs need the open kernel module, which supports Turing and "
    "later GPUs (compute capability 7.5), and driver 515 with CUDA 11.7. On older GPUs only nvidia_peermem works.",
    remedy="install driver 515 or newer with the open kernel module; for a GPU that is older than Turing, load "
    "nvidia_peermem (or nv_peer_mem for a driver before 470) with an RDMA stack that supports peer memory",
    reads="CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, else the PCI device ID; "
    "/proc/driver/nvidia/version; cuDriverGetVersion",
    source="NVIDIA GPUDirect RDMA documentation, Overview (Kepler and CUDA 5.0); README of "
    "NVIDIA/open-gpu-kernel-modules (Turing or later, PCI IDs from 1E02); UCX FAQ (CUDA 11.7, open kernel modules)",
)
def _check_gpu_too_old(context: RuleContext) -> RuleResult:
    not_run_result = context.not_run_without_gpu_and_nic()
    if not_run_result:
        return not_run_result
    gpu_ages = list(_list_gpu_ages(context))
    gpus_before_kepler = [name for name, is_before_kepler, _ in gpu_ages if is_before_kepler]
    if gpus_before_kepler:
        return context.fails(f"no GPUDirect RDMA before Kepler: {', '.join(gpus_before_kepler)}")
    causes = [
        f"older than Turing, so without dma-bufs: {name}" for name, _, is_before_turing in gpu_ages if is_before_turing
    ]
    driver_version, cuda = context.facts.nvidia_driver_version, context.facts.cuda
    if driver_version is not None:
        context.record("/proc/driver/nvidia/version", driver_version)
        if int(driver_version.split(".")[0]) < _DMABUF_DRIVER_MIN:
            causes.append(f"driver {driver_version} is older than {_DMABUF_DRIVER_MIN}, the first with dma-bufs")
    cuda_version_match = re.fullmatch(r"(\d+)\.(\d+)", cuda.driver_version) if cuda else None
    if cuda_version_match:
        context.record("cuDriverGetVersion", cuda_version_match[0])
        if (int(cuda_version_match[1]), int(cuda_version_match[2])) < _DMABUF_CUDA_MIN:
            causes.append(f"the driver supports CUDA {cuda_version_match[0]}, and dma-bufs need 11.7")
    if not causes:
        if not gpu_ages or (driver_version is None and cuda_version_match is None):
            return context.not_run("the GPUs or the version of the driver are unknown")
        return context.passes("every GPU and the driver are new enough for dma-bufs")
    if context.has_peer_memory or "peer_memory" in context.working_registration_methods():
        return context.passes(f"{'; '.join(causes)}, but peer memory works instead")
    return context.fails("; ".join(causes))


def _list_nic_models(context: RuleContext) -> Iterator[tuple[str, int | None, str | None]]:
    """Yield for each NIC of Mellanox: its name, the number of its model, and the version of its firmware."""
    function_by_address = {function.address: function for function in context.nic_functions}
    listed_addresses = set()
    for device in context.facts.rdma_devices:
        function = function_by_address.get(device.pci_address or "")
        listed_addresses.add(device.pci_address)
        type_match = re.fullmatch(r"MT(\d+)", context.text(f"/sys/class/infiniband/{device.name}/hca_type") or "")
        if type_match:
            yield device.name, int(type_match[1]), device.firmware
        elif function and function.vendor_id == _VENDOR_MELLANOX and function.device_id:
            yield device.name, function.device_id, device.firmware
    for address, function in function_by_address.items():
        if address not in listed_addresses and function.vendor_id == _VENDOR_MELLANOX and function.device_id:
            yield address, function.device_id, None


@rule(
    code="nic-too-old",
    title="the model or the firmware of a NIC is too old for GPUDirect RDMA",
    why="NICs before ConnectX-4 have no dma-buf regions, and MLNX_OFED, which has peer memory, does not support them "
    "since 5.1. A driver may refuse old firmware altogether, and then says so in the kernel log.",
    remedy="use ConnectX-4 or newer; update the firmware with mlxup or mlxfwmanager, and restart the NIC "
    "(mlxfwreset, or reboot)",
    reads="/sys/class/infiniband/*/{hca_type,fw_ver}, else the PCI device ID; the kernel log; a registration of 64 KiB",
    privilege="CAP_SYSLOG where kernel.dmesg_restrict is 1",
    source="NVIDIA GPUDirect RDMA User Manual 1.8, System Requirements; release notes of MLNX_OFED 5.1 (ConnectX-3 and "
    "Connect-IB are no longer supported); MFT 4.22.1 LTS, Supported Adapter Cards Firmware Versions; mlx5_cmd_init() "
    "and mlx4_QUERY_FW() of Linux",
)
def _check_nic_too_old(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    refusal_lines = [
        line
        for line in context.machine.kernel_log.lines
        if any(message in line for message in _FIRMWARE_REFUSAL_MESSAGES)
    ]
    if refusal_lines:
        context.record("kernel log", refusal_lines[-1])
        return context.fails(f"the driver refused the firmware of a NIC: {refusal_lines[-1]}")
    old_nic_texts, old_firmware_texts, known_nic_count = [], [], 0
    for name, model_number, firmware_version in _list_nic_models(context):
        known_nic_count += 1
        context.record(f"model and firmware of {name}", f"MT{model_number}, {firmware_version or 'unknown'}")
        if model_number is not None and (
            model_number < _CONNECTX_4_DEVICE_ID or model_number in _OLDEST_NIC_DEVICE_IDS
        ):
            old_nic_texts.append(f"{name} (MT{model_number})")
        firmware_match = re.match(r"(\d+)\.(\d+)\.", firmware_version or "")
        if firmware_match and int(firmware_match[2]) < _FIRMWARE_MIN_BY_MODEL.get(int(firmware_match[1]), 0):
            old_firmware_texts.append(f"{name} ({firmware_version})")
    causes = [f"older than ConnectX-4: {', '.join(old_nic_texts)}"] if old_nic_texts else []
    causes += (
        [f"firmware that NVIDIA no longer supports: {', '.join(old_firmware_texts)}"] if old_firmware_texts else []
    )
    causes_text = "; ".join(causes)
    if not causes:
        return (
            context.passes(f"ConnectX-4 or newer: {format_count(known_nic_count, 'NIC')}; no old firmware is known")
            if known_nic_count
            else context.not_run("no NIC of Mellanox, or its model is unknown")
        )
    if context.working_registration_methods():
        return context.passes(f"{causes_text}, but the registration of GPU memory works")
    # A NIC that is not old may register GPU memory, so old models are the cause only if every NIC is old. Old firmware
    # is the cause only if the kernel log says so, which was checked above.
    is_every_nic_old = len(old_nic_texts) >= max(known_nic_count, len(context.facts.rdma_devices))
    if is_every_nic_old and (context.facts.routes or not context.has_peer_memory):
        return context.fails(causes_text)
    attempts_text = (
        "every registration that was tried was refused" if context.facts.routes else "no registration was tried"
    )
    return context.unproven(f"{causes_text}; {attempts_text}, and nothing here shows whether the NIC is the reason")


RULES = (_check_gpu_too_old, _check_nic_too_old)
