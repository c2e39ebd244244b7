"""Conversion of PCI functions to recorded reads of sysfs, for the importers of lspci output and NCCL topologies."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gdrkit.errors import Reason, UsageError
from gdrkit.inventory.capture import FUNCTIONS_MAX, RecordedReads

__all__ = ["DEPTH_MAX", "FUNCTIONS_MAX", "PciFunction", "make_malformed_error", "make_sysfs_reads", "parse_address"]

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
# Largest number of bridges between a host bridge and a function.
DEPTH_MAX = 32


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function.

    Attributes
    ----------
    address : str
        Address in the form of sysfs.
    host_bridge : str
        Name of the host bridge, e.g. ``pci0000:00``.
    bridges : tuple of str
        Addresses of the bridges between the host bridge and the function, the nearest one last.
    files : mapping
        Contents of the files in the folder of the function, by name, without line ends.
    config : bytes or None
        Config space; None if it is unknown.
    rdma_names : tuple of str
        Names of the RDMA devices of this function.
    links : mapping
        Targets of the symbolic links in the folder of the function, by name, such as ``driver``.
    """

    address: str
    host_bridge: str
    bridges: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    config: bytes | None = None
    rdma_names: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)


def make_malformed_error(source_name: str, detail: str) -> UsageError:
    """Return the error that every importer raises for a malformed file. `source_name` names the file in the text."""
    return UsageError(f"{source_name}: {detail}", reason=Reason.MALFORMED)


def parse_address(text: str, source_name: str) -> str:
    """Return a PCI address (``19:00.0``, ``00000000:19:00.0``) in the form of sysfs, ``0000:19:00.0``."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        message = f"{text[:40]!r} is not a PCI address"
        raise make_malformed_error(source_name, message)
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def make_sysfs_reads(function_by_address: dict[str, PciFunction]) -> RecordedReads:
    """Return the results of reads of sysfs on a machine that has the PCI functions in `function_by_address`."""
    reads = RecordedReads()
    reads.folders["/sys/bus/pci/devices"] = tuple(sorted(function_by_address))
    rdma_names = sorted(name for function in function_by_address.values() for name in function.rdma_names)
    if rdma_names:
        reads.folders["/sys/class/infiniband"] = tuple(rdma_names)
    for address, function in function_by_address.items():
        folder = "/".join(("/sys/devices", function.host_bridge, *function.bridges, address))
        reads.links[f"/sys/bus/pci/devices/{address}"] = f"../../..{folder.removeprefix('/sys')}"
        for file_name, text in function.files.items():
            reads.texts[f"{folder}/{file_name}"] = text
        if function.config is not None:
            reads.binaries[f"{folder}/config"] = _encode_base64(function.config)
        for link_name, target in function.links.items():
            reads.links[f"{folder}/{link_name}"] = target
        for rdma_name in function.rdma_names:
            reads.links[f"/sys/class/infiniband/{rdma_name}/device"] = f"/sys/bus/pci/devices/{address}"
    return reads


def _encode_base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()
