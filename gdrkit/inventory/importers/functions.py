"""Conversion of PCI functions to captured answers under their paths in sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gdrkit.errors import Reason, UsageError
from gdrkit.inventory.capture import FUNCTIONS_MAX, Answers

__all__ = ["DEPTH_MAX", "FUNCTIONS_MAX", "Function", "address_of", "answers_of", "malformed"]

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
DEPTH_MAX = 32


@dataclass(frozen=True, slots=True)
class Function:
    """One PCI function.

    Attributes
    ----------
    address : str
        Address in the form of sysfs.
    root : str
        Name of the host bridge, e.g. ``pci0000:00``.
    above : tuple of str
        Addresses of the bridges between the host bridge and the function, the nearest one last.
    files : mapping
        Contents of the files in the folder of the function, by name, without line ends.
    config : bytes or None
        Config space, as far as it is known.
    rdma_names : tuple of str
        Names of the RDMA devices of this function.
    links : mapping
        Targets of the symbolic links in the folder of the function, by name, such as ``driver``.
    """

    address: str
    root: str
    above: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    config: bytes | None = None
    rdma_names: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)


def malformed(source: str, detail: str) -> UsageError:
    """Return the error that every importer raises for a malformed file."""
    return UsageError(f"{source}: {detail}", reason=Reason.MALFORMED)


def address_of(text: str, source: str) -> str:
    """Return a PCI address (``19:00.0``, ``00000000:19:00.0``) in the form of sysfs, ``0000:19:00.0``."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        message = f"{text[:40]!r} is no PCI address"
        raise malformed(source, message)
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def answers_of(functions: dict[str, Function]) -> Answers:
    """Return the answers that sysfs would have given about these functions, and no others."""
    answers = Answers()
    answers.folders["/sys/bus/pci/devices"] = tuple(sorted(functions))
    names = sorted(name for one in functions.values() for name in one.rdma_names)
    if names:
        answers.folders["/sys/class/infiniband"] = tuple(names)
    for address, one in functions.items():
        place = "/".join(("/sys/devices", one.root, *one.above, address))
        answers.links[f"/sys/bus/pci/devices/{address}"] = f"../../..{place.removeprefix('/sys')}"
        for name, text in one.files.items():
            answers.texts[f"{place}/{name}"] = text
        if one.config is not None:
            answers.binaries[f"{place}/config"] = _base64(one.config)
        for name, target in one.links.items():
            answers.links[f"{place}/{name}"] = target
        for name in one.rdma_names:
            answers.links[f"/sys/class/infiniband/{name}/device"] = f"/sys/bus/pci/devices/{address}"
    return answers


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()
