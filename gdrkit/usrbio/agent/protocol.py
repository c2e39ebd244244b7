"""The messages of an agent's socket: their packing and parsing.

``native/usrbio/client/agent_protocol.hpp`` does the same in C++. A message of the SOCK_SEQPACKET socket is a header of
32 bytes and a payload. Both ends are on one host, so numbers have the byte order of the host. A process that can open
the socket can send any bytes. The parsers raise ``UsageError`` with the reason ``MALFORMED`` for everything that is not
a valid message.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NoReturn

from gdrkit.errors import Reason, UsageError

__all__ = [
    "DESCRIPTORS_MAX",
    "FEATURE_KEEP",
    "HEADER_BYTES",
    "MESSAGE_BYTES_MAX",
    "RANGES_MAX",
    "AgentHello",
    "AgentMessage",
    "AgentRequest",
    "PublishRequest",
    "pack",
    "pack_hello",
    "pack_name",
    "pack_number",
    "pack_publish",
    "pack_punch",
    "parse",
    "parse_hello",
    "parse_name",
    "parse_number",
    "parse_publish",
    "parse_punch",
]

# The bytes "GDRA" as a little-endian number.
MAGIC = 0x41524447
VERSION = 1
MESSAGE_BYTES_MAX = 32768
DESCRIPTORS_MAX = 2
# Largest number of ranges of one PUNCH_HOLE.
RANGES_MAX = 1000

# The fields are: magic, version, type, bytes of the payload, number of descriptors, sequence, status, reserved.
_HEADER = struct.Struct("=IHHIIQiI")
HEADER_BYTES = _HEADER.size
# The fields are: features, process id, reserved, name of the library with a zero byte.
_HELLO = struct.Struct("=QII32s")
# The fields are: length of the name, of the target and of the share handle in bytes, reserved. The name, the target and
# the share handle follow.
_PUBLISH_LENGTHS = struct.Struct("=HHHH")
# The length of a name in bytes. The name follows.
_NAME_LENGTH = struct.Struct("=H")
_NUMBER = struct.Struct("=Q")
# The fields are: flags, number of ranges, reserved. The ranges follow.
_PUNCH = struct.Struct("=QII")
# The begin and the end of a range, in bytes.
_RANGE = struct.Struct("=QQ")


class AgentRequest(enum.IntEnum):
    """The type of a request. A reply has the type of its request."""

    HELLO = 1
    PUBLISH = 2
    UNPUBLISH = 3
    REGISTER_FILE = 4
    DEREGISTER_FILE = 5
    PUNCH_HOLE = 6
    HARD_LINK = 7
    BORROW = 8
    RETURN_BORROWED = 9
    UNPUBLISH_AND_KEEP = 10
    DROP_KEPT = 11


# Bit of the features in HELLO: the agent can keep the registration of memory between two publications.
FEATURE_KEEP = 1

# Allowed numbers of descriptors of a request. The other requests have none.
_DESCRIPTOR_COUNTS = {
    AgentRequest.PUBLISH: range(DESCRIPTORS_MAX + 1),
    AgentRequest.REGISTER_FILE: range(1, 2),
    AgentRequest.PUNCH_HOLE: range(1, 2),
    AgentRequest.HARD_LINK: range(2, 3),
    AgentRequest.DROP_KEPT: range(1, 2),
}


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """One message. `status` is 0 in a request, and 0 or a positive errno in a reply.

    `request_type` and `sequence` of a reply are equal to the fields of its request.
    """

    request_type: AgentRequest
    sequence: int
    payload: bytes
    descriptor_count: int = 0
    status: int = 0


@dataclass(frozen=True, slots=True)
class AgentHello:
    """The process id of the sender, the name of its library, and feature bits such as FEATURE_KEEP."""

    features: int
    process_id: int
    library: str


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """The name and the target of a link, and the share handle of device memory, which is empty for host memory."""

    name: str
    target: str
    share_handle: bytes


def pack(message: AgentMessage) -> bytes:
    """Pack a message."""
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        message.request_type,
        len(message.payload),
        message.descriptor_count,
        message.sequence,
        message.status,
        0,
    )
    return header + message.payload


def parse(data: bytes, *, descriptor_count: int, is_reply: bool = False) -> AgentMessage:
    """Parse a message that arrived with `descriptor_count` descriptors."""
    if not HEADER_BYTES <= len(data) <= MESSAGE_BYTES_MAX:
        _refuse(f"a message has {HEADER_BYTES} to {MESSAGE_BYTES_MAX} bytes, not {len(data)}")
    magic, version, request_number, payload_bytes, header_descriptor_count, sequence, status, reserved = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        _refuse(f"the magic number must be {MAGIC:#x}, not {magic:#x}")
    if version != VERSION:
        _refuse(f"the version must be {VERSION}, not {version}")
    if payload_bytes != len(data) - HEADER_BYTES:
        _refuse(f"the header says {payload_bytes} bytes of payload, and the message has {len(data) - HEADER_BYTES}")
    if request_number not in frozenset(AgentRequest):
        _refuse(f"{request_number} is not a request type")
    if reserved or status < 0 or (status and not is_reply):
        allowed_status = "at least 0" if is_reply else "0"
        _refuse(f"the reserved field must be 0 and the status {allowed_status}, not {reserved} and {status}")
    request_type = AgentRequest(request_number)
    if header_descriptor_count != descriptor_count or (
        not is_reply and descriptor_count not in _DESCRIPTOR_COUNTS.get(request_type, range(1))
    ):
        _refuse(
            f"{request_type.name} has {descriptor_count} descriptors, and its header says {header_descriptor_count}"
        )
    return AgentMessage(request_type, sequence, data[HEADER_BYTES:], descriptor_count, status)


def pack_hello(hello: AgentHello) -> bytes:
    """Pack the payload of HELLO. The name of the library is cut to 31 bytes, before a zero byte."""
    return _HELLO.pack(hello.features, hello.process_id, 0, hello.library.encode()[:31])


def parse_hello(payload: bytes) -> AgentHello:
    """Parse the payload of HELLO."""
    if len(payload) != _HELLO.size:
        _refuse(f"HELLO has {_HELLO.size} bytes of payload, not {len(payload)}")
    features, process_id, reserved, library_field = _HELLO.unpack(payload)
    library, zero_byte, padding = library_field.partition(b"\0")
    if not zero_byte:
        _refuse(f"the name of the library in HELLO must end with a zero byte within {len(library_field)} bytes")
    if reserved or any(padding):
        _refuse("the reserved bytes of HELLO must be 0")
    return AgentHello(features, process_id, _decode_text(library))


def pack_publish(request: PublishRequest) -> bytes:
    """Pack the payload of PUBLISH and BORROW."""
    name, target = request.name.encode(), request.target.encode()
    return (
        _PUBLISH_LENGTHS.pack(len(name), len(target), len(request.share_handle), 0)
        + name
        + target
        + request.share_handle
    )


def parse_publish(payload: bytes) -> PublishRequest:
    """Parse the payload of PUBLISH and BORROW."""
    if len(payload) < _PUBLISH_LENGTHS.size:
        _refuse(f"a publication has at least {_PUBLISH_LENGTHS.size} bytes of payload, not {len(payload)}")
    name_length_bytes, target_length_bytes, handle_length_bytes, reserved = _PUBLISH_LENGTHS.unpack_from(payload)
    body = payload[_PUBLISH_LENGTHS.size :]
    if reserved or name_length_bytes + target_length_bytes + handle_length_bytes != len(body):
        _refuse(f"the lengths in a publication do not add up to its {len(body)} bytes")
    target_end = name_length_bytes + target_length_bytes
    name, target = body[:name_length_bytes], body[name_length_bytes:target_end]
    return PublishRequest(_decode_text(name), _decode_text(target), body[target_end:])


def pack_name(name: str) -> bytes:
    """Pack a payload that is one name."""
    encoded_name = name.encode()
    return _NAME_LENGTH.pack(len(encoded_name)) + encoded_name


def parse_name(payload: bytes) -> str:
    """Parse a payload that is one name."""
    if len(payload) < _NAME_LENGTH.size or _NAME_LENGTH.unpack_from(payload)[0] != len(payload) - _NAME_LENGTH.size:
        _refuse("the length of a name does not match the rest of the payload")
    return _decode_text(payload[_NAME_LENGTH.size :])


def pack_number(number: int) -> bytes:
    """Pack a payload that is one number of 64 bits."""
    return _NUMBER.pack(number)


def parse_number(payload: bytes) -> int:
    """Parse a payload that is one number of 64 bits."""
    if len(payload) != _NUMBER.size:
        _refuse(f"a number has {_NUMBER.size} bytes, not {len(payload)}")
    return int(_NUMBER.unpack(payload)[0])


def pack_punch(flags: int, ranges: tuple[tuple[int, int], ...]) -> bytes:
    """Pack the payload of PUNCH_HOLE: flags, and the begin and end of each range."""
    return _PUNCH.pack(flags, len(ranges), 0) + b"".join(_RANGE.pack(begin, end) for begin, end in ranges)


def parse_punch(payload: bytes) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Parse the payload of PUNCH_HOLE: flags, and the begin and end of each range."""
    if len(payload) < _PUNCH.size:
        _refuse(f"PUNCH_HOLE has at least {_PUNCH.size} bytes of payload, not {len(payload)}")
    flags, range_count, reserved = _PUNCH.unpack_from(payload)
    body = payload[_PUNCH.size :]
    if reserved or not 0 < range_count <= RANGES_MAX or len(body) != range_count * _RANGE.size:
        _refuse(f"PUNCH_HOLE has 1 to {RANGES_MAX} ranges, not {range_count} in {len(body)} bytes")
    return flags, tuple((begin, end) for begin, end in _RANGE.iter_unpack(body))


def _decode_text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        message = "agent message: a text is not UTF-8"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    if "\0" in text:
        _refuse("a text contains a zero byte")
    return text


def _refuse(detail: str) -> NoReturn:
    message = f"agent message: {detail}"
    raise UsageError(message, reason=Reason.MALFORMED)
