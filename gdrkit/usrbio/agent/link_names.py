"""What a publication's link says: by its name, and for device memory by its target.

Level 5, pure. The names are those of 3FS: ``UUID[.bBLOCK][.rDEPTH|.wDEPTH][.ph|.pl][.tMS][.fBITS]`` of host memory and
rings, ``UUID.gdr.dDEVICE`` of device memory. A name that says anything else is ``Refused`` with EINVAL.
"""

from __future__ import annotations

import errno
import re
import uuid
from dataclasses import dataclass
from typing import NoReturn

from gdrkit.usrbio.agent.refusal import Refused

__all__ = ["DeviceTarget", "LinkName", "Priority", "RingRules", "parse_device_target", "parse_name"]

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PARTS = (
    ("block", re.compile(r"b([0-9]{1,19})")),
    ("depth", re.compile(r"([rw])(-?[0-9]{1,10})")),
    ("priority", re.compile(r"p([hl])")),
    ("timeout", re.compile(r"t([0-9]{1,10})")),
    ("flags", re.compile(r"f([01]{1,64})")),
)
_DEVICE = re.compile(r"gdr\.d(0|[1-9][0-9]{0,8})")
_TARGET = re.compile(
    r"gdr://v2/device/([0-9]{1,9})/allocation/([0-9]{1,19})/offset/([0-9]{1,19})/size/([0-9]{1,19})"
    r"/(?:ipc/([0-9a-f]{128})|dmabuf)",
    re.ASCII,
)
_INT32_MAX = (1 << 31) - 1
_SIZE_MAX = (1 << 63) - 1


class Priority:
    """The classes of rings, as the loop numbers them."""

    HIGH, NORMAL, LOW = range(3)


@dataclass(frozen=True, slots=True)
class RingRules:
    """How a ring is drained: direction, batches, priority, how long a short batch waits, flags."""

    for_read: bool
    io_depth: int
    priority: int
    timeout_ms: int
    flags: int


@dataclass(frozen=True, slots=True)
class LinkName:
    """What a name says: host memory (`block_bytes`, 0 for whole), a ring, or memory of a device."""

    text: str
    id: bytes
    block_bytes: int = 0
    ring: RingRules | None = None
    device_index: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """Device memory as its link says it: where in which allocation it lies, and the IPC handle of that, if it has one
    (memory of VMM and of pools has none).
    """

    device_index: int
    allocation_bytes: int
    offset_bytes: int
    length_bytes: int
    ipc: bytes | None


def parse_name(text: str) -> LinkName:
    """Read the name of a link."""
    head, _, rest = text.partition(".")
    if not _UUID.fullmatch(head):
        _refuse(text, "it does not begin with a UUID in lower case")
    identity = uuid.UUID(head).bytes
    if not rest:
        return LinkName(text, identity) if "." not in text else _refuse(text, "nothing follows the dot")
    device = _DEVICE.fullmatch(rest)
    if device:
        return LinkName(text, identity, device_index=int(device[1]))
    return _with_parts(text, identity, rest.split("."))


def parse_device_target(text: str) -> DeviceTarget:
    """Read the target of a link to device memory (``gdr://v2/...``)."""
    found = _TARGET.fullmatch(text)
    if not found:
        _refuse(text[:200], "it is no gdr://v2 target")
    device, allocation, offset, size = (int(found[part]) for part in range(1, 5))
    if not 0 < size <= allocation <= _SIZE_MAX or offset > allocation or size > allocation - offset:
        _refuse(text[:200], "the memory is not inside its allocation")
    return DeviceTarget(device, allocation, offset, size, bytes.fromhex(found[5]) if found[5] else None)


def _with_parts(text: str, identity: bytes, parts: list[str]) -> LinkName:
    found: dict[str, re.Match[str]] = {}
    for part in parts:
        named = next(((name, match) for name, form in _PARTS if (match := form.fullmatch(part))), None)
        if named is None or named[0] in found:
            _refuse(text, f"{part!r} is unknown, or there twice")
        found[named[0]] = named[1]
    block_bytes = int(found["block"][1]) if "block" in found else 0
    if block_bytes > _SIZE_MAX:
        _refuse(text, "the blocks are too large")
    if "depth" not in found:
        if found.keys() - {"block"}:
            _refuse(text, "only a ring has priority, timeout and flags")
        return LinkName(text, identity, block_bytes=block_bytes)
    if "block" in found:
        _refuse(text, "a ring has no blocks")
    depth = int(found["depth"][2])
    timeout_ms = int(found["timeout"][1]) if "timeout" in found else 0
    if not -_INT32_MAX <= depth <= _INT32_MAX or timeout_ms > _INT32_MAX:
        _refuse(text, "a number is too large")
    letter = found["priority"][1] if "priority" in found else ""
    rules = RingRules(
        for_read=found["depth"][1] == "r",
        io_depth=depth,
        priority={"h": Priority.HIGH, "": Priority.NORMAL, "l": Priority.LOW}[letter],
        timeout_ms=timeout_ms,
        flags=int(found["flags"][1], 2) if "flags" in found else 0,
    )
    return LinkName(text, identity, ring=rules)


def _refuse(text: str, why: str) -> NoReturn:
    message = f"{text!r} names no publication: {why}"
    raise Refused(errno.EINVAL, message)
