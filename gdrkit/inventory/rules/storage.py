"""Rules about files that do not go directly into GPU memory: the kernel and the configuration of cuFile.

nvidia-fs and P2PDMA are alternatives: the absence of one is a fault only if the other is missing too.
"""

from __future__ import annotations

import posixpath
import re

from gdrkit.inventory import cufile_json
from gdrkit.inventory.rules.base import Answer, Look, rule

__all__ = ["RULES"]

_NVIDIA_FS = "/proc/driver/nvidia-fs"
_PARAMS = "/proc/driver/nvidia/params"
_DRIVER_P2PDMA = 565
_VERSION_MISMATCH = (5004, 5001)
_TRUE = ("1", "true", "yes")
_FALLBACK_WORDS = ("running in compatible mode", "compatible mode", "Falling back")
_LOG_BYTES = 1 << 20


@rule(
    code="nvidia-fs-absent",
    title="nvidia-fs is not loaded, or not bound to the storage driver",
    why="Without it (and without P2PDMA) every cuFile transfer goes through host memory, with right data and without a "
    "word.",
    remedy="install nvidia-fs (nvidia-gds) and `modprobe nvidia_fs` before the storage driver; it binds only to an "
    "nvme module that it was built for. Or set up P2PDMA (`gdrkit explain p2pdma-off`)",
    reads="/proc/driver/nvidia-fs, its file modules; the kernel log",
)
def _absent(look: Look) -> Answer:  # noqa: PLR0911 - one return per answer.
    if not look.has_gpu:
        return look.not_run("no GPU here")
    if look.exists(_NVIDIA_FS):
        bound = look.text(f"{_NVIDIA_FS}/modules") or ""
        if not bound.strip():
            return look.fails("it is loaded, and no storage driver has registered with it")
        local = any(controller.transport in (None, "pcie") for controller in look.facts.nvme)
        if local and not re.search(r"^nvme\b", bound, re.MULTILINE):
            return look.fails("it is loaded, and the driver of the NVMe here is not among those registered with it")
        return look.passes(f"it is loaded, with {', '.join(line.split(':')[0].strip() for line in bound.splitlines())}")
    if look.is_uncaptured(_NVIDIA_FS):
        return look.not_run("the capture does not say")
    if _missing_for_p2pdma(look) == []:
        return look.passes("it is not loaded, and P2PDMA serves instead")
    return look.fails("nvidia-fs is not loaded, and P2PDMA is not possible either")


