"""Parser of the config space of a PCI function, which is the file ``config`` of the function in sysfs.

Every user may read the header, which is the first 64 bytes. The capabilities come after it, and only a process with
CAP_SYS_ADMIN can read them. The offsets and bits here are taken from linux/pci_regs.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.host.tree import HostTree

__all__ = ["HEADER_BYTES", "AcsControl", "ConfigSpace", "config_space", "parse_config_space"]

HEADER_BYTES = 64
_STATUS_OFFSET, _STATUS_HAS_CAPABILITIES_BIT = 0x06, 0x10  # PCI_STATUS, PCI_STATUS_CAP_LIST
_FIRST_CAPABILITY_OFFSET = 0x34  # PCI_CAPABILITY_LIST
# The standard capabilities are in the first 256 bytes (PCI_CFG_SPACE_SIZE), and the extended capabilities after them.
_STANDARD_END_OFFSET, _EXTENDED_BEGIN_OFFSET = 0x100, 0x100
_PCIE_CAPABILITY_ID = 0x10  # PCI_CAP_ID_EXP
_ACS_CAPABILITY_ID, _ATS_CAPABILITY_ID = 0x000D, 0x000F  # PCI_EXT_CAP_ID_ACS, PCI_EXT_CAP_ID_ATS
_CONTROL_OFFSET = 6  # Offset of the control word in the ACS and in the ATS capability.
_ACS_REDIRECT_BITS = 0x04 | 0x08 | 0x10  # PCI_ACS_RR, PCI_ACS_CR, PCI_ACS_UF
_ATS_ENABLE_BIT = 0x8000  # PCI_ATS_CTRL_ENABLE
_DEVICE_CONTROL_OFFSET = 8  # PCI_EXP_DEVCTL
_RELAXED_ORDERING_BIT = 0x10  # PCI_EXP_DEVCTL_RELAX_EN
_SMALLEST_READ_REQUEST_BYTES = 128
# A header with one of these values ends the list of extended capabilities: 0 if the list is empty, all ones if the
# device does not respond.
_LIST_END_HEADERS = (0, 0xFFFF_FFFF)


@dataclass(frozen=True, slots=True)
class AcsControl:
    """The control word of the Access Control Services (ACS) of a bridge, which can redirect peer-to-peer traffic."""

    value: int

    @property
    def redirects(self) -> bool:
        """Whether the bridge sends traffic between the devices below it up to the root complex.

        Request redirect, completion redirect and upstream forwarding do this. Source validation alone does not.
        """
        return bool(self.value & _ACS_REDIRECT_BITS)

    def __str__(self) -> str:
        # The names are from lspci. The bits are PCI_ACS_SV, PCI_ACS_RR, PCI_ACS_CR and PCI_ACS_UF.
        bit_by_name = {"SrcValid": 0x01, "ReqRedir": 0x04, "CmpltRedir": 0x08, "UpstreamFwd": 0x10}
        return " ".join(f"{name}{'+' if self.value & bit else '-'}" for name, bit in bit_by_name.items())


@dataclass(frozen=True, slots=True)
class ConfigSpace:
    """The parts of one function's config space that matter to peer-to-peer transfers.

    Attributes
    ----------
    length_bytes : int
        Number of bytes that could be read: 64 without CAP_SYS_ADMIN, otherwise 256 or 4096.
    acs : AcsControl or None
        Control word of ACS. None if the function does not have this capability, or if the capability could not be read
        (see :attr:`is_whole`).
    ats_enabled : bool or None
        Whether Address Translation Services are enabled. None under the same conditions as `acs`.
    max_read_request_bytes : int or None
        Maximum read request size in the PCIe device control register, in bytes.
    relaxed_ordering : bool or None
        Whether the PCIe device control register enables relaxed ordering.
    """

    length_bytes: int
    acs: AcsControl | None
    ats_enabled: bool | None
    max_read_request_bytes: int | None
    relaxed_ordering: bool | None

    @property
    def is_whole(self) -> bool:
        """Whether the capabilities after the header could be read."""
        return self.length_bytes > HEADER_BYTES


def config_space(tree: HostTree, address: str) -> ConfigSpace | None:
    """Read the config space of the function at a PCI address, or return None if the file cannot be read.

    Raises
    ------
    ApiError
        MALFORMED; see :func:`parse_config_space`.
    """
    data = tree.data(f"/sys/bus/pci/devices/{address}/config")
    return None if data is None else parse_config_space(data, name=address)


def parse_config_space(data: bytes, *, name: str = "config space") -> ConfigSpace:
    """Parse the header and the capabilities in `data`. Errors name the function by `name`.

    Raises
    ------
    ApiError
        MALFORMED: `data` is shorter than a header, or a list of capabilities loops or leaves `data`.
    """
    if len(data) < HEADER_BYTES:
        raise _make_malformed_error(name, f"{len(data)} bytes; a header has {HEADER_BYTES}")
    standard_capabilities = dict(_list_standard_capabilities(data, name))
    extended_capabilities = dict(_list_extended_capabilities(data, name))
    pcie_offset = standard_capabilities.get(_PCIE_CAPABILITY_ID)
    device_control = None if pcie_offset is None else _read_word(data, pcie_offset + _DEVICE_CONTROL_OFFSET)
    acs_control, ats_control = (
        _read_word(data, offset + _CONTROL_OFFSET)
        if (offset := extended_capabilities.get(capability_id)) is not None
        else None
        for capability_id in (_ACS_CAPABILITY_ID, _ATS_CAPABILITY_ID)
    )
    # Bits 12 to 14 of the device control word contain N for a maximum read request of 128 << N bytes.
    return ConfigSpace(
        length_bytes=len(data),
        acs=None if acs_control is None else AcsControl(acs_control),
        ats_enabled=None if ats_control is None else bool(ats_control & _ATS_ENABLE_BIT),
        max_read_request_bytes=None
        if device_control is None
        else _SMALLEST_READ_REQUEST_BYTES << (device_control >> 12 & 7),
        relaxed_ordering=None if device_control is None else bool(device_control & _RELAXED_ORDERING_BIT),
    )


def _list_standard_capabilities(data: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Yield the id and the offset of each capability in the first 256 bytes."""
    if len(data) <= HEADER_BYTES or not (_read_word(data, _STATUS_OFFSET) or 0) & _STATUS_HAS_CAPABILITIES_BIT:
        return
    # A capability begins with its id and the offset of the next capability. The lowest two bits of an offset are
    # reserved.
    visited_offsets: set[int] = set()
    offset = data[_FIRST_CAPABILITY_OFFSET] & ~3
    while offset:
        if offset in visited_offsets:
            raise _make_malformed_error(name, f"the list of capabilities loops at {offset:#x}")
        if not HEADER_BYTES <= offset < min(len(data), _STANDARD_END_OFFSET) - 1:
            raise _make_malformed_error(
                name, f"the list of capabilities leads to {offset:#x}, outside the {len(data)} bytes"
            )
        visited_offsets.add(offset)
        yield data[offset], offset
        offset = data[offset + 1] & ~3


