"""Facts about the kernel: release, command line, modules, NVIDIA driver version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["KernelFacts", "kernel_facts", "nvidia_driver_version"]

# The modules on which direct transfers between devices depend.
_MODULE_NAMES = (
    "efa",
    "gdrdrv",
    "habanalabs",
    "ib_core",
    "ib_uverbs",
    "irdma",
    "mlx5_ib",
    "nv_peer_mem",
    "nvidia",
    "nvidia_fs",
    "nvidia_peermem",
    "nvidia_uvm",
    "rdma_rxe",
    "siw",
)
# Beginnings of the words of the kernel command line that configure the IOMMU and PCI.
_IOMMU_ARGUMENT_PREFIXES = ("iommu", "intel_iommu", "amd_iommu", "pci=")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Facts that the kernel states about itself.

    Attributes
    ----------
    release : str or None
        Kernel release, e.g. ``6.1.0-31-amd64``.
    distribution : str or None
        PRETTY_NAME of /etc/os-release.
    iommu_arguments : tuple of str
        The words of the kernel command line that configure the IOMMU and PCI.
    iommu_group_count : int
        Number of IOMMU groups; 0 if no IOMMU translates.
    modules : tuple of str
        The modules in /sys/module on which direct transfers depend: loaded modules, and built-in ones with parameters.
    """

    release: str | None
    distribution: str | None
    iommu_arguments: tuple[str, ...]
    iommu_group_count: int
    modules: tuple[str, ...]


def kernel_facts(tree: HostTree) -> KernelFacts:
    """Read the facts about the kernel of `tree`."""
    kernel_arguments = (tree.text("/proc/cmdline") or "").split()
    loaded_modules = set(tree.names("/sys/module"))
    return KernelFacts(
        release=tree.text("/proc/sys/kernel/osrelease"),
        distribution=_read_distribution(tree.text("/etc/os-release") or ""),
        iommu_arguments=tuple(
            argument for argument in kernel_arguments if argument.startswith(_IOMMU_ARGUMENT_PREFIXES)
        ),
        iommu_group_count=len(tree.names("/sys/kernel/iommu_groups")),
        modules=tuple(name for name in _MODULE_NAMES if name in loaded_modules),
    )


def nvidia_driver_version(tree: HostTree) -> str | None:
    """Return the version of the loaded NVIDIA kernel driver, e.g. ``580.159.04``, or None if it is not loaded."""
    version_text = tree.text("/proc/driver/nvidia/version") or ""
    line = next((line for line in version_text.splitlines() if line.startswith("NVRM version:")), "")
    version_match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", line)
    return version_match.group() if version_match else None


def _read_distribution(os_release_text: str) -> str | None:
    for line in os_release_text.splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip().strip("\"'") or None
    return None
