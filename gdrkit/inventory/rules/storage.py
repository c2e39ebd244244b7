"""Rules about why cuFile does not read files directly into GPU memory: kernel drivers, and the configuration of cuFile.

cuFile can transfer directly by nvidia-fs or by P2PDMA. If one of them is missing, that is a fault only if the other is
missing too.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from gdrkit.errors import Reason
from gdrkit.inventory import cufile_json
from gdrkit.inventory.observation import DESCRIPTOR_0
from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule
from gdrkit.text import format_count

if TYPE_CHECKING:
    from gdrkit.inventory.observation import Observation

__all__ = ["RULES"]

_NVIDIA_FS_FOLDER = "/proc/driver/nvidia-fs"
_NVIDIA_PARAMS_PATH = "/proc/driver/nvidia/params"
# Major version of the first NVIDIA driver that supports P2PDMA.
_P2PDMA_DRIVER_MIN = 565
# The statuses CU_FILE_DRIVER_VERSION_MISMATCH and CU_FILE_DRIVER_NOT_INITIALIZED of cuFileDriverOpen.
_VERSION_MISMATCH_STATUSES = (5004, 5001)
# Before this version of Linux, KASLR shrinks the direct map even if P2PDMA is built in. It then covers the memory and a
# padding. The padding here is the default of CONFIG_RANDOMIZE_MEMORY_PHYSICAL_PADDING with memory hotplug, which P2PDMA
# needs.
_WHOLE_DIRECT_MAP_KERNEL_MIN, _DIRECT_MAP_PADDING_TIB = (6, 15), 10
_REFUSED_RANGE = re.compile(
    r"Hotplugged memory exceeds maximum addressable address, range=(0x[0-9a-f]+)-(0x[0-9a-f]+)", re.IGNORECASE
)
_PAGE_BYTES, _TIB = 4096, 1 << 40  # The page size of x86.
# Values of CUFILE_FORCE_COMPAT_MODE that switch the mode on, and parts of the lines of cufile.log about a fallback.
_TRUE_WORDS = ("1", "true", "yes")
_FALLBACK_MESSAGES = ("running in compatible mode", "compatible mode", "Falling back")


@rule(
    code="nvidia-fs-absent",
    title="nvidia-fs is not loaded, or not bound to the storage driver",
    why="Without nvidia-fs and without P2PDMA every cuFile transfer goes through host memory. The data is correct, and "
    "no call reports an error.",
    remedy="install nvidia-fs (nvidia-gds) and `modprobe nvidia_fs` before the storage driver; it binds only to an "
    "nvme module that it was built for. Or set up P2PDMA (`gdrkit explain p2pdma-off`)",
    reads="/proc/driver/nvidia-fs, its file modules; the kernel log",
)
def _check_nvidia_fs_absent(context: RuleContext) -> RuleResult:  # noqa: PLR0911 - one return per result.
    if not context.has_gpu:
        return context.not_run("no GPU here")
    if context.exists(_NVIDIA_FS_FOLDER):
        modules_text = context.text(f"{_NVIDIA_FS_FOLDER}/modules") or ""
        if not modules_text.strip():
            return context.fails("nvidia-fs is loaded, but no storage driver has registered with it")
        has_local_nvme = any(controller.transport in (None, "pcie") for controller in context.facts.nvme)
        if has_local_nvme and not re.search(r"^nvme\b", modules_text, re.MULTILINE):
            return context.fails("nvidia-fs is loaded, but the nvme driver has not registered with it")
        driver_names = ", ".join(line.split(":")[0].strip() for line in modules_text.splitlines())
        return context.passes(f"nvidia-fs is loaded, with {driver_names}")
    if context.is_uncaptured(_NVIDIA_FS_FOLDER):
        return context.not_run("the capture does not contain the files of this rule")
    # The result None, which is not equal to [], means that there is no NVMe controller on PCI.
    if _find_missing_p2pdma_conditions(context) == []:
        return context.passes("nvidia-fs is not loaded, but P2PDMA works instead")
    return context.fails("nvidia-fs is not loaded, and P2PDMA is not possible either")


@rule(
    code="nvidia-fs-version",
    title="the versions of nvidia-fs, cuFile and the driver do not match",
    why="A driver that is too old, or the proprietary driver, lacks the functions nvidia_p2p_*. Then nvidia-fs does "
    "not load, or libcufile refuses its version.",
    remedy="install driver, nvidia-fs and cuFile of one CUDA release; since nvidia-fs 2.17.5 the open kernel module is "
    "needed on x86_64",
    reads="the kernel log; /proc/driver/nvidia-fs/version; the error of cuFileDriverOpen",
    privilege="CAP_SYSLOG where kernel.dmesg_restrict is 1",
)
def _check_nvidia_fs_version(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    kernel_log = context.machine.kernel_log
    refusal_lines = [
        line for line in kernel_log.lines if "nvidia_fs" in line and "nvidia_p2p" in line and "symbol" in line
    ]
    if refusal_lines:
        context.record("kernel log", refusal_lines[-1])
        return context.fails("the kernel refused nvidia_fs because of its symbols")
    observation = context.observe_cufile("driver_open")
    if observation and observation.failure and observation.failure.status in _VERSION_MISMATCH_STATUSES:
        return context.fails(f"cuFileDriverOpen: {observation.failure.message}")
    version = context.text(f"{_NVIDIA_FS_FOLDER}/version")
    if version is None:
        if kernel_log.unreadable:
            return context.not_run(
                "nvidia-fs is not loaded; the kernel log, which would have the reason, cannot be "
                f"read: {kernel_log.unreadable}"
            )
        return context.passes("the kernel log reports no nvidia_fs that was refused because of its symbols")
    return context.passes(f"{version.splitlines()[0] if version else 'nvidia-fs'} is loaded and was not refused")


def _find_missing_p2pdma_conditions(context: RuleContext) -> list[str] | None:
    """Return the conditions of P2PDMA that this machine does not meet, or None if it has no NVMe controller on PCI."""
    if not context.nvme_functions:
        return None
    missing_conditions = []
    if not context.lines("/proc/kallsyms", "p2pdma_pgmap_ops"):
        missing_conditions.append("the kernel has no p2pdma_pgmap_ops")
    version_text = context.tree.text("/proc/driver/nvidia/version") or ""
    major_match = re.search(r"\b(\d+)\.\d+", version_text)
    context.record("/proc/driver/nvidia/version", version_text.splitlines()[0] if version_text else "not readable")
    if "Open Kernel Module" not in version_text or major_match is None or int(major_match[1]) < _P2PDMA_DRIVER_MIN:
        missing_conditions.append(f"no open kernel module of driver {_P2PDMA_DRIVER_MIN} or newer")
    registry_lines = [
        line
        for line in (context.tree.text(_NVIDIA_PARAMS_PATH) or "").splitlines()
        if line.startswith("RegistryDwords:")
    ]
    context.record(_NVIDIA_PARAMS_PATH, registry_lines[0] if registry_lines else "no RegistryDwords")
    missing_conditions += (
        [] if registry_lines and "RMForceStaticBar1=1" in registry_lines[0] else ["RMForceStaticBar1=1 is not set"]
    )
    if (context.text("/sys/module/nvme_core/parameters/multipath") or "N") != "N":
        missing_conditions.append("nvme_core.multipath is on")
    _, cufile_config = context.cufile_config()
    if cufile_json.get_value(cufile_config, "properties", "use_pci_p2pdma") is not True:
        missing_conditions.append("use_pci_p2pdma is not true in cufile.json")
    return missing_conditions


@rule(
    code="p2pdma-off",
    title="the P2PDMA route of NVMe is off",
    why="Since CUDA 12.8 an NVMe can reach GPU memory without nvidia-fs. Five settings must be correct for this, and "
    "no message names the wrong one.",
    remedy='open kernel module 565 or newer; NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1"; '
    "nvme_core.multipath=N; use_pci_p2pdma in cufile.json, in properties and in block.nvme",
    reads="/proc/kallsyms, /proc/driver/nvidia/{version,params}, /sys/module/nvme_core/parameters/multipath, "
    "cufile.json",
)
def _check_p2pdma_off(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    missing_conditions = _find_missing_p2pdma_conditions(context)
    if missing_conditions is None:
        return context.not_run("no NVMe on PCI")
    if context.is_uncaptured("/proc/driver/nvidia/version"):
        return context.not_run("the capture does not contain the files of this rule")
    if not missing_conditions:
        return context.passes("all settings for P2PDMA are correct")
    if context.exists(f"{_NVIDIA_FS_FOLDER}/modules"):
        return context.passes(f"{missing_conditions[0]}, but nvidia-fs works instead")
    return context.fails("; ".join(missing_conditions))


@rule(
    code="kaslr-p2pdma",
    title="KASLR leaves no room for BAR1 of a GPU in the kernel's direct map",
    why="P2PDMA maps BAR1 of the GPU at its place in the direct map. On x86, KASLR cuts the direct map off after the "
    "installed memory and a padding, so that a BAR1 with a high address does not fit: no direct NVMe transfers.",
    remedy="boot with nokaslr, or use Linux 6.15 or newer, or a kernel with the commit 7ffb791423c7; or use nvidia-fs",
    reads="the kernel log; /proc/cmdline, /proc/sys/kernel/osrelease, /proc/zoneinfo, "
    "/sys/bus/pci/devices/*/{resource,p2pmem/size}, CONFIG_RANDOMIZE_MEMORY and _PHYSICAL_PADDING of the kernel",
    privilege="CAP_SYSLOG where kernel.dmesg_restrict is 1",
    source="commit 7ffb791423c7 of Linux (x86/kaslr: Reduce KASLR entropy on most x86 systems); "
    "kernel_randomize_memory(), mhp_range_allowed() and pci_p2pdma_add_resource() of Linux; release notes "
    "of GPUDirect Storage",
)
def _check_kaslr_p2pdma(context: RuleContext) -> RuleResult:  # noqa: PLR0911 - one return per result.
    if not context.has_gpu:
        return context.not_run("no GPU here")
    if not context.nvme_functions:
        return context.not_run("no NVMe on PCI")
    bar1_range_by_gpu = {
        gpu.address: bar1_range for gpu in context.gpus if (bar1_range := context.bar1_range(gpu.address))
    }
    for line in context.machine.kernel_log.lines:
        refused_range_match = _REFUSED_RANGE.search(line)
        if refused_range_match and any(
            _is_overlapping((int(refused_range_match[1], 16), int(refused_range_match[2], 16)), bar1_range)
            for bar1_range in bar1_range_by_gpu.values()
        ):
            context.record("kernel log", line)
            return context.fails(f"the kernel refused to map BAR1 of a GPU: {refused_range_match[0]}")
    if "nokaslr" in (context.text("/proc/cmdline") or "").split():
        return context.passes("KASLR is off")
    if context.facts.machine not in ("x86_64", ""):
        return context.not_run(f"the direct map of {context.facts.machine} does not depend on KASLR")
    if not bar1_range_by_gpu or context.kernel_version() == (0, 0):
        return context.not_run("the address of BAR1 or the version of Linux cannot be read")
    if context.kernel_version() >= _WHOLE_DIRECT_MAP_KERNEL_MIN:
        return context.passes("this version of Linux keeps the direct map whole")
    return _compare_with_direct_map(context, bar1_range_by_gpu)


def _compare_with_direct_map(context: RuleContext, bar1_range_by_gpu: dict[str, tuple[int, int]]) -> RuleResult:
    """Compare BAR1 of each GPU with the part of the physical address space that a kernel with KASLR can map."""
    kernel_config = context.kernel_config()
    if kernel_config and "CONFIG_RANDOMIZE_MEMORY=y" not in kernel_config:
        return context.passes("the kernel was built without KASLR of memory")
    memory_end_bytes = _read_memory_end(context)
    if memory_end_bytes is None:
        return context.not_run("/proc/zoneinfo cannot be read")
    padding_match = re.search(r"^CONFIG_RANDOMIZE_MEMORY_PHYSICAL_PADDING=(0x[0-9a-f]+)$", kernel_config, re.MULTILINE)
    padding_tib = int(padding_match[1], 16) if padding_match else _DIRECT_MAP_PADDING_TIB
    # The end of the memory is rounded up to whole TiB.
    direct_map_tib = -(-memory_end_bytes // _TIB) + padding_tib
    gpus_beyond_map = [
        address
        for address, bar1_range in bar1_range_by_gpu.items()
        if bar1_range[1] >= direct_map_tib * _TIB and not _is_mapped_by_p2pdma(context, address)
    ]
    map_text = f"the first {direct_map_tib} TiB of addresses, {padding_tib} TiB more than the memory"
    context.record("direct map with KASLR", map_text)
    if not gpus_beyond_map:
        return context.passes(f"BAR1 of every GPU is in the direct map, which with KASLR has at least {map_text}")
    cause = f"BAR1 of {', '.join(gpus_beyond_map)} is beyond the direct map, which with KASLR has {map_text}"
    if context.exists(f"{_NVIDIA_FS_FOLDER}/modules"):
        return context.passes(f"{cause}, but nvidia-fs works instead")
    return context.unproven(f"{cause}, unless this kernel has the commit 7ffb791423c7")


def _read_memory_end(context: RuleContext) -> int | None:
    """Return the physical address at which the memory ends, or None if it cannot be read."""
    # Each zone has a line with the number of its pages (spanned) and, further below, a line with its first page number.
    memory_end_bytes, spanned_pages = None, 0
    for line in context.tree.lines("/proc/zoneinfo", ("spanned", "start_pfn:")):
        words = line.split()
        if words[0] == "spanned" and words[-1].isdecimal():
            spanned_pages = int(words[-1])
        elif words[0] == "start_pfn:" and words[-1].isdecimal():
            memory_end_bytes = max(memory_end_bytes or 0, (int(words[-1]) + spanned_pages) * _PAGE_BYTES)
    context.record(
        "/proc/zoneinfo", "not readable" if memory_end_bytes is None else f"memory ends at {memory_end_bytes:#x}"
    )
    return memory_end_bytes


def _is_mapped_by_p2pdma(context: RuleContext, address: str) -> bool:
    """Return whether the kernel has mapped memory of a PCI function for P2PDMA.

    pci_p2pdma_add_resource() makes the folder first, and adds to the size only after it has mapped the memory.
    """
    path = f"/sys/bus/pci/devices/{address}/p2pmem/size"
    mapped_bytes = context.tree.number(path)
    context.record(path, "does not exist" if mapped_bytes is None else mapped_bytes)
    return bool(mapped_bytes)


def _is_overlapping(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Return whether two ranges overlap. A range has its first and its last address."""
    return first[0] <= second[1] and second[0] <= first[1]


