"""Identity of a host, by which reports of many hosts are distinguished.

Two machines made from one image may have the same name and machine ID; see :mod:`gdrkit.report.fleet`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["HostIdentity", "host_identity"]

_SALT = "gdrkit host identity"
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """A host's name, and a digest that differs between hosts of the same name.

    Attributes
    ----------
    name : str
        Host name of the kernel; empty if it cannot be read.
    digest : str or None
        Salted digest of the machine ID, which itself must not leave the machine (machine-id(5)); None if it is missing.
    """

    name: str
    digest: str | None


def host_identity(tree: HostTree) -> HostIdentity:
    """Return the identity of the host behind `tree`."""
    machine_id = tree.text("/etc/machine-id")
    digest = hashlib.sha256(f"{_SALT}:{machine_id}".encode()).hexdigest()[:_DIGITS] if machine_id else None
    return HostIdentity(name=tree.text("/proc/sys/kernel/hostname") or "", digest=digest)
