"""Feeds the parsers of the storage service with whatever a fuzzer comes up with: ``fuzz_frames.py --seconds 20``.

atheris guides it by coverage where it is installed for this Python (PyPI: ``atheris``); elsewhere right frames are
changed at random. Either way a run ends with 0 and one line that says which it was and how many inputs it saw, or with
what an input raised besides UsageError(MALFORMED).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import random
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError
from gdrkit.storage import control, wire
from gdrkit.storage.checksum import crc32c
from gdrkit.storage.wire import HEADER_BYTES, FrameType

__all__ = ["main", "one_input", "parse_frame"]

_VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "frames.txt"
_CHECKSUM = struct.Struct("<I")


def parse_frame(frame: bytes) -> bytes:
    """Parse a whole frame and pack it again: what is right comes out as it went in."""
    header = wire.parse_header(frame[:HEADER_BYTES])
    payload = frame[HEADER_BYTES:]
    if header.type is FrameType.IO_REQUEST:
        return wire.pack_operations(wire.parse_operations(header, payload), sequence=header.sequence)
    if header.type is FrameType.IO_REPLY:
        return wire.pack_results(wire.parse_results(header, payload))
    wire.check_payload(header, payload)
    if header.type is FrameType.CONTROL_REQUEST:
        request = control.parse_request(payload)
        if control.parse_request(control.pack_request(request)) != request:
            message = f"{request} is not what it is packed to"
            raise AssertionError(message)
    return wire.pack_control(header.type, payload, sequence=header.sequence)


def one_input(data: bytes) -> None:
    """Parse it as a frame, as a frame with right checksums, and as the content of a control frame."""
    for candidate in (data, _sealed(data)):
        try:
            again = parse_frame(candidate)
        except UsageError as error:
            if error.reason is not Reason.MALFORMED:
                raise
        else:
            if again != candidate:
                message = f"{candidate.hex()} is packed to {again.hex()}"
                raise AssertionError(message)
    try:
        control.parse_request(data)
    except UsageError as error:
        if error.reason is not Reason.MALFORMED:
            raise


def _sealed(data: bytes) -> bytes:
    # No fuzzer guesses a CRC: with right ones, what is behind them is reached too.
    head = data[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8, b"\0")
    payload = data[HEADER_BYTES:]
    head += _CHECKSUM.pack(crc32c(payload))
    return head + _CHECKSUM.pack(crc32c(head)) + payload


def _right_frames() -> list[bytes]:
    lines = [line.split() for line in _VECTORS.read_text().splitlines()]
    return [bytes.fromhex(words[2]) for words in lines if words and words[0] == "right"]


def _by_atheris(seconds: float, seed: int) -> NoReturn:
    atheris = importlib.import_module("atheris")
    for module in (wire, control, serialization):
        for member in vars(module).values():
            if inspect.isfunction(member) and member.__module__ == module.__name__:
                atheris.instrument_func(member)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-max_len=1024", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options], one_input)
    # Ends the process: with 0 after that time, with 77 at the first input that raised.
    atheris.Fuzz()
    sys.exit(0)


def _by_chance(seconds: float, seed: int) -> int:
    chance, right = random.Random(seed), _right_frames()
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        data = bytearray(chance.choice(right))
        for _ in range(chance.randint(0, 4)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[at : at + 8] = chance.randbytes(8)
                case 1:
                    data[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80"))
                case 2:
                    del data[at : at + chance.randint(1, 8)]
                case _:
                    data[at:at] = chance.randbytes(chance.randint(1, 8))
        one_input(bytes(data))
        count += 1
    return count


def main() -> None:
    """Fuzz for so long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Half of the time each: what is changed at random begins with right frames, atheris with nothing.
    has_atheris = importlib.util.find_spec("atheris") is not None
    share_s = options.seconds / 2 if has_atheris else options.seconds
    for data in _right_frames():
        one_input(data)
    count = _by_chance(share_s, options.seed)
    guided = f"and then atheris for {share_s:g} s" if has_atheris else "atheris is not installed for this Python"
    print(f"{count} changed frames in {share_s:g} s; {guided}", flush=True)  # noqa: T201
    if has_atheris:
        _by_atheris(share_s, options.seed)


if __name__ == "__main__":
    main()
