"""Parsers of the name of a publication's link, and of the target of a link to device memory.

The names are those of 3FS: ``UUID[.bBLOCK][.rDEPTH|.wDEPTH][.ph|.pl][.tMS][.fBITS]`` for host memory and rings, and
``UUID.gdr.dDEVICE`` for device memory. For other names the parsers raise ``AgentError`` with EINVAL.
"""

from __future__ import annotations

import errno
import re
import uuid
from dataclasses import dataclass
from typing import NoReturn

from gdrkit.usrbio.agent.agent_error import AgentError

__all__ = ["DeviceTarget", "LinkName", "Priority", "RingOptions", "parse_device_target", "parse_name"]

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SUFFIXES = (
    ("block", re.compile(r"b([0-9]{1,19})")),
    ("depth", re.compile(r"([rw])(-?[0-9]{1,10})")),
    ("priority", re.compile(r"p([hl])")),
    ("timeout", re.compile(r"t([0-9]{1,10})")),
    ("flags", re.compile(r"f([01]{1,64})")),
)
_DEVICE_SUFFIX = re.compile(r"gdr\.d(0|[1-9][0-9]{0,8})")
_DEVICE_TARGET = re.compile(
    r"gdr://v2/device/([0-9]{1,9})/allocation/([0-9]{1,19})/offset/([0-9]{1,19})/size/([0-9]{1,19})"
    r"/(?:ipc/([0-9a-f]{128})|dmabuf)",
    re.ASCII,
)
_INT32_MAX = (1 << 31) - 1
_SIZE_MAX = (1 << 63) - 1


class Priority:
    """The priorities of rings, with the numbers of the native loop."""

    HIGH, NORMAL, LOW = range(3)


@dataclass(frozen=True, slots=True)
class RingOptions:
    """The options of a ring: direction, I/O depth, priority, flags, and how long a batch waits for more operations."""

    for_read: bool
    io_depth: int
    priority: int
    timeout_ms: int
    flags: int


@dataclass(frozen=True, slots=True)
class LinkName:
    """The parsed name of a link: to host memory, to a ring, or to device memory.

    Attributes
    ----------
    text : str
        The name itself.
    id : bytes
        The UUID of the publication, 16 bytes.
    block_bytes : int
        Block size of host memory in bytes, 0 for one block.
    ring : RingOptions or None
        The options of a ring; None for memory.
    device_index : int or None
        The number of the GPU with the memory; None for host memory and rings.
    """

    text: str
    id: bytes
    block_bytes: int = 0
    ring: RingOptions | None = None
    device_index: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """The parsed target of a link to device memory: a range of an allocation, and the allocation's IPC handle.

    Memory of VMM and of pools has no IPC handle.
    """

    device_index: int
    allocation_bytes: int
    offset_bytes: int
    length_bytes: int
    ipc: bytes | None


def parse_name(text: str) -> LinkName:
    """Parse the name of a link."""
    uuid_text, _, suffix = text.partition(".")
    if not _UUID.fullmatch(uuid_text):
        _refuse(text, "it does not begin with a UUID in lower case")
    identity = uuid.UUID(uuid_text).bytes
    if not suffix:
        return LinkName(text, identity) if "." not in text else _refuse(text, "nothing follows the dot")
    device = _DEVICE_SUFFIX.fullmatch(suffix)
    if device:
        return LinkName(text, identity, device_index=int(device[1]))
    return _parse_suffixes(text, identity, suffix.split("."))


def parse_device_target(text: str) -> DeviceTarget:
    """Parse the target of a link to device memory (``gdr://v2/...``)."""
    match = _DEVICE_TARGET.fullmatch(text)
    if not match:
        _refuse(text[:200], "it is not a gdr://v2 target")
    device, allocation, offset, size = (int(match[group]) for group in range(1, 5))
    if not 0 < size <= allocation <= _SIZE_MAX or offset > allocation or size > allocation - offset:
        _refuse(text[:200], "the memory is not inside its allocation")
    return DeviceTarget(device, allocation, offset, size, bytes.fromhex(match[5]) if match[5] else None)


def _parse_suffixes(text: str, identity: bytes, suffixes: list[str]) -> LinkName:
    matches: dict[str, re.Match[str]] = {}
    for suffix in suffixes:
        parsed = next(((name, match) for name, form in _SUFFIXES if (match := form.fullmatch(suffix))), None)
        if parsed is None or parsed[0] in matches:
            _refuse(text, f"the suffix {suffix!r} is unknown or a duplicate")
        matches[parsed[0]] = parsed[1]
    block_bytes = int(matches["block"][1]) if "block" in matches else 0
    if block_bytes > _SIZE_MAX:
        _refuse(text, f"the block size must be at most {_SIZE_MAX}")
    if "depth" not in matches:
        if matches.keys() - {"block"}:
            _refuse(text, "only a ring has priority, timeout and flags")
        return LinkName(text, identity, block_bytes=block_bytes)
    if "block" in matches:
        _refuse(text, "a ring has no blocks")
    depth = int(matches["depth"][2])
    timeout_ms = int(matches["timeout"][1]) if "timeout" in matches else 0
    if not -_INT32_MAX <= depth <= _INT32_MAX or timeout_ms > _INT32_MAX:
        _refuse(text, f"the I/O depth and the timeout must be at most {_INT32_MAX}")
    letter = matches["priority"][1] if "priority" in matches else ""
    options = RingOptions(
        for_read=matches["depth"][1] == "r",
        io_depth=depth,
        priority={"h": Priority.HIGH, "": Priority.NORMAL, "l": Priority.LOW}[letter],
        timeout_ms=timeout_ms,
        flags=int(matches["flags"][1], 2) if "flags" in matches else 0,
    )
    return LinkName(text, identity, ring=options)


def _refuse(text: str, detail: str) -> NoReturn:
    message = f"{text!r} is not a valid name or target of a publication: {detail}"
    raise AgentError(errno.EINVAL, message)
