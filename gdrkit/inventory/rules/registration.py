"""Rules about a NIC that cannot register the memory of a GPU.

Dma-buf and peer memory are alternatives: the absence of one is a fault only if the other is missing too.
"""

from __future__ import annotations

import re
import zlib

from gdrkit.inventory.rules.base import Answer, Look, rule
from gdrkit.verdict import Verdict

__all__ = ["RULES"]

_DMABUF_KERNEL = (5, 12)
_MISMATCH = "disagrees about version of symbol ib_register_peer_memory_client"
_UNKNOWN = "Unknown symbol ib_register_peer_memory_client"


def _without_both(look: Look) -> Answer | None:
    """Return the answer for a machine without a GPU or without a NIC; None if it has both."""
    if not look.has_gpu:
        return look.not_run("no GPU here")
    return None if look.has_nic else look.not_run("no RDMA device here")


@rule(
    code="no-registration-route",
    title="neither dma-buf nor peer memory registers GPU memory",
    why="Without one of them every transfer between NIC and GPU goes through host memory, or is refused.",
    remedy="use the open kernel module of NVIDIA (driver 515 or newer) with Linux 5.12 or newer for dma-buf, or run "
    "`modprobe nvidia_peermem`",
    reads="a registration of 64 KiB by each way; /sys/module/nvidia_peermem, /sys/kernel/mm/memory_peers",
)
def _no_route(look: Look) -> Answer:  # noqa: PLR0911 - one return per answer.
    missing = _without_both(look)
    if missing:
        return missing
    ways, has_module = look.possible_ways(), look.has_peer_memory
    if ways:
        served = {route.device_index for route in look.facts.routes if route.possible}
        left = sorted({route.device_index for route in look.facts.routes} - served)
        if left:
            return look.fails(f"no NIC registers memory of GPU {', '.join(map(str, left))} in any way")
        return look.passes(f"registration by {' and by '.join(sorted(ways))} was tried and works")
    if look.facts.routes:
        return look.fails("registration was tried in every way, and every one was refused")
    if has_module:
        return look.passes("a peer memory module is loaded")
    if look.is_uncaptured("/sys/module/nvidia_peermem"):
        return look.not_run("the capture does not say")
    return look.unproven("no peer memory module is loaded, and dma-buf was not tried: verbs or CUDA did not answer")


