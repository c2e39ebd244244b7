"""Importer of the output of ``lspci -vvv`` (also with -D, -n, -nn).

The output does not contain the config space, but it describes some of its registers. The importer converts them back to
the bytes that lspci read, so that :mod:`gdrkit.host.config_space` can parse them. A user who is not root can read only
the header of a config space. lspci prints ``<access denied>`` for the rest, and the importer then stores only a header,
filled with zeros.
"""

from __future__ import annotations

import io
import re
import struct
from dataclasses import dataclass, field

from gdrkit.inventory.capture import SCHEMA_VERSION, Capture
from gdrkit.inventory.importers.functions import (
    DEPTH_MAX,
    FUNCTIONS_MAX,
    PciFunction,
    make_malformed_error,
    make_sysfs_reads,
    parse_address,
)

__all__ = ["import_lspci"]

_SOURCE_NAME = "lspci"
_LINES_MAX = 500_000
_FUNCTION_LINE = re.compile(r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.+)", re.IGNORECASE)
_BUS_LINE = re.compile(r"\s+Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}),", re.IGNORECASE)
_VENDOR_AND_DEVICE = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_NUMERIC_IDENTITY = re.compile(r"([0-9a-f]{4}): ([0-9a-f]{4}):([0-9a-f]{4})", re.IGNORECASE)
_CLASS_NUMBER = re.compile(r"\[([0-9a-f]{4})\]:", re.IGNORECASE)
_LINK_TEXT = re.compile(r"Speed ([0-9.]+GT/s)(?: \(\w+\))?, Width (x\d+)")
_READ_REQUEST_TEXT = re.compile(r"MaxReadReq (\d+) bytes")
# The PCI classes that matter here, by the names that lspci prints (pci.ids). The bytes of a code are base class,
# subclass and interface.
_CLASS_CODE_BY_NAME = {
    "3D controller": 0x030200,
    "VGA compatible controller": 0x030000,
    "Infiniband controller": 0x020700,
    "Ethernet controller": 0x020000,
    "Network controller": 0x028000,
    "Non-Volatile memory controller": 0x010802,
    "PCI bridge": 0x060400,
    "Host bridge": 0x060000,
    "Bridge": 0x068000,
}
_VENDOR_ID_BY_NAME = {
    "NVIDIA": 0x10DE,
    "Mellanox": 0x15B3,
    "Intel": 0x8086,
    "Broadcom": 0x1000,
    "Advanced Micro Devices": 0x1022,
    "Micron": 0x1344,
    "Samsung": 0x144D,
}
_ACS_BITS = {"SrcValid": 0x01, "TransBlk": 0x02, "ReqRedir": 0x04, "CmpltRedir": 0x08, "UpstreamFwd": 0x10}
_CONFIG_BYTES, _HEADER_BYTES = 4096, 64
# Offsets of the capabilities in the config space that the importer makes. A real config space can have the PCIe
# capability and the second extended capability at other offsets.
_PCIE_CAPABILITY_OFFSET, _EXTENDED_CAPABILITY_OFFSETS = 0x40, (0x100, 0x110)
# The bit Enable Relaxed Ordering of the device control register, and the bit Enable of the control register of ATS.
_RELAXED_ORDERING_BIT, _ATS_ENABLE_BIT = 0x10, 0x8000


@dataclass
class _Block:
    """The lines of the output about one function.

    The first line of a function begins with its address. `first_line` has the rest: class, vendor and device.
    """

    address: str
    first_line: str
    lines: list[str] = field(default_factory=list)

    def find_text(self, name: str) -> str | None:
        """Return the rest of the first line that begins with ``name:``, or None if there is no such line."""
        line = next((line.strip() for line in self.lines if line.strip().startswith(f"{name}:")), None)
        return None if line is None else line.partition(":")[2].strip()


