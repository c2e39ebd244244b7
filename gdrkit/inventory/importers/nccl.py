"""Importer of NCCL's topology XML (from ``NCCL_TOPO_DUMP_FILE``, or written by hand).

The file has CPUs, PCI functions nested below them, and RDMA devices (``net``) of functions. It has no host bridges. The
importer adds one host bridge for each ``cpu`` and puts the functions of that ``cpu`` below it. The distance between
such functions is then PHB (over a host bridge), as it is in NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.inventory.capture import SCHEMA_VERSION, Capture
from gdrkit.inventory.importers.functions import (
    DEPTH_MAX,
    FUNCTIONS_MAX,
    PciFunction,
    make_malformed_error,
    make_sysfs_reads,
    parse_address,
)

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

__all__ = ["import_nccl_topology"]

_SOURCE_NAME = "NCCL topology"
_BYTES_MAX = 8 << 20
# An element takes up to 400 bytes of memory, and an attribute up to 200.
_ELEMENTS_MAX = 200_000
_ATTRIBUTES_MAX = 400_000
# Attributes of <pci>, and the files of sysfs from which NCCL reads them.
_SYSFS_FILE_BY_ATTRIBUTE = {
    "class": "class",
    "vendor": "vendor",
    "device": "device",
    "subsystem_vendor": "subsystem_vendor",
    "subsystem_device": "subsystem_device",
    "link_speed": "current_link_speed",
    "link_width": "current_link_width",
}
_HEX_FILES = ("class", "vendor", "device")


def import_nccl_topology(data: bytes) -> Capture:
    """Parse a topology XML of NCCL and return it as a capture.

    Raises
    ------
    UsageError
        ``MALFORMED``: the data is not XML, has entities or a document type, exceeds the limits of this module, or does
        not have the form of NCCL's file.
    """
    if len(data) > _BYTES_MAX:
        raise make_malformed_error(_SOURCE_NAME, f"{len(data)} bytes, more than {_BYTES_MAX}")
    if data.count(b"<") > _ELEMENTS_MAX or data.count(b"=") > _ATTRIBUTES_MAX:
        raise make_malformed_error(_SOURCE_NAME, f"more than {_ELEMENTS_MAX} elements or {_ATTRIBUTES_MAX} attributes")
    system = _parse_xml(data)
    if system.tag != "system":
        raise make_malformed_error(_SOURCE_NAME, f"the root element must be <system>, not <{system.tag[:40]}>")
    function_by_address: dict[str, PciFunction] = {}
    for cpu in system.findall("cpu"):
        numa_node = cpu.get("numaid", "-1")
        if not numa_node.lstrip("-").isdecimal() or len(numa_node) > 4:  # noqa: PLR2004 - no node number is longer.
            raise make_malformed_error(_SOURCE_NAME, f"numaid {numa_node[:40]!r} is not a number")
        _import_functions(
            cpu,
            function_by_address,
            host_bridge=f"pci{int(numa_node) & 0xFFFF:04x}:cpu",
            numa_node=numa_node,
            bridges=(),
        )
    if not function_by_address:
        raise make_malformed_error(_SOURCE_NAME, "no <cpu> contains a <pci>")
    return Capture(
        schema_version=SCHEMA_VERSION, origin="NCCL topology XML", answers=make_sysfs_reads(function_by_address)
    )


def _parse_xml(data: bytes) -> Element:
    from xml.etree.ElementTree import ParseError

    from defusedxml.common import DefusedXmlException
    from defusedxml.ElementTree import fromstring

    try:
        # NCCL begins the file with an empty line, which XML does not allow before a declaration; strip() removes it.
        # The data is decoded here, so that its declaration cannot choose another encoding. In another encoding, the
        # checks in import_nccl_topology() would not have counted all elements and attributes.
        root: Element = fromstring(data.decode("utf-8").strip(), forbid_dtd=True)
    except DefusedXmlException as error:
        raise make_malformed_error(
            _SOURCE_NAME, f"it has a document type or an entity, which NCCL never writes: {error}"
        ) from error
    except (ParseError, ValueError, LookupError, RecursionError) as error:
        raise make_malformed_error(_SOURCE_NAME, f"not XML: {error}") from error
    return root


def _import_functions(
    parent: Element,
    function_by_address: dict[str, PciFunction],
    *,
    host_bridge: str,
    numa_node: str,
    bridges: tuple[str, ...],
) -> None:
    if len(bridges) > DEPTH_MAX:
        raise make_malformed_error(_SOURCE_NAME, f"bridges are nested more than {DEPTH_MAX} deep")
    for element in parent.findall("pci"):
        address = parse_address(element.get("busid", ""), _SOURCE_NAME)
        if address in function_by_address:
            raise make_malformed_error(_SOURCE_NAME, f"it contains {address} twice")
        if len(function_by_address) >= FUNCTIONS_MAX:
            raise make_malformed_error(_SOURCE_NAME, f"more than {FUNCTIONS_MAX} functions")
        function_by_address[address] = PciFunction(
            address=address,
            host_bridge=host_bridge,
            bridges=bridges,
            files={"numa_node": numa_node} | _read_attributes(element),
            rdma_names=tuple(_read_rdma_names(element)),
        )
        _import_functions(
            element, function_by_address, host_bridge=host_bridge, numa_node=numa_node, bridges=(*bridges, address)
        )


def _read_attributes(element: Element) -> dict[str, str]:
    text_by_file = {
        file: value for name, file in _SYSFS_FILE_BY_ATTRIBUTE.items() if (value := element.get(name)) is not None
    }
    for name in _HEX_FILES:
        # A topology written by hand may omit vendor and device, but their files in sysfs must contain a number. No
        # vendor has the id 0.
        text = text_by_file.setdefault(name, "0x0")
        try:
            int(text, 16)
        except ValueError as error:
            raise make_malformed_error(_SOURCE_NAME, f"{name} {text[:40]!r} is not a number") from error
    return text_by_file


def _read_rdma_names(element: Element) -> list[str]:
    names = [net.get("name", "") for net in element.findall("nic/net")]
    for name in names:
        if not name or "/" in name or name in (".", "..") or not name.isprintable():
            raise make_malformed_error(_SOURCE_NAME, f"{name[:40]!r} is not a device name")
    return names