def _list_extended_capabilities(data: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Yield the id and the offset of each capability after the first 256 bytes (an extended capability)."""
    if len(data) <= _EXTENDED_BEGIN_OFFSET:
        return
    visited_offsets: set[int] = set()
    offset = _EXTENDED_BEGIN_OFFSET
    while offset:
        if offset in visited_offsets:
            raise _make_malformed_error(name, f"the list of extended capabilities loops at {offset:#x}")
        if not _EXTENDED_BEGIN_OFFSET <= offset <= len(data) - 4:
            raise _make_malformed_error(
                name, f"the list of extended capabilities leads to {offset:#x}, outside the {len(data)} bytes"
            )
        visited_offsets.add(offset)
        (header,) = struct.unpack_from("<I", data, offset)
        if header in _LIST_END_HEADERS:
            return
        # The header has the id in bits 0 to 15, and the offset of the next capability in bits 20 to 31.
        yield header & 0xFFFF, offset
        offset = header >> 20 & ~3


def _read_word(data: bytes, offset: int) -> int | None:
    """Return the 16-bit word at `offset`, or None if it is not completely in `data`."""
    return struct.unpack_from("<H", data, offset)[0] if offset + 2 <= len(data) else None


def _make_malformed_error(name: str, detail: str) -> ApiError:
    return ApiError(
        api=Api.KERNEL,
        operation="read PCI config space",
        status=None,
        status_name="malformed list" if "list" in detail else "too short",
        arguments={"function": name},
        reason=Reason.MALFORMED,
        what_to_do="check with lspci -xxxx; a function that fell off the bus reads as all ones",
        detail=detail,
    )
