"""Hints that a process runs in a container.

Level 2. There is no one true sign; each hint names the file that it was read from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["container_hints"]

_MARKERS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
_CGROUP_WORDS = ("docker", "kubepods", "containerd", "lxc", "libpod", "slurm")


def container_hints(tree: HostTree) -> tuple[str, ...]:
    """E.g. ``docker (/.dockerenv)``; nothing on a plain host."""
    hints = [f"{name} ({path})" for path, name in _MARKERS.items() if tree.exists(path)]
    manager = tree.text("/run/systemd/container")
    if manager:
        hints.append(f"{manager} (/run/systemd/container)")
    cgroup = tree.text("/proc/1/cgroup") or ""
    hints += [f"{word} (/proc/1/cgroup)" for word in _CGROUP_WORDS if word in cgroup]
    return tuple(hints)