@rule(
    code="cufile-descriptor-0",
    title="cuFileDriverOpen closes descriptor 0 of the process",
    why="If nvidia-fs is loaded and this container has none of its device nodes, the call fails and closes descriptor "
    "0. The next open returns 0. Programs that the process starts then have a data file as standard input, or none.",
    remedy="start the container with `--device /dev/nvidia-fs0` and the other /dev/nvidia-fs* (or `--privileged`); "
    "if that is not possible, do not call cuFileDriverOpen, or restore descriptor 0 from a duplicate after it",
    reads="/proc/driver/nvidia-fs/devcount, /dev/nvidia-fs*; descriptor 0 before and after cuFileDriverOpen in a child "
    "process",
    experiment="driver_open",
    source="foundation-model-stack/fastsafetensors #102; NVIDIA/DALI #5902",
)
def _check_cufile_descriptor_0(context: RuleContext) -> RuleResult:
    if not any(library.path for library in context.facts.libraries if library.soname == "libcufile.so.0"):
        return context.not_run("no libcufile here")
    observation = context.observe_cufile("driver_open")
    if observation is not None and DESCRIPTOR_0 in observation.seen:
        return context.fails("cuFileDriverOpen was called, and descriptor 0 was closed")
    if observation is not None and _has_driver_open_returned(observation):
        return context.passes("cuFileDriverOpen was called, and descriptor 0 is still open")
    device_count = context.tree.number(f"{_NVIDIA_FS_FOLDER}/devcount")
    context.record(f"{_NVIDIA_FS_FOLDER}/devcount", "does not exist" if device_count is None else device_count)
    if context.is_uncaptured(f"{_NVIDIA_FS_FOLDER}/devcount") or not context.tree.names("/dev"):
        return context.not_run("the devices of nvidia-fs or /dev cannot be read")
    device_nodes = [name for name in context.tree.names("/dev") if name.startswith("nvidia-fs")]
    context.record("/dev/nvidia-fs*", ", ".join(device_nodes) or "does not exist")
    if device_count and not device_nodes:
        return context.fails(f"nvidia-fs has {format_count(device_count, 'device')}, and /dev has no nvidia-fs*")
    return context.passes("nvidia-fs has its device nodes" if device_count else "nvidia-fs is not loaded")


