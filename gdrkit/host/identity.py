"""Which host this is, so that the reports of many can be told apart.

Level 2. Two machines made from one image may have one name and one machine id; see :mod:`gdrkit.report.fleet`.
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
    """What a host calls itself, and what tells it from another of that name.

    Attributes
    ----------
    name : str
        As the kernel has it; empty when it cannot be read.
    digest : str or None
        Over the machine id, which must not leave the machine itself (machine-id(5)); None where there is none.
    """

    name: str
    digest: str | None


def host_identity(tree: HostTree) -> HostIdentity:
    """That of the host behind `tree`."""
    machine_id = tree.text("/etc/machine-id")
    digest = hashlib.sha256(f"{_SALT}:{machine_id}".encode()).hexdigest()[:_DIGITS] if machine_id else None
    return HostIdentity(name=tree.text("/proc/sys/kernel/hostname") or "", digest=digest)