@rule(
    code="peermem-symbols",
    title="nvidia_peermem does not fit the RDMA stack",
    why="The module was built against another ib_core (inbox, or a vendor's stack) and is refused when it is loaded.",
    remedy="install the driver again after the RDMA stack, so that nvidia_peermem is built against it; or use dma-buf, "
    "which needs no such module",
    reads="the kernel log; /proc/kallsyms for ib_register_peer_memory_client (which says only that the kernel could)",
    privilege="CAP_SYSLOG where kernel.dmesg_restrict is 1",
)
def _symbols(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    found = [line for line in look.machine.kernel_log.lines if _MISMATCH in line or _UNKNOWN in line]
    if found:
        look.saw("kernel log", found[-1])
        return look.fails("the kernel refused a peer memory module for its symbols")
    if look.has_peer_memory:
        return look.passes("a peer memory module is loaded")
    look.lines("/proc/kallsyms", "ib_register_peer_memory_client")
    unreadable = look.machine.kernel_log.unreadable
    if unreadable:
        return look.not_run(
            f"no peer memory module is loaded; why is in the kernel log, which cannot be read: {unreadable}"
        )
    return look.passes("no module was refused for its symbols, as far as the kernel log goes back")


@rule(
    code="no-dmabuf-region",
    title="kernel or NIC has no dma-buf regions",
    why="GPU memory by dma-buf needs ibv_reg_dmabuf_mr of the NIC's driver, and Linux 5.12.",
    remedy="use Linux 5.12 or newer with CONFIG_DMA_SHARED_BUFFER and CONFIG_PCI_P2PDMA and a NIC driver that has "
    "dma-buf regions (mlx5, irdma, efa); or load nvidia_peermem",
    reads="ibv_reg_dmabuf_mr with descriptor -1 (EBADF says yes); /proc/sys/kernel/osrelease, /boot/config-*, "
    "/proc/config.gz",
)
def _no_region(look: Look) -> Answer:
    if not look.has_nic:
        return look.not_run("no RDMA device here")
    nics = [nic for nic in (look.facts.verbs.nics if look.facts.verbs else ()) if nic.dmabuf is not None]
    for nic in nics:
        look.saw(f"ibv_reg_dmabuf_mr on {nic.name} with descriptor -1", "EBADF" if nic.dmabuf else "not supported")
    without = [nic.name for nic in nics if not nic.dmabuf]
    if nics and not without:
        return look.passes("every NIC takes dma-buf regions")
    cause = f"no dma-buf regions on {', '.join(without)}" if nics else _kernel_without_dmabuf(look)
    if cause is None and look.is_uncaptured("/proc/sys/kernel/osrelease"):
        return look.not_run("the capture does not say")
    if cause is None:
        return look.unproven("the kernel has what dma-buf regions need; verbs did not answer for the NIC")
    if look.has_peer_memory or "peer_memory" in look.possible_ways():
        return look.passes(f"{cause}, and peer memory serves instead")
    return look.fails(cause)


def _kernel_without_dmabuf(look: Look) -> str | None:
    release = look.text("/proc/sys/kernel/osrelease") or ""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and (int(numbers[1]), int(numbers[2])) < _DMABUF_KERNEL:
        return f"Linux {release} is older than 5.12"
    config = look.tree.text(f"/boot/config-{release}") or _unpacked(look.tree.data("/proc/config.gz"))
    look.saw(f"/boot/config-{release} or /proc/config.gz", "read" if config else "not there, or not readable")
    missing = [name for name in ("DMA_SHARED_BUFFER", "PCI_P2PDMA") if config and f"CONFIG_{name}=y" not in config]
    return f"the kernel was built without CONFIG_{', CONFIG_'.join(missing)}" if missing else None


def _unpacked(data: bytes | None) -> str:
    import gzip

    try:
        return gzip.decompress(data)[: 4 << 20].decode("utf-8", "replace") if data and len(data) < 1 << 20 else ""
    except (OSError, EOFError, zlib.error):
        return ""


@rule(
    code="no-dmabuf-export",
    title="the GPU's driver exports no dma-buf",
    why="The proprietary kernel module, and drivers before 515, cannot export GPU memory; nobody can register it then.",
    remedy="install the open kernel module of NVIDIA (driver 515 or newer), or load nvidia_peermem",
    reads="CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED; /proc/driver/nvidia/version",
)
def _no_export(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    devices = look.facts.cuda.devices if look.facts.cuda else ()
    for device in devices:
        look.saw(f"DMA_BUF_SUPPORTED of GPU {device.index}", device.attributes.get("DMA_BUF_SUPPORTED", "unknown"))
    without = [str(device.index) for device in devices if not device.has("DMA_BUF_SUPPORTED")]
    if devices and not without:
        return look.passes("every GPU exports its memory as dma-buf")
    version = look.text("/proc/driver/nvidia/version")
    if devices:
        cause = f"no dma-buf export by GPU {', '.join(without)}"
    elif version is None:
        return look.not_run("neither CUDA nor /proc/driver/nvidia/version says anything")
    elif "Open Kernel Module" in version:
        return look.unproven("the open kernel module is loaded; CUDA was not asked whether it exports dma-buf")
    else:
        cause = "the kernel module is the proprietary one"
    if look.has_peer_memory:
        return look.passes(f"{cause}, and peer memory serves instead")
    return look.fails(cause)


@rule(
    code="no-gpudirect",
    title="a GPU of a class without GPUDirect RDMA",
    why="Consumer GPUs refuse every registration, whatever driver and modules are there.",
    remedy="use a data-centre or professional GPU; no setting changes this",
    reads="CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED",
)
def _no_gpudirect(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    if look.facts.cuda is None:
        return look.not_run("CUDA did not answer, and nothing else says it")
    without = []
    for device in look.facts.cuda.devices:
        look.saw(
            f"GPU_DIRECT_RDMA_SUPPORTED of GPU {device.index}", device.attributes.get("GPU_DIRECT_RDMA_SUPPORTED", 0)
        )
        if not device.has("GPU_DIRECT_RDMA_SUPPORTED"):
            without.append(f"{device.index} ({device.name})")
    return look.fails(f"no GPUDirect RDMA on GPU {', '.join(without)}") if without else look.passes("every GPU has it")


@rule(
    code="topology-veto",
    title="the driver forbids peers by topology",
    why="On chipsets that it holds unable, the driver refuses peer access without a common switch, and says so "
    "nowhere.",
    remedy="set the module parameter NVreg_GrdmaPciTopoCheckOverride=1 (0 lets the driver decide, 2 denies), and load "
    "the module again",
    reads="/proc/driver/nvidia/params",
)
def _veto(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    path = "/proc/driver/nvidia/params"
    text = look.tree.text(path)
    found = re.search(r"^GrdmaPciTopoCheckOverride: (\d+)$", text or "", re.MULTILINE)
    look.saw(path, found[0] if found else "no GrdmaPciTopoCheckOverride" if text else "not readable")
    if text is None:
        return look.not_run(f"{path} cannot be read")
    if found and found[1] == "2":
        return look.fails("GrdmaPciTopoCheckOverride is 2: denied")
    return look.passes("nothing is denied" if found and found[1] == "1" else "the driver decides, nothing is denied")


@rule(
    code="p2p-one-way",
    title="the chipset passes writes between peers, but not reads",
    why="Transfers work in one direction only, and a test of writes alone calls such a machine good.",
    remedy="put GPU and NIC below one PCIe switch; where there is none, use this GPU for receiving only",
    reads="an RDMA WRITE into and an RDMA READ from the memory of each GPU, by a loop over each NIC",
    act="p2p",
)
def _one_way(look: Look) -> Answer:
    missing = _without_both(look)
    if missing:
        return missing
    seen = look.observed("p2p")
    if seen is None:
        return look.not_run("nobody has tried")
    if seen.failure is not None:
        return look.fails(f"the try itself failed: {seen.failure.message}")
    if not seen.seen:
        return look.not_run("no GPU and NIC could be tried")
    bad = [f"{where}: {what}" for where, what in seen.seen.items() if what != "SUCCESS"]
    return look.fails("; ".join(bad)) if bad else (Verdict.PASS, "writes and reads were tried, and the data is right")


RULES = (_no_route, _symbols, _no_region, _no_export, _no_gpudirect, _veto, _one_way)