def _has_driver_open_returned(observation: Observation) -> bool:
    """Return whether cuFileDriverOpen returned in the child process, with success or with an error."""
    failure = observation.failure
    return failure is None or (failure.operation == "cuFileDriverOpen" and failure.reason is not Reason.TIMEOUT)


@rule(
    code="cufile-compat",
    title="cufile.json forces or allows compatibility mode",
    why="In compatibility mode, cuFile reads by POSIX calls and copies. The transfers are slow, and no call fails.",
    remedy="set force_compat_mode and allow_compat_mode to false in cufile.json, so that an I/O that cannot be direct "
    "fails",
    reads="the file named by CUFILE_ENV_PATH_JSON, else /etc/cufile.json; CUFILE_FORCE_COMPAT_MODE",
)
def _check_cufile_compat(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    force_variable = context.machine.environment.get("CUFILE_FORCE_COMPAT_MODE", "")
    if force_variable.lower() in _TRUE_WORDS:
        context.record("CUFILE_FORCE_COMPAT_MODE", force_variable)
        return context.fails("CUFILE_FORCE_COMPAT_MODE forces compatibility mode")
    config_path, cufile_config = context.cufile_config()
    settings = {
        name: cufile_json.get_value(cufile_config, "properties", name)
        for name in ("force_compat_mode", "allow_compat_mode", "gds_fallback_io", "vanilla_posix_io_mode")
    }
    for name, setting in settings.items():
        context.record(
            f"{config_path or cufile_json.DEFAULT_PATH} properties.{name}", "not set" if setting is None else setting
        )
    forcing_settings = [name for name in ("force_compat_mode", "vanilla_posix_io_mode") if settings[name] is True]
    if forcing_settings:
        return context.fails(f"{config_path}: {' and '.join(forcing_settings)} is true")
    if settings["allow_compat_mode"] is False and settings["gds_fallback_io"] is not True:
        return context.passes(f"{config_path} does not allow compatibility mode: an I/O that cannot be direct fails")
    if context.is_uncaptured(cufile_json.DEFAULT_PATH):
        return context.not_run("the capture does not contain the files of this rule")
    return context.unproven("compatibility mode is allowed: an I/O that cannot be direct does not fail")


@rule(
    code="silent-fallback",
    title="cuFile has fallen back in earlier runs",
    why="After a fallback, the data is correct and every call has succeeded. Only the log and the counters show it.",
    remedy='find the reason on the line above in cufile.log; run with "profile": {"cufile_stats": 3} and look at '
    "n_posix_reads",
    reads="cufile.log (logging.dir of cufile.json, CUFILE_LOGFILE_PATH); /proc/driver/nvidia-fs/stats, "
    "/sys/module/nvidia_fs/parameters/rw_stats_enabled",
)
def _check_silent_fallback(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    _, cufile_config = context.cufile_config()
    log_folder = cufile_json.get_value(cufile_config, "logging", "dir")
    log_path = context.machine.environment.get("CUFILE_LOGFILE_PATH", "")
    if not log_path and isinstance(log_folder, str) and log_folder.startswith("/"):
        log_path = posixpath.join(log_folder, "cufile.log")
    fallback_lines = context.lines(log_path, *_FALLBACK_MESSAGES) if log_path.startswith("/") else ()
    if fallback_lines:
        return context.fails(f"{log_path}: {fallback_lines[-1].strip()}")
    stats_text = context.tree.text(f"{_NVIDIA_FS_FOLDER}/stats")
    if stats_text is None:
        return context.not_run("there is no log of cuFile, and there are no counters of nvidia-fs")
    rw_stats_enabled = context.text("/sys/module/nvidia_fs/parameters/rw_stats_enabled")
    reads_line = next((line for line in stats_text.splitlines() if line.startswith("Reads")), "")
    context.record(f"{_NVIDIA_FS_FOLDER}/stats", reads_line)
    if rw_stats_enabled in ("0", "N"):
        return context.unproven("nvidia-fs does not count: rw_stats_enabled is 0")
    reads_count_match = re.search(r"n=(\d+)", reads_line)
    if reads_count_match and int(reads_count_match[1]) > 0:
        reads_text = format_count(int(reads_count_match[1]), "read")
        return context.passes(f"nvidia-fs has served {reads_text}, and no log mentions compatibility mode")
    return context.unproven("nvidia-fs has not served any reads yet")


RULES = (
    _check_nvidia_fs_absent,
    _check_nvidia_fs_version,
    _check_p2pdma_off,
    _check_kaslr_p2pdma,
    _check_cufile_descriptor_0,
    _check_cufile_compat,
    _check_silent_fallback,
)