@rule(
    code="nvidia-fs-version",
    title="nvidia-fs, cuFile and the driver do not fit each other",
    why="A driver that is too old or the proprietary one lacks nvidia_p2p_*: the module does not load, or the library "
    "refuses its version.",
    remedy="install driver, nvidia-fs and cuFile of one CUDA release; since nvidia-fs 2.17.5 the open kernel module is "
    "needed on x86_64",
    reads="the kernel log; /proc/driver/nvidia-fs/version; the error of cuFileDriverOpen",
    privilege="CAP_SYSLOG where kernel.dmesg_restrict is 1",
)
def _version(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    log = look.machine.kernel_log
    refused = [line for line in log.lines if "nvidia_fs" in line and "nvidia_p2p" in line and "symbol" in line]
    if refused:
        look.saw("kernel log", refused[-1])
        return look.fails("the kernel refused nvidia_fs for its symbols")
    opened = look.tried_cufile("driver_open")
    if opened and opened.failure and opened.failure.status in _VERSION_MISMATCH:
        return look.fails(f"cuFileDriverOpen: {opened.failure.message}")
    version = look.text(f"{_NVIDIA_FS}/version")
    if version is None:
        if log.unreadable:
            return look.not_run(f"nvidia-fs is not loaded; why is in the kernel log: {log.unreadable}")
        return look.passes("no nvidia_fs was refused for its symbols, as far as the kernel log goes back")
    return look.passes(f"{version.splitlines()[0] if version else 'it'} is loaded and was not refused")


def _missing_for_p2pdma(look: Look) -> list[str] | None:
    """Return the missing conditions of the P2PDMA route; None if there is no NVMe controller on PCI."""
    if not look.nvme_functions:
        return None
    missing = []
    if not look.lines("/proc/kallsyms", "p2pdma_pgmap_ops"):
        missing.append("the kernel has no p2pdma_pgmap_ops")
    version = look.tree.text("/proc/driver/nvidia/version") or ""
    number = re.search(r"\b(\d+)\.\d+", version)
    look.saw("/proc/driver/nvidia/version", version.splitlines()[0] if version else "not readable")
    if "Open Kernel Module" not in version or number is None or int(number[1]) < _DRIVER_P2PDMA:
        missing.append(f"no open kernel module of driver {_DRIVER_P2PDMA} or newer")
    words = [line for line in (look.tree.text(_PARAMS) or "").splitlines() if line.startswith("RegistryDwords:")]
    look.saw(_PARAMS, words[0] if words else "no RegistryDwords")
    missing += [] if words and "RMForceStaticBar1=1" in words[0] else ["RMForceStaticBar1=1 is not set"]
    if (look.text("/sys/module/nvme_core/parameters/multipath") or "N") != "N":
        missing.append("nvme_core.multipath is on")
    _, config = look.config()
    if cufile_json.value(config, "properties", "use_pci_p2pdma") is not True:
        missing.append("use_pci_p2pdma is not true in cufile.json")
    return missing


@rule(
    code="p2pdma-off",
    title="the P2PDMA route of NVMe is off",
    why="Since CUDA 12.8 an NVMe can reach GPU memory without nvidia-fs; five settings must be right at once, and none "
    "says that it is missing.",
    remedy='open kernel module 565 or newer; NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1"; '
    "nvme_core.multipath=N; use_pci_p2pdma in cufile.json, in properties and in block.nvme",
    reads="/proc/kallsyms, /proc/driver/nvidia/{version,params}, /sys/module/nvme_core/parameters/multipath, "
    "cufile.json",
)
def _p2pdma(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    missing = _missing_for_p2pdma(look)
    if missing is None:
        return look.not_run("no NVMe on PCI")
    if look.is_uncaptured("/proc/driver/nvidia/version"):
        return look.not_run("the capture does not say")
    if not missing:
        return look.passes("everything that it needs is here")
    if look.exists(f"{_NVIDIA_FS}/modules"):
        return look.passes(f"{missing[0]}, and nvidia-fs serves instead")
    return look.fails("; ".join(missing))


@rule(
    code="cufile-compat",
    title="cufile.json forces or allows compatibility mode",
    why="In compatibility mode cuFile reads by POSIX and copies: the data is right, the speed is not, and no call "
    "fails.",
    remedy="set force_compat_mode and allow_compat_mode to false in cufile.json, so that what cannot be direct fails",
    reads="the file named by CUFILE_ENV_PATH_JSON, else /etc/cufile.json; CUFILE_FORCE_COMPAT_MODE",
)
def _compat(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    forced = look.machine.environment.get("CUFILE_FORCE_COMPAT_MODE", "")
    if forced.lower() in _TRUE:
        look.saw("CUFILE_FORCE_COMPAT_MODE", forced)
        return look.fails("CUFILE_FORCE_COMPAT_MODE forces it")
    path, config = look.config()
    found = {
        name: cufile_json.value(config, "properties", name)
        for name in ("force_compat_mode", "allow_compat_mode", "gds_fallback_io", "vanilla_posix_io_mode")
    }
    for name, setting in found.items():
        look.saw(f"{path or cufile_json.DEFAULT_PATH} properties.{name}", "not set" if setting is None else setting)
    forcing = [name for name in ("force_compat_mode", "vanilla_posix_io_mode") if found[name] is True]
    if forcing:
        return look.fails(f"{path}: {' and '.join(forcing)} is true")
    if found["allow_compat_mode"] is False and found["gds_fallback_io"] is not True:
        return look.passes(f"{path} does not allow it: what cannot be direct fails")
    if look.is_uncaptured(cufile_json.DEFAULT_PATH):
        return look.not_run("the capture does not say")
    return look.unproven("it is allowed: an I/O that cannot be direct is silently none")


@rule(
    code="silent-fallback",
    title="cuFile has fallen back in earlier runs",
    why="After a fallback the data is right and every call succeeded; only the log and the counters tell.",
    remedy='find the reason on the line above in cufile.log; run with "profile": {"cufile_stats": 3} and look at '
    "n_posix_reads",
    reads="cufile.log (logging.dir of cufile.json, CUFILE_LOGFILE_PATH); /proc/driver/nvidia-fs/stats, "
    "/sys/module/nvidia_fs/parameters/rw_stats_enabled",
)
def _fallback(look: Look) -> Answer:
    if not look.has_gpu:
        return look.not_run("no GPU here")
    _, config = look.config()
    folder = cufile_json.value(config, "logging", "dir")
    path = look.machine.environment.get("CUFILE_LOGFILE_PATH", "")
    if not path and isinstance(folder, str) and folder.startswith("/"):
        path = posixpath.join(folder, "cufile.log")
    said = look.lines(path, *_FALLBACK_WORDS) if path.startswith("/") else ()
    if said:
        return look.fails(f"{path}: {said[-1].strip()}")
    stats = look.tree.text(f"{_NVIDIA_FS}/stats")
    if stats is None:
        return look.not_run("neither a log of cuFile nor counters of nvidia-fs here")
    counting = look.text("/sys/module/nvidia_fs/parameters/rw_stats_enabled")
    line = next((line for line in stats.splitlines() if line.startswith("Reads")), "")
    look.saw(f"{_NVIDIA_FS}/stats", line)
    if counting in ("0", "N"):
        return look.unproven("nvidia-fs does not count: rw_stats_enabled is 0")
    count = re.search(r"n=(\d+)", line)
    if count and int(count[1]) > 0:
        return look.passes(f"nvidia-fs has served {count[1]} reads, and no log speaks of compatibility mode")
    return look.unproven("nvidia-fs has served nothing yet")


RULES = (_absent, _version, _p2pdma, _compat, _fallback)
