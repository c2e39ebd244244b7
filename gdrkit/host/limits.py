"""Limits of a process: locked memory, open files, capabilities."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["Limits", "process_limits", "raise_open_files_limit"]

# Largest soft limit that gdrkit sets. Some containers have a hard limit of 10**9, and a child process that has a table
# entry for each possible descriptor would need gigabytes of memory.
_OPEN_FILES_MAX = 1 << 20

# The capabilities (linux/capability.h) on which pinning, raw devices, users and namespaces depend.
_CAPABILITY_NAME_BY_BIT = {
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
        Soft RLIMIT_MEMLOCK in bytes; None if it is unlimited. The kernel ignores it for a process with CAP_IPC_LOCK.
    memlock_known : bool
        Whether the limit could be read.
    open_files : int or None
        Soft RLIMIT_NOFILE; None if it is unlimited or unknown.
    capabilities : tuple of str
        The effective capabilities of the process on which pinning, raw devices, users or namespaces depend.
    """

    memlock_bytes: int | None
    memlock_known: bool
    open_files: int | None
    capabilities: tuple[str, ...]


def process_limits(tree: HostTree, *, process: str = "self") -> Limits:
    """Read the limits of `process`, a process ID or ``self``."""
    limits_text = tree.text(f"/proc/{process}/limits") or ""
    memlock_text = _read_soft_limit(limits_text, "Max locked memory")
    open_files_text = _read_soft_limit(limits_text, "Max open files")
    return Limits(
        memlock_bytes=int(memlock_text) if memlock_text is not None and memlock_text.isdecimal() else None,
        memlock_known=memlock_text is not None,
        open_files=int(open_files_text) if open_files_text is not None and open_files_text.isdecimal() else None,
        capabilities=_read_capabilities(tree.text(f"/proc/{process}/status") or ""),
    )


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files of this process to its hard limit, or to 2**20 if that is less.

    The usual soft limit is 1024, for programs that call select(2). A server has one descriptor for each open file of a
    client, so it needs more.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_soft_limit = _OPEN_FILES_MAX if hard_limit == resource.RLIM_INFINITY else min(hard_limit, _OPEN_FILES_MAX)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < new_soft_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft_limit, hard_limit))


def _read_soft_limit(limits_text: str, limit_name: str) -> str | None:
    """Return the digits of the limit, ``unlimited``, or None if the text does not have the limit."""
    match = re.search(rf"^{re.escape(limit_name)}\s+(\d+|unlimited)\s", limits_text, re.MULTILINE)
    return match.group(1) if match else None


def _read_capabilities(status_text: str) -> tuple[str, ...]:
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)\s*$", status_text, re.MULTILINE)
    capability_bits = int(match.group(1), 16) if match else 0
    return tuple(name for bit, name in _CAPABILITY_NAME_BY_BIT.items() if capability_bits >> bit & 1)
