"""Hints that this process runs in a container or a virtual machine.

No single hint is reliable, so each one names the file from which it was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["container_hints", "virtual_machine_hint"]

_CONTAINER_NAME_BY_FILE = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
_VIRTUAL_PRODUCT_WORDS = ("KVM", "QEMU", "VMware", "Virtual Machine", "VirtualBox", "Bochs")
_CGROUP_WORDS = ("docker", "kubepods", "containerd", "lxc", "libpod", "slurm")


def container_hints(tree: HostTree) -> tuple[str, ...]:
    """Return hints of a container, such as ``docker (/.dockerenv)``; an empty tuple if there is none."""
    hints = [f"{name} ({path})" for path, name in _CONTAINER_NAME_BY_FILE.items() if tree.exists(path)]
    container_manager = tree.text("/run/systemd/container")
    if container_manager:
        hints.append(f"{container_manager} (/run/systemd/container)")
    cgroup_text = tree.text("/proc/1/cgroup") or ""
    hints += [f"{word} (/proc/1/cgroup)" for word in _CGROUP_WORDS if word in cgroup_text]
    return tuple(hints)


def virtual_machine_hint(tree: HostTree) -> str | None:
    """Return a hint of a virtual machine, e.g. ``the cpu flag hypervisor (/proc/cpuinfo)``; None if there is none."""
    for line in tree.lines("/proc/cpuinfo", ("flags",))[:1]:
        if "hypervisor" in line.split():
            return "the cpu flag hypervisor (/proc/cpuinfo)"
    product_name = tree.text("/sys/class/dmi/id/product_name") or ""
    matching_word = next((word for word in _VIRTUAL_PRODUCT_WORDS if word in product_name), None)
    return f"{product_name} (/sys/class/dmi/id/product_name)" if matching_word else None
