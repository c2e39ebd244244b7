"""Rules about a NIC that cannot register the memory of a GPU.

A NIC can register GPU memory by dma-buf or by peer memory. If one of these routes is missing, that is a fault only if
the other is missing too.
"""

from __future__ import annotations

import re

from gdrkit.inventory.rules.base import (
    MEMORY_PEERS_FOLDER,
    PEER_MEMORY_CLIENTS,
    PEER_MEMORY_MODULES,
    RuleContext,
    RuleResult,
    rule,
)
from gdrkit.verdict import Verdict

__all__ = ["RULES"]

_DMABUF_KERNEL_MIN = (5, 12)
_RDMA_MODULES = ("ib_core", "ib_uverbs")
# Parts of the lines with which the kernel reports that it refused a peer memory module.
_MISMATCH_MESSAGE = "disagrees about version of symbol ib_register_peer_memory_client"
_UNKNOWN_SYMBOL_MESSAGE = "Unknown symbol ib_register_peer_memory_client"


@rule(
    code="no-registration-route",
    title="neither dma-buf nor peer memory registers GPU memory",
    why="Without one of them every transfer between NIC and GPU goes through host memory, or is refused.",
    remedy="use the open kernel module of NVIDIA (driver 515 or newer) with Linux 5.12 or newer for dma-buf, or run "
    "`modprobe nvidia_peermem`",
    reads="a registration of 64 KiB by each route; /sys/module/nvidia_peermem, /sys/kernel/mm/memory_peers",
)
def _check_no_registration_route(context: RuleContext) -> RuleResult:  # noqa: PLR0911 - one return per result.
    not_run_result = context.not_run_without_gpu_and_nic()
    if not_run_result:
        return not_run_result
    working_methods, has_peer_memory = context.working_registration_methods(), context.has_peer_memory
    if working_methods:
        registered_gpus = {route.device_index for route in context.facts.routes if route.possible}
        unregistered_gpus = sorted({route.device_index for route in context.facts.routes} - registered_gpus)
        if unregistered_gpus:
            return context.fails(
                f"no NIC registers memory of GPU {', '.join(map(str, unregistered_gpus))} by any route"
            )
        return context.passes(f"registration by {' and by '.join(sorted(working_methods))} was tried and works")
    if context.facts.routes:
        return context.fails("every registration route was tried and refused")
    if has_peer_memory:
        return context.passes("a peer memory module is loaded")
    if context.is_uncaptured("/sys/module/nvidia_peermem"):
        return context.not_run("the capture does not contain the files of this rule")
    return context.unproven(
        "no peer memory module is loaded, and dma-buf was not tried because verbs or CUDA could not be queried"
    )


