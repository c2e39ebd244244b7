"""Feeds the parsers of the agent's socket with whatever a fuzzer comes up with: ``fuzz_messages.py --seconds 10``.

Messages, what is in them, the names and targets of publications. atheris guides it by coverage where it is installed
for this Python (PyPI: ``atheris``); elsewhere right messages are changed at random. Either way a run ends with 0 and
one line that says which it was and how many inputs it saw, or with what an input raised besides its documented refusal.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import inspect
import itertools
import random
import struct
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from gdrkit.errors import Reason, UsageError
from gdrkit.usrbio.agent import link_names, protocol
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.protocol import AgentHello, AgentMessage, AgentRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["changed_messages", "main", "one_input"]

_UUID = "0f0e0d0c-0b0a-0908-0706-050403020100"
_TARGET = "gdr://v2/device/0/allocation/2097152/offset/4096/size/65536/"
_LENGTH = struct.Struct("=I")
# Of the header: where the length of what follows stands.
_LENGTH_AT = 8


def _again(request: AgentRequest, payload: bytes) -> bytes:
    """Parse what is in a message, and what a publication says, and pack it."""
    match request:
        case AgentRequest.HELLO:
            return protocol.pack_hello(protocol.parse_hello(payload))
        case AgentRequest.PUBLISH | AgentRequest.BORROW:
            asked = protocol.parse_publish(payload)
            for parse, text in ((link_names.parse_name, asked.name), (link_names.parse_device_target, asked.target)):
                _refused_or_read(parse, text)
            return protocol.pack_publish(asked)
        case AgentRequest.UNPUBLISH | AgentRequest.GIVE_BACK:
            name = protocol.parse_name(payload)
            _refused_or_read(link_names.parse_name, name)
            return protocol.pack_name(name)
        case AgentRequest.HARD_LINK:
            return protocol.pack_name(protocol.parse_name(payload))
        case AgentRequest.PUNCH_HOLE:
            return protocol.pack_punch(*protocol.parse_punch(payload))
        case AgentRequest.REGISTER_FILE | AgentRequest.DEREGISTER_FILE:
            return protocol.pack_number(protocol.parse_number(payload))


def _refused_or_read(parse: Callable[[str], object], text: str) -> None:
    try:
        parse(text)
    except AgentError as error:
        if error.errno != errno.EINVAL:
            raise


def one_input(data: bytes) -> None:
    """Parse it as a message that came with as many descriptors as it says, and with the right length in its header."""
    for candidate in (data, _sealed(data)):
        for descriptors in range(protocol.DESCRIPTORS_MAX + 1):
            try:
                message = protocol.parse(candidate, descriptors=descriptors)
                again = _again(message.request, message.payload)
            except UsageError as error:
                if error.reason is not Reason.MALFORMED:
                    raise
            else:
                packed = protocol.pack(AgentMessage(message.request, message.sequence, again, message.descriptors))
                if packed != candidate:
                    text = f"{candidate.hex()} is packed to {packed.hex()}"
                    raise AssertionError(text)


def _sealed(data: bytes) -> bytes:
    head = bytearray(data[: protocol.HEADER_BYTES].ljust(protocol.HEADER_BYTES, b"\0"))
    _LENGTH.pack_into(head, _LENGTH_AT, max(0, len(data) - protocol.HEADER_BYTES))
    return bytes(head) + data[protocol.HEADER_BYTES :]


def _right_messages() -> list[bytes]:
    publications = (
        PublishRequest(_UUID, f"/dev/shm/hf3fs-iov-{_UUID}", b""),  # noqa: S108 - a target.
        PublishRequest(f"{_UUID}.b4096", "/dev/shm/x", b""),  # noqa: S108
        PublishRequest(f"{_UUID}.r-16.ph.t50.f11", "/dev/shm/x", b""),  # noqa: S108
        PublishRequest(f"{_UUID}.gdr.d0", f"{_TARGET}dmabuf", bytes(range(80))),
        PublishRequest(f"{_UUID}.gdr.d0", f"{_TARGET}ipc/{'5a' * 64}", bytes(80)),
    )
    messages = [
        AgentMessage(AgentRequest.HELLO, 1, protocol.pack_hello(AgentHello(0, 4711, "hf3fs_api_shared"))),
        *(AgentMessage(AgentRequest.PUBLISH, 2, protocol.pack_publish(each), 1) for each in publications),
        AgentMessage(AgentRequest.UNPUBLISH, 3, protocol.pack_name(f"{_UUID}.w0")),
        AgentMessage(AgentRequest.BORROW, 8, protocol.pack_publish(publications[0])),
        AgentMessage(AgentRequest.GIVE_BACK, 9, protocol.pack_name(_UUID)),
        AgentMessage(AgentRequest.REGISTER_FILE, 4, protocol.pack_number(0), 1),
        AgentMessage(AgentRequest.DEREGISTER_FILE, 5, protocol.pack_number(1 << 63)),
        AgentMessage(AgentRequest.PUNCH_HOLE, 6, protocol.pack_punch(0, ((0, 4096), (1 << 40, (1 << 40) + 1))), 1),
        AgentMessage(AgentRequest.HARD_LINK, 7, protocol.pack_name("name"), 2),
    ]
    return [protocol.pack(each) for each in messages]


def _by_atheris(seconds: float, seed: int) -> NoReturn:
    atheris = importlib.import_module("atheris")
    for module in (protocol, link_names):
        for member in vars(module).values():
            if inspect.isfunction(member) and member.__module__ == module.__name__:
                atheris.instrument_func(member)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-max_len=1024", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options], one_input)
    # Ends the process: with 0 after that time, with 77 at the first input that raised.
    atheris.Fuzz()
    sys.exit(0)


def changed_messages(chance: random.Random, count: int | None = None) -> Iterator[bytes]:
    """Right messages, changed at random in up to four places; so many, or without end."""
    right = _right_messages()
    for _ in itertools.repeat(None) if count is None else range(count):
        data = bytearray(chance.choice(right))
        for _change in range(chance.randint(0, 4)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(5):
                case 0:
                    data[at : at + 4] = chance.randbytes(4)
                case 1:
                    data[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80"))
                case 2:
                    del data[at : at + chance.randint(1, 8)]
                case 3:
                    # Within the alphabet of names, more of what is built this way is read to its end.
                    data[at : at + 1] = bytes([chance.choice(b"0123456789abcdef.-/rwpthlbg")])
                case _:
                    data[at:at] = chance.randbytes(chance.randint(1, 8))
        yield bytes(data)


def _by_chance(seconds: float, seed: int) -> int:
    end, count = time.monotonic() + seconds, 0
    for data in changed_messages(random.Random(seed)):
        if time.monotonic() >= end:
            break
        one_input(data)
        count += 1
    return count


def main() -> None:
    """Fuzz for so long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Half of the time each: what is changed at random begins with right messages, atheris with nothing.
    has_atheris = importlib.util.find_spec("atheris") is not None
    share_s = options.seconds / 2 if has_atheris else options.seconds
    for data in _right_messages():
        one_input(data)
    count = _by_chance(share_s, options.seed)
    guided = f"and then atheris for {share_s:g} s" if has_atheris else "atheris is not installed for this Python"
    print(f"{count} changed messages in {share_s:g} s; {guided}", flush=True)  # noqa: T201
    if has_atheris:
        _by_atheris(share_s, options.seed)


if __name__ == "__main__":
    main()
