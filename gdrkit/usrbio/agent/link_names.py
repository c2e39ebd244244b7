"""Parsers of the name of a publication's link, and of the target of a link to device memory.

3FS uses the same names. The name of host memory is ``UUID[.bBLOCK]``, the name of a ring
``UUID(.rDEPTH|.wDEPTH)[.ph|.pl][.tMS][.fBITS]``, and the name of device memory ``UUID.gdr.dDEVICE``. In the name of a
ring, ``r`` and ``w`` are the direction (read, write) with the I/O depth, ``ph`` and ``pl`` the priority (high, low),
``t`` the timeout in milliseconds, and ``f`` the flags in binary digits. For other names the parsers raise
``AgentError`` with EINVAL.
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
_OPTION_PATTERNS = (
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
    """The priorities of rings, numbered as in the native loop."""

    HIGH, NORMAL, LOW = range(3)


@dataclass(frozen=True, slots=True)
class RingOptions:
    """The options of a ring; see :func:`gdrkit.usrbio.make_ioring`."""

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
        Block size of host memory in bytes. No operation may cross the end of a block. 0: there is one block.
    ring_options : RingOptions or None
        The options of a ring; None for memory.
    device_index : int or None
        The CUDA device number of the memory in the client's process; None for host memory and rings.
    """

    text: str
    id: bytes
    block_bytes: int = 0
    ring_options: RingOptions | None = None
    device_index: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """The parsed target of a link to device memory: a range of a CUDA allocation, and the allocation's IPC handle.

    The IPC handle is None for memory of the CUDA virtual memory management (VMM) and of memory pools.
    """

    device_index: int
    allocation_bytes: int
    offset_bytes: int
    length_bytes: int
    ipc_handle: bytes | None


def parse_name(text: str) -> LinkName:
    """Parse the name of a link."""
    uuid_text, _, suffix = text.partition(".")
    if not _UUID.fullmatch(uuid_text):
        _raise_einval(text, "the name does not begin with a UUID in lower case")
    publication_id = uuid.UUID(uuid_text).bytes
    if not suffix:
        return LinkName(text, publication_id) if "." not in text else _raise_einval(text, "nothing follows the dot")
    device_match = _DEVICE_SUFFIX.fullmatch(suffix)
    if device_match:
        return LinkName(text, publication_id, device_index=int(device_match[1]))
    return _parse_suffixes(text, publication_id, suffix.split("."))


def parse_device_target(text: str) -> DeviceTarget:
    """Parse the target of a link to device memory (``gdr://v2/...``)."""
    match = _DEVICE_TARGET.fullmatch(text)
    if not match:
        _raise_einval(text[:200], "it is not a gdr://v2 target")
    device_index, allocation_bytes, offset_bytes, length_bytes = (int(match[group]) for group in range(1, 5))
    if (
        not 0 < length_bytes <= allocation_bytes <= _SIZE_MAX
        or offset_bytes > allocation_bytes
        or length_bytes > allocation_bytes - offset_bytes
    ):
        _raise_einval(text[:200], "the memory is not inside its allocation")
    return DeviceTarget(
        device_index, allocation_bytes, offset_bytes, length_bytes, bytes.fromhex(match[5]) if match[5] else None
    )


def _parse_suffixes(text: str, publication_id: bytes, suffixes: list[str]) -> LinkName:
    """Parse a name with the suffixes of host memory or of a ring."""
    matches: dict[str, re.Match[str]] = {}
    for suffix in suffixes:
        option_and_match = next(
            ((option, match) for option, pattern in _OPTION_PATTERNS if (match := pattern.fullmatch(suffix))), None
        )
        if option_and_match is None or option_and_match[0] in matches:
            _raise_einval(text, f"the suffix {suffix!r} is unknown or a duplicate")
        option, match = option_and_match
        matches[option] = match
    block_bytes = int(matches["block"][1]) if "block" in matches else 0
    if block_bytes > _SIZE_MAX:
        _raise_einval(text, f"the block size must be at most {_SIZE_MAX}")
    if "depth" not in matches:
        if matches.keys() - {"block"}:
            _raise_einval(text, "only a ring has priority, timeout and flags")
        return LinkName(text, publication_id, block_bytes=block_bytes)
    if "block" in matches:
        _raise_einval(text, "a ring has no blocks")
    io_depth = int(matches["depth"][2])
    timeout_ms = int(matches["timeout"][1]) if "timeout" in matches else 0
    if not -_INT32_MAX <= io_depth <= _INT32_MAX or timeout_ms > _INT32_MAX:
        _raise_einval(text, f"the I/O depth and the timeout must be at most {_INT32_MAX}")
    priority_letter = matches["priority"][1] if "priority" in matches else ""
    options = RingOptions(
        for_read=matches["depth"][1] == "r",
        io_depth=io_depth,
        priority={"h": Priority.HIGH, "": Priority.NORMAL, "l": Priority.LOW}[priority_letter],
        timeout_ms=timeout_ms,
        flags=int(matches["flags"][1], 2) if "flags" in matches else 0,
    )
    return LinkName(text, publication_id, ring_options=options)


def _raise_einval(text: str, detail: str) -> NoReturn:
    message = f"{text!r} is not a valid name or target of a publication: {detail}"
    raise AgentError(errno.EINVAL, message)
