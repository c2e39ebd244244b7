"""Fuzz target for the parsers of the agent's messages, link names and link targets.

Start it with ``python -m usrbio.fuzz_messages --seconds 10``.
"""

from __future__ import annotations

import errno
import struct
from functools import partial
from typing import TYPE_CHECKING

from support import fuzz

from gdrkit.usrbio.agent import link_names, protocol
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.protocol import AgentHello, AgentMessage, AgentRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGET"]

_UUID = "0f0e0d0c-0b0a-0908-0706-050403020100"
_DEVICE_TARGET = "gdr://v2/device/0/allocation/2097152/offset/4096/size/65536/"
_LENGTH_FIELD = struct.Struct("=I")
# Offset in the header of the payload length, in bytes.
_LENGTH_FIELD_OFFSET = 8


def _repack_payload(request: AgentRequest, payload: bytes) -> bytes:
    """Parse the payload of a message and the link names and targets in it. Return the result, packed again."""
    match request:
        case AgentRequest.HELLO:
            return protocol.pack_hello(protocol.parse_hello(payload))
        case AgentRequest.PUBLISH | AgentRequest.BORROW:
            publish = protocol.parse_publish(payload)
            for parse, text in (
                (link_names.parse_name, publish.name),
                (link_names.parse_device_target, publish.target),
            ):
                _parse_or_einval(parse, text)
            return protocol.pack_publish(publish)
        case AgentRequest.UNPUBLISH | AgentRequest.UNPUBLISH_AND_KEEP | AgentRequest.RETURN_BORROWED:
            name = protocol.parse_name(payload)
            _parse_or_einval(link_names.parse_name, name)
            return protocol.pack_name(name)
        case AgentRequest.HARD_LINK:
            return protocol.pack_name(protocol.parse_name(payload))
        case AgentRequest.PUNCH_HOLE:
            return protocol.pack_punch(*protocol.parse_punch(payload))
        case AgentRequest.REGISTER_FILE | AgentRequest.DEREGISTER_FILE | AgentRequest.DROP_KEPT:
            return protocol.pack_number(protocol.parse_number(payload))


def _parse_or_einval(parse: Callable[[str], object], text: str) -> None:
    """Parse a text. The only allowed error is EINVAL."""
    try:
        parse(text)
    except AgentError as error:
        if error.errno != errno.EINVAL:
            raise


def _repack_message(data: bytes, *, descriptor_count: int) -> bytes:
    message = protocol.parse(data, descriptor_count=descriptor_count)
    payload = _repack_payload(message.request_type, message.payload)
    return protocol.pack(AgentMessage(message.request_type, message.sequence, payload, message.descriptor_count))


def _repack_with_each_descriptor_count(data: bytes) -> None:
    """Parse the data as a message that arrived with each possible number of descriptors.

    Then do the same with a copy of the data whose header has the right payload length.
    """
    for message_bytes in (data, _set_valid_length(data)):
        for descriptor_count in range(protocol.DESCRIPTORS_MAX + 1):
            fuzz.require_round_trip(partial(_repack_message, descriptor_count=descriptor_count), message_bytes)


def _set_valid_length(data: bytes) -> bytes:
    header = bytearray(data[: protocol.HEADER_BYTES].ljust(protocol.HEADER_BYTES, b"\0"))
    _LENGTH_FIELD.pack_into(header, _LENGTH_FIELD_OFFSET, max(0, len(data) - protocol.HEADER_BYTES))
    return bytes(header) + data[protocol.HEADER_BYTES :]


def _make_valid_messages() -> list[bytes]:
    publications = (
        PublishRequest(_UUID, f"/dev/shm/hf3fs-iov-{_UUID}", b""),  # noqa: S108 - a link target.
        PublishRequest(f"{_UUID}.b4096", "/dev/shm/x", b""),  # noqa: S108
        PublishRequest(f"{_UUID}.r-16.ph.t50.f11", "/dev/shm/x", b""),  # noqa: S108
        PublishRequest(f"{_UUID}.gdr.d0", f"{_DEVICE_TARGET}dmabuf", bytes(range(80))),
        PublishRequest(f"{_UUID}.gdr.d0", f"{_DEVICE_TARGET}ipc/{'5a' * 64}", bytes(80)),
    )
    messages = [
        AgentMessage(AgentRequest.HELLO, 1, protocol.pack_hello(AgentHello(0, 4711, "hf3fs_api_shared"))),
        *(AgentMessage(AgentRequest.PUBLISH, 2, protocol.pack_publish(publication), 1) for publication in publications),
        AgentMessage(AgentRequest.UNPUBLISH, 3, protocol.pack_name(f"{_UUID}.w0")),
        AgentMessage(AgentRequest.BORROW, 8, protocol.pack_publish(publications[0])),
        AgentMessage(AgentRequest.RETURN_BORROWED, 9, protocol.pack_name(_UUID)),
        AgentMessage(AgentRequest.REGISTER_FILE, 4, protocol.pack_number(0), 1),
        AgentMessage(AgentRequest.DEREGISTER_FILE, 5, protocol.pack_number(1 << 63)),
        AgentMessage(AgentRequest.PUNCH_HOLE, 6, protocol.pack_punch(0, ((0, 4096), (1 << 40, (1 << 40) + 1))), 1),
        AgentMessage(AgentRequest.HARD_LINK, 7, protocol.pack_name("name"), 2),
    ]
    return [protocol.pack(message) for message in messages]


# Changed messages are valid more often if the fuzzer takes new bytes from the alphabet of link names.
TARGET = fuzz.FuzzTarget(
    _repack_with_each_descriptor_count,
    _make_valid_messages(),
    (protocol, link_names),
    alphabet=b"0123456789abcdef.-/rwpthlbg",
)

if __name__ == "__main__":
    fuzz.main({"messages": TARGET})