def import_lspci(data: bytes) -> Capture:
    """Parse the output of lspci and return it as a capture.

    Raises
    ------
    UsageError
        ``MALFORMED``: the text describes no PCI function, describes a function twice, exceeds the limits of this
        module, or its buses form a cycle.
    """
    block_by_address = _split_blocks(data)
    if not block_by_address:
        raise make_malformed_error(_SOURCE_NAME, "no line begins with a PCI address")
    bridge_by_bus: dict[str, str] = {}
    for block in block_by_address.values():
        for line in block.lines:
            bus_match = _BUS_LINE.match(line)
            # A bridge that the firmware has not set up has 00 as the number of the bus below it.
            if bus_match and bus_match[2] != "00":
                domain_and_colon = block.address[: -len("00:00.0")]
                bridge_by_bus.setdefault(f"{domain_and_colon}{bus_match[2].lower()}", block.address)
    function_by_address = {
        address: _parse_function(block, bridge_by_bus) for address, block in block_by_address.items()
    }
    return Capture(
        schema_version=SCHEMA_VERSION, origin="output of lspci", answers=make_sysfs_reads(function_by_address)
    )


def _split_blocks(data: bytes) -> dict[str, _Block]:
    block_by_address: dict[str, _Block] = {}
    block: _Block | None = None
    line_count = 0
    for raw_line in io.BytesIO(data):
        line = raw_line.decode("utf-8", "replace").rstrip("\r\n")
        function_match = _FUNCTION_LINE.match(line)
        if function_match:
            block = _Block(parse_address(function_match[1], _SOURCE_NAME), function_match[2])
            if block.address in block_by_address:
                raise make_malformed_error(_SOURCE_NAME, f"it contains {block.address} twice")
            if len(block_by_address) >= FUNCTIONS_MAX:
                raise make_malformed_error(_SOURCE_NAME, f"more than {FUNCTIONS_MAX} functions")
            block_by_address[block.address] = block
        elif block is not None and line[:1].isspace():
            line_count += 1
            if line_count > _LINES_MAX:
                raise make_malformed_error(_SOURCE_NAME, f"more than {_LINES_MAX} lines")
            block.lines.append(line)
    return block_by_address


def _parse_function(block: _Block, bridge_by_bus: dict[str, str]) -> PciFunction:
    """Return the function of a block. `bridge_by_bus` has the address of the bridge above each bus (``0000:19``)."""
    upper_bridges: list[str] = []
    bus = block.address[: -len(":00.0")]
    while (bridge := bridge_by_bus.get(bus)) is not None:
        if bridge in upper_bridges or bridge == block.address or len(upper_bridges) > DEPTH_MAX:
            raise make_malformed_error(_SOURCE_NAME, f"the bridges above {block.address} form a cycle")
        upper_bridges.insert(0, bridge)
        bus = bridge[: -len(":00.0")]
    vendor_id, device_id, class_code = _parse_identity(block.first_line)
    files = {"vendor": f"{vendor_id:#06x}", "device": f"{device_id:#06x}", "class": f"{class_code:#08x}"}
    numa_words = (block.find_text("NUMA node") or "").split()
    files["numa_node"] = numa_words[0] if numa_words and numa_words[0].isdecimal() else "-1"
    for name, file_prefix in (("LnkSta", "current"), ("LnkCap", "max")):
        link_match = _LINK_TEXT.search(block.find_text(name) or "")
        if link_match:
            files[f"{file_prefix}_link_speed"] = f"{link_match[1].removesuffix('GT/s')} GT/s PCIe"
            files[f"{file_prefix}_link_width"] = link_match[2].removeprefix("x")
    return PciFunction(
        address=block.address,
        host_bridge=f"pci{bus}",
        bridges=tuple(upper_bridges),
        files=files,
        config=_build_config_space(block),
        links=_parse_links(block),
    )


def _parse_links(block: _Block) -> dict[str, str]:
    driver, iommu_group = block.find_text("Kernel driver in use") or "", block.find_text("IOMMU group") or ""
    links = {"driver": f"/sys/bus/pci/drivers/{driver}"} if re.fullmatch(r"\w[\w.-]*", driver) else {}
    return links | ({"iommu_group": f"/sys/kernel/iommu_groups/{iommu_group}"} if iommu_group.isdecimal() else {})


