"""The messages of an agent's socket, packed and parsed.

Level 5, pure. ``native/usrbio/client/agent_protocol.hpp`` is the same in C++. One message of the SOCK_SEQPACKET socket
is a header of 32 bytes and its payload, in the byte order of the host, since both ends are on it. Whoever may open the
socket may send anything: what is not exactly a message is ``UsageError`` with ``MALFORMED``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NoReturn

from gdrkit.errors import Reason, UsageError

__all__ = [
    "DESCRIPTORS_MAX",
    "HEADER_BYTES",
    "MESSAGE_BYTES_MAX",
    "RANGES_MAX",
    "Hello",
    "Message",
    "Publish",
    "Request",
    "pack",
    "pack_hello",
    "pack_link",
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

MAGIC = 0x41524447
VERSION = 1
MESSAGE_BYTES_MAX = 32768
DESCRIPTORS_MAX = 2
RANGES_MAX = 1000

_HEADER = struct.Struct("=IHHIIQiI")
HEADER_BYTES = _HEADER.size
_HELLO = struct.Struct("=QII32s")
_PUBLISH = struct.Struct("=HHHH")
_LENGTH = struct.Struct("=H")
_NUMBER = struct.Struct("=Q")
_PUNCH = struct.Struct("=QII")
_RANGE = struct.Struct("=QQ")


class Request(enum.IntEnum):
    """What is asked; a reply has the type of its request."""

    HELLO = 1
    PUBLISH = 2
    UNPUBLISH = 3
    REGISTER_FILE = 4
    DEREGISTER_FILE = 5
    PUNCH_HOLE = 6
    HARD_LINK = 7
    BORROW = 8
    GIVE_BACK = 9


# How many descriptors each may bring.
_DESCRIPTORS = {
    Request.PUBLISH: range(DESCRIPTORS_MAX + 1),
    Request.REGISTER_FILE: range(1, 2),
    Request.PUNCH_HOLE: range(1, 2),
    Request.HARD_LINK: range(2, 3),
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `status` is 0 in a request, and 0 or a positive errno in a reply."""

    request: Request
    sequence: int
    payload: bytes
    descriptors: int = 0
    status: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks, and which features it has (none are defined)."""

    features: int
    process_id: int
    library: str


@dataclass(frozen=True, slots=True)
class Publish:
    """The name and target of a link, and the share handle of device memory (empty: host memory)."""

    name: str
    target: str
    share_handle: bytes


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        message.request,
        len(message.payload),
        message.descriptors,
        message.sequence,
        message.status,
        0,
    )
    return head + message.payload


def parse(data: bytes, *, descriptors: int, is_reply: bool = False) -> Message:
    """A message that came with so many descriptors."""
    if not HEADER_BYTES <= len(data) <= MESSAGE_BYTES_MAX:
        _refuse(f"{len(data)} bytes are no message")
    magic, version, number, length, announced, sequence, status, reserved = _HEADER.unpack_from(data)
    if magic != MAGIC:
        _refuse("it does not begin with GDRA")
    if version != VERSION:
        _refuse(f"it has version {version}, and this is {VERSION}")
    if length != len(data) - HEADER_BYTES:
        _refuse(f"{length} bytes were announced, {len(data) - HEADER_BYTES} came")
    if number not in frozenset(Request):
        _refuse(f"there is no request {number}")
    if reserved or status < 0 or (status and not is_reply):
        _refuse("a fixed field is wrong")
    request = Request(number)
    if announced != descriptors or (not is_reply and descriptors not in _DESCRIPTORS.get(request, range(1))):
        _refuse(f"{request.name} with {descriptors} descriptors, {announced} announced")
    return Message(request, sequence, data[HEADER_BYTES:], descriptors, status)


def pack_hello(hello: Hello) -> bytes:
    """The payload of a hello."""
    return _HELLO.pack(hello.features, hello.process_id, 0, hello.library.encode()[:31])


def parse_hello(payload: bytes) -> Hello:
    """The payload of a hello."""
    if len(payload) != _HELLO.size:
        _refuse("a hello of another size")
    features, process_id, reserved, library = _HELLO.unpack(payload)
    text, _, rest = library.partition(b"\0")
    if reserved or any(rest):
        _refuse("a hello with bytes where nothing may be")
    return Hello(features, process_id, _text(text))


def pack_publish(publish: Publish) -> bytes:
    """The payload of a publication."""
    name, target = publish.name.encode(), publish.target.encode()
    return _PUBLISH.pack(len(name), len(target), len(publish.share_handle), 0) + name + target + publish.share_handle


def parse_publish(payload: bytes) -> Publish:
    """The payload of a publication."""
    if len(payload) < _PUBLISH.size:
        _refuse("a publication that was cut off")
    name_bytes, target_bytes, handle_bytes, reserved = _PUBLISH.unpack_from(payload)
    body = payload[_PUBLISH.size :]
    if reserved or name_bytes + target_bytes + handle_bytes != len(body):
        _refuse("a publication whose parts are not as long as it says")
    name, target = body[:name_bytes], body[name_bytes : name_bytes + target_bytes]
    return Publish(_text(name), _text(target), body[name_bytes + target_bytes :])


def pack_name(name: str) -> bytes:
    """The payload that is one name."""
    data = name.encode()
    return _LENGTH.pack(len(data)) + data


def parse_name(payload: bytes) -> str:
    """The payload that is one name."""
    if len(payload) < _LENGTH.size or _LENGTH.unpack_from(payload)[0] != len(payload) - _LENGTH.size:
        _refuse("a name of another length than it says")
    return _text(payload[_LENGTH.size :])


def pack_link(name: str) -> bytes:
    """The payload of a hard link: its name in the folder."""
    return pack_name(name)


def pack_number(number: int) -> bytes:
    """The payload that is one number of 64 bits."""
    return _NUMBER.pack(number)


def parse_number(payload: bytes) -> int:
    """The payload that is one number of 64 bits."""
    if len(payload) != _NUMBER.size:
        _refuse("a number of another size")
    return int(_NUMBER.unpack(payload)[0])


def pack_punch(flags: int, ranges: tuple[tuple[int, int], ...]) -> bytes:
    """The payload of punch hole."""
    return _PUNCH.pack(flags, len(ranges), 0) + b"".join(_RANGE.pack(begin, end) for begin, end in ranges)


def parse_punch(payload: bytes) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Flags and ranges of punch hole."""
    if len(payload) < _PUNCH.size:
        _refuse("punch hole was cut off")
    flags, count, reserved = _PUNCH.unpack_from(payload)
    body = payload[_PUNCH.size :]
    if reserved or not 0 < count <= RANGES_MAX or len(body) != count * _RANGE.size:
        _refuse(f"punch hole with {count} ranges in {len(body)} bytes")
    return flags, tuple((begin, end) for begin, end in _RANGE.iter_unpack(body))


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        message = "agent message: a text is no UTF-8"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    if "\0" in text:
        _refuse("a text has a zero")
    return text


def _refuse(why: str) -> NoReturn:
    message = f"agent message: {why}"
    raise UsageError(message, reason=Reason.MALFORMED)
