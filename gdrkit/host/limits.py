"""Limits of a process: locked memory, open files, capabilities."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["Limits", "process_limits"]

# The capabilities (linux/capability.h) on which pinning, raw devices, users and namespaces depend.
_CAPABILITIES = {
    7: "CAP_SETUID",
    12: "CAP_NET_ADMIN",
    13: "CAP_NET_RAW",
    14: "CAP_IPC_LOCK",
    17: "CAP_SYS_RAWIO",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
    24: "CAP_SYS_RESOURCE",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process.

    Attributes
    ----------
    memlock_bytes : int or None
        Soft RLIMIT_MEMLOCK in bytes; None if it is unlimited. It does not bind a process with CAP_IPC_LOCK.
    memlock_known : bool
        Whether the limit could be read.
    open_files : int or None
        Soft RLIMIT_NOFILE.
    capabilities : tuple of str
        The effective capabilities, of those that matter here.
    """

    memlock_bytes: int | None
    memlock_known: bool
    open_files: int | None
    capabilities: tuple[str, ...]


def process_limits(tree: HostTree, *, process: str = "self") -> Limits:
    """Read the limits of a process, which is a process ID or ``self``."""
    text = tree.text(f"/proc/{process}/limits") or ""
    memlock = _soft(text, "Max locked memory")
    files = _soft(text, "Max open files")
    return Limits(
        memlock_bytes=int(memlock) if memlock is not None and memlock.isdecimal() else None,
        memlock_known=memlock is not None,
        open_files=int(files) if files is not None and files.isdecimal() else None,
        capabilities=_capabilities(tree.text(f"/proc/{process}/status") or ""),
    )


def _soft(text: str, name: str) -> str | None:
    matched = re.search(rf"^{re.escape(name)}\s+(\d+|unlimited)\s", text, re.MULTILINE)
    return matched.group(1) if matched else None


def _capabilities(status: str) -> tuple[str, ...]:
    matched = re.search(r"^CapEff:\s*([0-9a-fA-F]+)\s*$", status, re.MULTILINE)
    bits = int(matched.group(1), 16) if matched else 0
    return tuple(name for bit, name in _CAPABILITIES.items() if bits >> bit & 1)