def _parse_identity(first_line: str) -> tuple[int, int, int]:
    """Return the vendor id, device id and class code in the first line of a block; 0 for an unknown value."""
    # lspci -n prints "0302: 10de:2330".
    identity_match = _NUMERIC_IDENTITY.match(first_line)
    if identity_match:
        return int(identity_match[2], 16), int(identity_match[3], 16), int(identity_match[1], 16) << 8
    # lspci -nn prints "3D controller [0302]: NVIDIA Corporation Device [10de:2330]", and lspci without these options
    # "3D controller: NVIDIA Corporation Device 2330". The number in brackets lacks the interface, so the table is used
    # if it has the class.
    class_text, _, device_text = first_line.partition(": ")
    class_match = _CLASS_NUMBER.search(first_line)
    class_name = class_text.partition(" [")[0]
    is_known_class = class_name in _CLASS_CODE_BY_NAME
    class_code = (
        int(class_match[1], 16) << 8 if class_match and not is_known_class else _CLASS_CODE_BY_NAME.get(class_name, 0)
    )
    ids_match = _VENDOR_AND_DEVICE.search(device_text)
    if ids_match:
        return int(ids_match[1], 16), int(ids_match[2], 16), class_code
    vendor_id = next((number for name, number in _VENDOR_ID_BY_NAME.items() if device_text.startswith(name)), 0)
    device_match = re.search(r"Device ([0-9a-f]{4})\b", device_text)
    return vendor_id, int(device_match[1], 16) if device_match else 0, class_code


def _build_config_space(block: _Block) -> bytes:
    """Return a config space with the registers that a block describes."""
    if any("<access denied>" in line for line in block.lines):
        return bytes(_HEADER_BYTES)
    config_space = bytearray(_CONFIG_BYTES)
    read_request_match = next((match for line in block.lines if (match := _READ_REQUEST_TEXT.search(line))), None)
    if read_request_match:
        # Bit 0x10 of the status register (0x06) says that there is a list of capabilities. The pointer at 0x34 has the
        # offset of the first, which is the PCIe capability (id 0x10) here.
        struct.pack_into("<H", config_space, 0x06, 0x10)
        config_space[0x34], config_space[_PCIE_CAPABILITY_OFFSET] = _PCIE_CAPABILITY_OFFSET, 0x10
        # Bits 14:12 of the device control register (offset 8 in the capability) have N for a size of 128 bytes << N.
        size_code = max(0, min(7, int(read_request_match[1][:8]).bit_length() - 8))
        ordering_bit = _RELAXED_ORDERING_BIT if any("RlxdOrd+" in line for line in block.lines) else 0
        struct.pack_into("<H", config_space, _PCIE_CAPABILITY_OFFSET + 8, size_code << 12 | ordering_bit)
    acs_text, ats_text = block.find_text("ACSCtl"), block.find_text("ATSCtl")
    acs_control = sum(bit for name, bit in _ACS_BITS.items() if f"{name}+" in (acs_text or ""))
    # The ids of the extended capabilities ACS and ATS, and their control registers.
    extended_capabilities = [(0x000D, acs_control)] if acs_text is not None else []
    if ats_text is not None:
        extended_capabilities.append((0x000F, _ATS_ENABLE_BIT if "Enable+" in ats_text else 0))
    # The list of extended capabilities begins at 0x100, whichever capability is the first.
    for index, (capability_id, control) in enumerate(extended_capabilities):
        # An extended capability: u16 id, 4 bits version, 12 bits offset of the next; then u16 capability, u16 control.
        next_offset = _EXTENDED_CAPABILITY_OFFSETS[index + 1] if index + 1 < len(extended_capabilities) else 0
        struct.pack_into(
            "<IHH",
            config_space,
            _EXTENDED_CAPABILITY_OFFSETS[index],
            capability_id | 1 << 16 | next_offset << 20,
            0,
            control,
        )
    return bytes(config_space)
