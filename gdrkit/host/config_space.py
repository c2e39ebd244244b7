"""Parser of PCI config space, from the file ``config`` of a function in sysfs.

Every user may read the first 64 bytes. The capabilities lie behind them and need CAP_SYS_ADMIN. Offsets and bits are
those of linux/pci_regs.h.
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
_STATUS, _STATUS_CAPABILITIES = 0x06, 0x10
_FIRST_CAPABILITY = 0x34
_STANDARD_BYTES, _EXTENDED_BEGIN = 0x100, 0x100
_EXPRESS = 0x10
_ACS, _ATS = 0x000D, 0x000F
_CONTROL = 6  # Offset of the control word in both capabilities.
_ATS_ENABLE = 0x8000
_DEVICE_CONTROL = 8
_RELAXED_ORDERING = 0x10
_SMALLEST_BYTES = 128
_NO_CAPABILITY = (0, 0xFFFF_FFFF)


@dataclass(frozen=True, slots=True)
class AcsControl:
    """The control word of Access Control Services (ACS). Source validation alone does not redirect traffic."""

    value: int

    @property
    def redirects(self) -> bool:
        """Whether traffic between the devices below is sent to the root complex, by request redirect, completion
        redirect or upstream forwarding.
        """
        return bool(self.value & 0x1C)

    def __str__(self) -> str:
        bits = {"SrcValid": 0x01, "ReqRedir": 0x04, "CmpltRedir": 0x08, "UpstreamFwd": 0x10}
        return " ".join(f"{name}{'+' if self.value & bit else '-'}" for name, bit in bits.items())


@dataclass(frozen=True, slots=True)
class ConfigSpace:
    """The parts of one function's config space that matter to peer-to-peer transfers.

    Attributes
    ----------
    length_bytes : int
        Number of bytes that could be read: 64 without CAP_SYS_ADMIN, otherwise 256 or 4096.
    acs : AcsControl or None
        None if the function does not have the capability, or if it could not be read (see :attr:`is_whole`).
    ats_enabled : bool or None
        Whether Address Translation Services are enabled; None as for `acs`.
    max_read_request_bytes : int or None
        Maximum read request size in the PCIe device control register, in bytes.
    relaxed_ordering : bool or None
        Whether the same register enables relaxed ordering.
    """

    length_bytes: int
    acs: AcsControl | None
    ats_enabled: bool | None
    max_read_request_bytes: int | None
    relaxed_ordering: bool | None

    @property
    def is_whole(self) -> bool:
        """Whether the capabilities could be read."""
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
    """Parse the header and the capabilities.

    Raises
    ------
    ApiError
        MALFORMED: `data` is shorter than a header, or a list of capabilities loops or leaves `data`.
    """
    if len(data) < HEADER_BYTES:
        raise _malformed(name, f"{len(data)} bytes; a header has {HEADER_BYTES}")
    standard = dict(_standard(data, name))
    extended = dict(_extended(data, name))
    express = standard.get(_EXPRESS)
    control = None if express is None else _word(data, express + _DEVICE_CONTROL)
    acs, ats = (_word(data, at + _CONTROL) if (at := extended.get(kind)) is not None else None for kind in (_ACS, _ATS))
    return ConfigSpace(
        length_bytes=len(data),
        acs=None if acs is None else AcsControl(acs),
        ats_enabled=None if ats is None else bool(ats & _ATS_ENABLE),
        max_read_request_bytes=None if control is None else _SMALLEST_BYTES << (control >> 12 & 7),
        relaxed_ordering=None if control is None else bool(control & _RELAXED_ORDERING),
    )


def _standard(data: bytes, name: str) -> Iterator[tuple[int, int]]:
    if len(data) <= HEADER_BYTES or not (_word(data, _STATUS) or 0) & _STATUS_CAPABILITIES:
        return
    seen: set[int] = set()
    at = data[_FIRST_CAPABILITY] & ~3
    while at:
        if at in seen:
            raise _malformed(name, f"the list of capabilities loops at {at:#x}")
        if not HEADER_BYTES <= at < min(len(data), _STANDARD_BYTES) - 1:
            raise _malformed(name, f"the list of capabilities leads to {at:#x}, outside the {len(data)} bytes")
        seen.add(at)
        yield data[at], at
        at = data[at + 1] & ~3


def _extended(data: bytes, name: str) -> Iterator[tuple[int, int]]:
    if len(data) <= _EXTENDED_BEGIN:
        return
    seen: set[int] = set()
    at = _EXTENDED_BEGIN
    while at:
        if at in seen:
            raise _malformed(name, f"the list of extended capabilities loops at {at:#x}")
        if not _EXTENDED_BEGIN <= at <= len(data) - 4:
            raise _malformed(name, f"the list of extended capabilities leads to {at:#x}, outside the {len(data)} bytes")
        seen.add(at)
        (header,) = struct.unpack_from("<I", data, at)
        if header in _NO_CAPABILITY:
            return
        yield header & 0xFFFF, at
        at = header >> 20 & ~3


def _word(data: bytes, at: int) -> int | None:
    return struct.unpack_from("<H", data, at)[0] if at + 2 <= len(data) else None


def _malformed(name: str, detail: str) -> ApiError:
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