@rule(
    code="peermem-symbols",
    title="nvidia_peermem was built for another RDMA stack",
    why="The module was built for another ib_core: for the one in the Linux distribution and not for a vendor's "
    "RDMA stack, or the reverse. The kernel refuses to load such a module.",
    remedy="install the driver again after the RDMA stack, so that nvidia_peermem is built against it; or use dma-buf, "
    "which needs no such module",
    reads="the kernel log; /proc/kallsyms for ib_register_peer_memory_client (which shows only that the kernel "
    "supports it)",
    privilege="CAP_SYSLOG where kernel.dmesg_restrict is 1",
)
def _check_peermem_symbols(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    refusal_lines = [
        line
        for line in context.machine.kernel_log.lines
        if _MISMATCH_MESSAGE in line or _UNKNOWN_SYMBOL_MESSAGE in line
    ]
    if refusal_lines:
        context.record("kernel log", refusal_lines[-1])
        return context.fails("the kernel refused a peer memory module because of its symbols")
    if context.has_peer_memory:
        return context.passes("a peer memory module is loaded")
    context.lines("/proc/kallsyms", "ib_register_peer_memory_client")
    log_failure = context.machine.kernel_log.unreadable
    if log_failure:
        return context.not_run(
            "no peer memory module is loaded; the reason would be in the kernel log, which cannot be read: "
            f"{log_failure}"
        )
    return context.passes("the kernel log reports no module that was refused because of its symbols")


@rule(
    code="peermem-refused",
    title="nvidia_peermem is loaded, and the registration of GPU addresses is refused",
    why="Programs that only look for the module, or for CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, report "
    "GPUDirect RDMA all the same. The module does not load unless it registers with the RDMA stack, so a loaded module "
    "shows no reason for the refusal; the error of the registration and the kernel log may.",
    remedy="look up the errno of the registration, and look for nvidia_peermem, NVRM and the NIC in the kernel log; "
    "install the NVIDIA driver again after the RDMA stack, and load nvidia_peermem again; or use dma-buf (open kernel "
    "module 515 or newer), which needs no such module",
    reads="a registration of 64 KiB by peer memory; /sys/module/{nvidia_peermem,nv_peer_mem}, "
    "/sys/kernel/mm/memory_peers, /sys/module/{ib_core,ib_uverbs}/holders",
    source="nv_mem_client_init() of nvidia-peermem.c (an error if the registration fails, or if the module was built "
    "without peer memory); NVIDIA/nccl #1939 (no entry in memory_peers, and ib_write_bw works with CUDA); "
    "ofiwg/libfabric #12409 (the attribute of the GPU alone)",
)
def _check_peermem_refused(context: RuleContext) -> RuleResult:  # noqa: PLR0911 - one return per result.
    not_run_result = context.not_run_without_gpu_and_nic()
    if not_run_result:
        return not_run_result
    loaded_modules = [name for name in PEER_MEMORY_MODULES if context.exists(f"/sys/module/{name}")]
    if not loaded_modules:
        return context.not_run("no peer memory module is loaded")
    module_name, working_methods = loaded_modules[0], context.working_registration_methods()
    if "peer_memory" in working_methods:
        return context.passes("registration by peer memory was tried and works")
    if any(route.way == "peer_memory" for route in context.facts.routes):
        cause = f"{module_name} is loaded, and registration by peer memory was tried and refused"
        return (
            context.passes(f"{cause}, but dma-buf works instead")
            if "dmabuf" in working_methods
            else context.fails(cause)
        )
    client_text = _describe_peermem_registration(context, module_name)
    if client_text:
        return context.passes(f"{client_text}; no registration of GPU memory was tried")
    if context.is_uncaptured(MEMORY_PEERS_FOLDER):
        return context.not_run("the capture does not contain the files of this rule")
    return context.unproven(f"{module_name} is loaded, and no registration by peer memory was tried")


def _describe_peermem_registration(context: RuleContext, module_name: str) -> str | None:
    """Return the sign that a loaded module has registered with the RDMA stack, or None. Some stacks show no sign."""
    clients = set(context.names(MEMORY_PEERS_FOLDER)) & set(PEER_MEMORY_CLIENTS)
    if clients:
        return f"{module_name} has registered as {' and '.join(sorted(clients))}"
    # The holders of a kernel module are the modules that call its functions. Which of the two RDMA modules has the
    # function for the registration depends on the RDMA stack.
    for name in _RDMA_MODULES:
        if module_name in context.names(f"/sys/module/{name}/holders"):
            return f"{module_name} uses {name}, so it has registered with the RDMA stack"
    return None


@rule(
    code="no-dmabuf-region",
    title="the kernel or the NIC does not support dma-buf regions",
    why="Registration by dma-buf needs Linux 5.12 and a NIC driver with ibv_reg_dmabuf_mr.",
    remedy="use Linux 5.12 or newer with CONFIG_DMA_SHARED_BUFFER and CONFIG_PCI_P2PDMA and a NIC driver that "
    "supports dma-buf regions (mlx5, irdma, efa); or load nvidia_peermem",
    reads="ibv_reg_dmabuf_mr with descriptor -1 (EBADF means that it is supported); /proc/sys/kernel/osrelease, "
    "/boot/config-*, /proc/config.gz",
)
def _check_no_dmabuf_region(context: RuleContext) -> RuleResult:
    if not context.has_nic:
        return context.not_run("no RDMA device here")
    nics = [nic for nic in (context.facts.verbs.nics if context.facts.verbs else ()) if nic.dmabuf is not None]
    for nic in nics:
        context.record(
            f"ibv_reg_dmabuf_mr on {nic.name} with descriptor -1", "EBADF" if nic.dmabuf else "not supported"
        )
    nics_without_support = [nic.name for nic in nics if not nic.dmabuf]
    if nics and not nics_without_support:
        return context.passes("every NIC supports dma-buf regions")
    cause = (
        f"no dma-buf regions on {', '.join(nics_without_support)}" if nics else _describe_kernel_without_dmabuf(context)
    )
    if cause is None and context.is_uncaptured("/proc/sys/kernel/osrelease"):
        return context.not_run("the capture does not contain the files of this rule")
    if cause is None:
        return context.unproven("the kernel supports dma-buf regions; verbs did not report whether the NIC does")
    if context.has_peer_memory or "peer_memory" in context.working_registration_methods():
        return context.passes(f"{cause}, but peer memory works instead")
    return context.fails(cause)


def _describe_kernel_without_dmabuf(context: RuleContext) -> str | None:
    """Return the reason why the kernel does not support dma-buf regions, or None if no reason is known."""
    if (0, 0) < context.kernel_version() < _DMABUF_KERNEL_MIN:
        return f"Linux {context.text('/proc/sys/kernel/osrelease')} is older than 5.12"
    kernel_config = context.kernel_config()
    missing_options = [
        name
        for name in ("DMA_SHARED_BUFFER", "PCI_P2PDMA")
        if kernel_config and f"CONFIG_{name}=y" not in kernel_config
    ]
    return f"the kernel was built without CONFIG_{', CONFIG_'.join(missing_options)}" if missing_options else None


@rule(
    code="no-dmabuf-export",
    title="the GPU's driver exports no dma-buf",
    why="The proprietary kernel module, and drivers before 515, cannot export GPU memory, so that no NIC can register "
    "it by dma-buf.",
    remedy="install the open kernel module of NVIDIA (driver 515 or newer), or load nvidia_peermem",
    reads="CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED; /proc/driver/nvidia/version",
)
def _check_no_dmabuf_export(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    devices = context.facts.cuda.devices if context.facts.cuda else ()
    for device in devices:
        context.record(
            f"DMA_BUF_SUPPORTED of GPU {device.index}", device.attributes.get("DMA_BUF_SUPPORTED", "unknown")
        )
    gpus_without_support = [str(device.index) for device in devices if not device.has("DMA_BUF_SUPPORTED")]
    if devices and not gpus_without_support:
        return context.passes("every GPU exports its memory as dma-buf")
    version_text = context.text("/proc/driver/nvidia/version")
    if devices:
        cause = f"no dma-buf export by GPU {', '.join(gpus_without_support)}"
    elif version_text is None:
        return context.not_run("neither CUDA nor /proc/driver/nvidia/version can be read")
    elif "Open Kernel Module" in version_text:
        return context.unproven("the open kernel module is loaded; CUDA did not report whether it exports dma-buf")
    else:
        cause = "the kernel module is the proprietary one"
    if context.has_peer_memory:
        return context.passes(f"{cause}, but peer memory works instead")
    return context.fails(cause)


@rule(
    code="no-gpudirect",
    title="a GPU of a class without GPUDirect RDMA",
    why="Consumer GPUs refuse every registration, whatever driver and modules are installed.",
    remedy="use a data-centre or professional GPU; no setting changes this",
    reads="CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED",
)
def _check_no_gpudirect(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    if context.facts.cuda is None:
        return context.not_run("CUDA could not be queried, and no other source reports it")
    gpus_without_support = []
    for device in context.facts.cuda.devices:
        context.record(
            f"GPU_DIRECT_RDMA_SUPPORTED of GPU {device.index}", device.attributes.get("GPU_DIRECT_RDMA_SUPPORTED", 0)
        )
        if not device.has("GPU_DIRECT_RDMA_SUPPORTED"):
            gpus_without_support.append(f"{device.index} ({device.name})")
    return (
        context.fails(f"no GPUDirect RDMA on GPU {', '.join(gpus_without_support)}")
        if gpus_without_support
        else context.passes("every GPU supports GPUDirect RDMA")
    )


@rule(
    code="topology-veto",
    title="the driver forbids peer access because of the PCI topology",
    why="On chipsets that the driver considers unsuitable, it refuses peer access between devices that are not below "
    "one PCIe switch, and reports no reason.",
    remedy="set the module parameter NVreg_GrdmaPciTopoCheckOverride=1 (0 lets the driver decide, 2 denies), and load "
    "the module again",
    reads="/proc/driver/nvidia/params",
)
def _check_topology_veto(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    path = "/proc/driver/nvidia/params"
    text = context.tree.text(path)
    setting_match = re.search(r"^GrdmaPciTopoCheckOverride: (\d+)$", text or "", re.MULTILINE)
    context.record(
        path, setting_match[0] if setting_match else "no GrdmaPciTopoCheckOverride" if text else "not readable"
    )
    if text is None:
        return context.not_run(f"{path} cannot be read")
    if setting_match and setting_match[1] == "2":
        return context.fails("GrdmaPciTopoCheckOverride is 2: peer access is denied")
    return context.passes(
        "nothing is denied" if setting_match and setting_match[1] == "1" else "the driver decides, nothing is denied"
    )


@rule(
    code="p2p-one-way",
    title="the chipset passes writes between peers, but not reads",
    why="Transfers work in one direction only, and a test of writes alone does not detect this.",
    remedy="put GPU and NIC below one PCIe switch; if there is no switch, use this GPU for receiving only",
    reads="an RDMA WRITE into and an RDMA READ from the memory of each GPU, in loopback over each NIC",
    experiment="p2p",
)
def _check_p2p_one_way(context: RuleContext) -> RuleResult:
    not_run_result = context.not_run_without_gpu_and_nic()
    if not_run_result:
        return not_run_result
    observation = context.observe("p2p")
    if observation is None:
        return context.not_run("the experiment was not run")
    if observation.failure is not None:
        return context.fails(f"the experiment failed: {observation.failure.message}")
    if not observation.seen:
        return context.not_run("there is no pair of GPU and NIC to test")
    failed_step_texts = [f"{step}: {result}" for step, result in observation.seen.items() if result != "SUCCESS"]
    return (
        context.fails("; ".join(failed_step_texts))
        if failed_step_texts
        else (Verdict.PASS, "writes and reads were tried, and the data is correct")
    )


RULES = (
    _check_no_registration_route,
    _check_peermem_symbols,
    _check_peermem_refused,
    _check_no_dmabuf_region,
    _check_no_dmabuf_export,
    _check_no_gpudirect,
    _check_topology_veto,
    _check_p2p_one_way,
)
