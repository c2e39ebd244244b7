"""Identity and model of a host. A report about many hosts uses the identity to tell them apart.

Two machines that were installed from one image may have the same name and machine ID; see :mod:`gdrkit.report.fleet`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["DMI_NAMES", "HostIdentity", "dmi_strings", "host_identity"]

# DMI strings that every user may read. They name the model of the machine or the cloud provider: Oracle's cloud (OCI)
# writes its name into the asset tag of the chassis.
DMI_NAMES = ("sys_vendor", "product_name", "chassis_asset_tag")

_SALT = "gdrkit host identity"
_DIGEST_DIGITS = 16


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """A host's name, and a digest of its machine ID, which distinguishes hosts of the same name.

    Attributes
    ----------
    name : str
        Host name of the kernel; empty if it cannot be read.
    digest : str or None
        Salted digest of the machine ID; None if the machine has no ID. The ID itself must not leave the machine, see
        machine-id(5).
    """

    name: str
    digest: str | None


def host_identity(tree: HostTree) -> HostIdentity:
    """Return the identity of the host whose files `tree` reads."""
    machine_id = tree.text("/etc/machine-id")
    digest = hashlib.sha256(f"{_SALT}:{machine_id}".encode()).hexdigest()[:_DIGEST_DIGITS] if machine_id else None
    return HostIdentity(name=tree.text("/proc/sys/kernel/hostname") or "", digest=digest)


def dmi_strings(tree: HostTree) -> dict[str, str]:
    """Return the strings of :data:`DMI_NAMES` that the firmware of the machine states, by their names in sysfs."""
    texts = {name: tree.text(f"/sys/class/dmi/id/{name}") for name in DMI_NAMES}
    return {name: text for name, text in texts.items() if text}
