"""Fuzz target of the storage service's frames: ``python -m storage.fuzz_frames --seconds 20``."""

from __future__ import annotations

import struct
from pathlib import Path

from support import fuzz

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError
from gdrkit.storage import control, wire
from gdrkit.storage.checksum import crc32c
from gdrkit.storage.wire import HEADER_BYTES, FrameType

__all__ = ["TARGET", "repack_frame"]

# Each line of this file has the word right or wrong, a name, and the bytes of a frame in hexadecimal digits.
_FRAMES_PATH = Path(__file__).resolve().parents[1] / "vectors" / "frames.txt"
_CHECKSUM_STRUCT = struct.Struct("<I")


def repack_frame(frame: bytes) -> bytes:
    """Parse a frame and pack the parsed values again. For a valid frame, the returned bytes equal `frame`."""
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
            message = f"{request} changes when it is packed and parsed"
            raise AssertionError(message)
    return wire.pack_control(header.type, payload, sequence=header.sequence)


def _check_all_parsers(data: bytes) -> None:
    """Parse the data as a frame, as a frame with valid checksums, and as the payload of a control frame."""
    for candidate in (data, _add_checksums(data)):
        fuzz.require_round_trip(repack_frame, candidate)
    try:
        control.parse_request(data)
    except UsageError as error:
        if error.reason is not Reason.MALFORMED:
            raise


def _add_checksums(data: bytes) -> bytes:
    """Return the data as a frame with valid checksums, so that the fuzzer gets past their check."""
    # The last 8 bytes of a header are the CRC32C of the payload and the CRC32C of the header before it.
    header = data[: HEADER_BYTES - 8].ljust(HEADER_BYTES - 8, b"\0")
    payload = data[HEADER_BYTES:]
    header += _CHECKSUM_STRUCT.pack(crc32c(payload))
    return header + _CHECKSUM_STRUCT.pack(crc32c(header)) + payload


def _read_valid_frames() -> list[bytes]:
    rows = [line.split() for line in _FRAMES_PATH.read_text().splitlines()]
    return [bytes.fromhex(fields[2]) for fields in rows if fields and fields[0] == "right"]


TARGET = fuzz.FuzzTarget(_check_all_parsers, _read_valid_frames(), (wire, control, serialization))

if __name__ == "__main__":
    fuzz.main({"frames": TARGET})
