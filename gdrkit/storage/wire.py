"""Packing and parsing of the frames between a client and a server of the storage service.

``native/storage/frames.hpp`` does the same in C++. Tests compare both with the bytes in ``suites/vectors/frames.txt``.
All numbers are little endian. A frame is a header of 32 bytes and its payload:

==========  =====  ==============================================================
offset      bytes  field
==========  =====  ==============================================================
0           4      magic, ``GDRS``
4           2      version, 1
6           2      type: control request 1, control reply 2, io request 3, io reply 4
8           4      length of the payload
12          4      count of operations or results; 0 in a control frame
16          8      sequence: a control reply repeats it; 0 in an io reply
24          4      CRC32C of the payload
28          4      CRC32C of the 28 bytes before it
==========  =====  ==============================================================

A control frame contains one JSON object of at most 64 KiB (:mod:`gdrkit.storage.messages`). An io request contains 1 to
1024 operations of 64 bytes. An io reply contains 1 to 1024 results of 32 bytes, and then their hole extents of 16
bytes. Any violation raises :class:`UsageError` with ``MALFORMED``. The reader then ends the connection, because the
start of the next frame is unknown.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from gdrkit.errors import Reason, UsageError
from gdrkit.storage.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CONTROL_BYTES_MAX",
    "HEADER_BYTES",
    "HOLES_MAX",
    "OPERATIONS_MAX",
    "FrameType",
    "Header",
    "HoleExtent",
    "IoOpcode",
    "Operation",
    "OperationFlag",
    "Result",
    "ResultFlag",
    "check_payload",
    "pack_control",
    "pack_operations",
    "pack_results",
    "parse_header",
    "parse_operations",
    "parse_results",
]

# The bytes GDRS as a number.
MAGIC = 0x53524447
VERSION = 1
CONTROL_BYTES_MAX = 65536
OPERATIONS_MAX = 1024
# Largest number of holes that one operation reports. Further holes arrive as zeros.
HOLES_MAX = 4096

# Magic, version, type, length, count, sequence, CRC32C of the payload.
_HEADER_STRUCT = struct.Struct("<IHHIIQI")
# CRC32C of the header.
_CHECKSUM_STRUCT = struct.Struct("<I")
# Tag, handle, file offset, length, remote address; rkey, queue pair, opcode, flags; checksum, two reserved numbers.
_OPERATION_STRUCT = struct.Struct("<QQQQQIHBBIIQ")
# Tag, result, checksum, flags, number of hole extents, a reserved number.
_RESULT_STRUCT = struct.Struct("<QqIIII")
# Offset, length.
_HOLE_STRUCT = struct.Struct("<QQ")
HEADER_BYTES = _HEADER_STRUCT.size + _CHECKSUM_STRUCT.size
# Largest payload of an io reply: the size of 1024 results with 64 hole extents each. A single result may have up to
# HOLES_MAX extents. If the results do not fit into one reply, the server sends several replies.
_REPLY_BYTES_MAX = OPERATIONS_MAX * (_RESULT_STRUCT.size + 64 * _HOLE_STRUCT.size)


class FrameType(enum.IntEnum):
    """The type of a frame."""

    CONTROL_REQUEST = 1
    CONTROL_REPLY = 2
    IO_REQUEST = 3
    IO_REPLY = 4


class IoOpcode(enum.IntEnum):
    """The direction of an operation. ``READ``: from the file to the memory of the client."""

    READ = 1
    WRITE = 2


class OperationFlag(enum.IntFlag):
    """Flags of an operation.

    ``FORBID_HOLES``: a read fails with -ENODATA if the range of the file has a hole. ``REPORT_HOLES``: the result of a
    read has the holes, and the server does not write zeros to memory for them. ``CHECKSUM_GIVEN``: a write has the
    CRC32C of its bytes. If other bytes arrive, the write fails with -EBADMSG and changes nothing. ``CHECKSUM_WANTED``:
    the result has the CRC32C of the moved bytes.
    """

    FORBID_HOLES = 1
    CHECKSUM_GIVEN = 2
    CHECKSUM_WANTED = 4
    REPORT_HOLES = 8


class ResultFlag(enum.IntFlag):
    """Flags of a result. ``CHECKSUM_VALID``: the result has a checksum."""

    CHECKSUM_VALID = 1


_NO_OPERATION_FLAG = OperationFlag(0)
_NO_RESULT_FLAG = ResultFlag(0)
_READ_FLAGS = OperationFlag.FORBID_HOLES | OperationFlag.CHECKSUM_WANTED | OperationFlag.REPORT_HOLES
_WRITE_FLAGS = OperationFlag.CHECKSUM_GIVEN | OperationFlag.CHECKSUM_WANTED


@dataclass(frozen=True, slots=True)
class Header:
    """A frame header whose checksum and numbers were checked."""

    type: FrameType
    length: int
    count: int
    sequence: int
    payload_crc32c: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One read or write. All numbers are unsigned.

    Attributes
    ----------
    tag : int
        Chosen by the client, 64 bits. The result repeats it.
    handle : int
        Handle of the open file.
    file_offset, length : int
        Range of the file, in bytes.
    remote_address, rkey : int
        Address and rkey of the memory of the client, as its memory region has them.
    queue_pair : int
        Queue pair of the session: its index in ``lanes`` of the hello request.
    opcode : IoOpcode
    flags : OperationFlag
    checksum : int
        CRC32C of the bytes with ``CHECKSUM_GIVEN``, otherwise 0.
    """

    tag: int
    handle: int
    file_offset: int
    length: int
    remote_address: int
    rkey: int
    queue_pair: int
    opcode: IoOpcode
    flags: OperationFlag = _NO_OPERATION_FLAG
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class HoleExtent:
    """A hole of the file within an operation. `offset` counts from the first byte of the operation."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an operation. `result` is the number of moved bytes, or a negative errno.

    At the end of the file, this number is smaller than requested.
    """

    tag: int
    result: int
    checksum: int = 0
    flags: ResultFlag = _NO_RESULT_FLAG
    holes: tuple[HoleExtent, ...] = field(default=())


def pack_control(frame_type: FrameType, payload: bytes, *, sequence: int) -> bytes:
    """Return a control frame."""
    if (
        frame_type not in {FrameType.CONTROL_REQUEST, FrameType.CONTROL_REPLY}
        or not 0 < len(payload) <= CONTROL_BYTES_MAX
    ):
        message = f"a {frame_type.name} frame cannot have a payload of {len(payload)} bytes"
        raise UsageError(message)
    return _pack_frame(frame_type, payload, count=0, sequence=sequence)


def pack_operations(operations: Sequence[Operation], *, sequence: int) -> bytes:
    """Return an io request."""
    if not 0 < len(operations) <= OPERATIONS_MAX:
        message = f"a frame must have 1 to {OPERATIONS_MAX} operations, not {len(operations)}"
        raise UsageError(message)
    try:
        packed_entries = [
            _OPERATION_STRUCT.pack(
                operation.tag,
                operation.handle,
                operation.file_offset,
                operation.length,
                operation.remote_address,
                operation.rkey,
                operation.queue_pair,
                operation.opcode,
                operation.flags,
                operation.checksum,
                0,
                0,
            )
            for operation in operations
        ]
    except struct.error as error:
        message = f"a number of an operation is out of range: {error}"
        raise UsageError(message) from error
    return _pack_frame(FrameType.IO_REQUEST, b"".join(packed_entries), count=len(operations), sequence=sequence)


def pack_results(results: Sequence[Result]) -> bytes:
    """Return an io reply."""
    if not 0 < len(results) <= OPERATIONS_MAX:
        message = f"a frame must have 1 to {OPERATIONS_MAX} results, not {len(results)}"
        raise UsageError(message)
    packed_parts = [
        _RESULT_STRUCT.pack(result.tag, result.result, result.checksum, result.flags, len(result.holes), 0)
        for result in results
    ]
    packed_parts += [_HOLE_STRUCT.pack(hole.offset, hole.length) for result in results for hole in result.holes]
    return _pack_frame(FrameType.IO_REPLY, b"".join(packed_parts), count=len(results), sequence=0)


def parse_header(data: bytes) -> Header:
    """Check and parse the 32 bytes at the start of a frame."""
    if len(data) != HEADER_BYTES:
        _refuse(f"a header must have {HEADER_BYTES} bytes, not {len(data)}")
    (checksum,) = _CHECKSUM_STRUCT.unpack_from(data, _HEADER_STRUCT.size)
    if checksum != crc32c(data[: _HEADER_STRUCT.size]):
        _refuse("the checksum of the header is wrong")
    magic, version, type_number, length, count, sequence, payload_crc32c = _HEADER_STRUCT.unpack_from(data)
    if magic != MAGIC:
        _refuse(f"the magic must be {MAGIC:#x}, not {magic:#x}")
    if version != VERSION:
        _refuse(f"the version must be {VERSION}, not {version}")
    try:
        frame_type = FrameType(type_number)
    except ValueError as error:
        message = f"frame: unknown type {type_number}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    if not _is_valid_header(frame_type, length, count, sequence):
        _refuse(f"{frame_type.name} cannot have {length} bytes, count {count}, sequence {sequence}")
    return Header(type=frame_type, length=length, count=count, sequence=sequence, payload_crc32c=payload_crc32c)


def check_payload(header: Header, payload: bytes) -> None:
    """Check length and checksum of the payload against the header."""
    if len(payload) != header.length:
        _refuse(f"the header announced {header.length} bytes, and {len(payload)} arrived")
    if crc32c(payload) != header.payload_crc32c:
        _refuse("the checksum of the payload is wrong")


def parse_operations(header: Header, payload: bytes) -> tuple[Operation, ...]:
    """Return the operations of an io request."""
    if header.type is not FrameType.IO_REQUEST:
        _refuse(f"{header.type.name} has no operations")
    check_payload(header, payload)
    return tuple(_parse_operation(fields) for fields in _OPERATION_STRUCT.iter_unpack(payload))


def parse_results(header: Header, payload: bytes) -> tuple[Result, ...]:
    """Return the results of an io reply."""
    if header.type is not FrameType.IO_REPLY:
        _refuse(f"{header.type.name} has no results")
    check_payload(header, payload)
    results_bytes = header.count * _RESULT_STRUCT.size
    result_rows = list(_RESULT_STRUCT.iter_unpack(payload[:results_bytes]))
    if (len(payload) - results_bytes) != sum(
        hole_count for *_, hole_count, _reserved in result_rows
    ) * _HOLE_STRUCT.size:
        _refuse("the number of hole extents differs from the number in the results")
    all_holes = [
        HoleExtent(offset=offset, length=length) for offset, length in _HOLE_STRUCT.iter_unpack(payload[results_bytes:])
    ]
    results, next_hole_index = [], 0
    for tag, result, checksum, flags, hole_count, reserved in result_rows:
        if flags & ~int(ResultFlag.CHECKSUM_VALID) or reserved or hole_count > HOLES_MAX:
            _refuse(f"a result cannot have flags {flags:#x}, {hole_count} holes, reserved {reserved:#x}")
        result_holes = tuple(all_holes[next_hole_index : next_hole_index + hole_count])
        next_hole_index += hole_count
        _check_holes(result, result_holes)
        results.append(Result(tag=tag, result=result, checksum=checksum, flags=ResultFlag(flags), holes=result_holes))
    return tuple(results)


def _check_holes(result: int, holes: tuple[HoleExtent, ...]) -> None:
    """Refuse holes that overlap, are empty, or are outside of the bytes that the result reports."""
    previous_end = 0
    for hole in holes:
        if hole.offset < previous_end or not hole.length or hole.offset + hole.length > result:
            _refuse(f"a result of {result} bytes cannot have a hole of {hole.length} bytes at offset {hole.offset}")
        previous_end = hole.offset + hole.length


def _parse_operation(fields: tuple[int, ...]) -> Operation:
    """Return the operation with these fields, which have the order of ``_OPERATION_STRUCT``."""
    tag, handle, offset, length, address, rkey, queue_pair, opcode_number, flags, checksum, reserved0, reserved1 = (
        fields
    )
    try:
        opcode = IoOpcode(opcode_number)
    except ValueError as error:
        message = f"frame: unknown opcode {opcode_number}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    # The flags are compared as plain numbers, because the complement of an IntFlag contains only known
    # flags, so unknown flags would be accepted.
    if flags & ~int(_READ_FLAGS if opcode is IoOpcode.READ else _WRITE_FLAGS):
        _refuse(f"a {opcode.name} cannot have flags {flags:#x}")
    if reserved0 or reserved1 or (checksum and not flags & OperationFlag.CHECKSUM_GIVEN):
        _refuse("a reserved field of an operation, or a checksum without its flag, is not 0")
    return Operation(
        tag=tag,
        handle=handle,
        file_offset=offset,
        length=length,
        remote_address=address,
        rkey=rkey,
        queue_pair=queue_pair,
        opcode=opcode,
        flags=OperationFlag(flags),
        checksum=checksum,
    )


def _is_valid_header(frame_type: FrameType, length: int, count: int, sequence: int) -> bool:
    """Return whether a frame of this type can have these numbers in its header."""
    if frame_type in {FrameType.CONTROL_REQUEST, FrameType.CONTROL_REPLY}:
        return count == 0 and 0 < length <= CONTROL_BYTES_MAX
    if not 0 < count <= OPERATIONS_MAX:
        return False
    if frame_type is FrameType.IO_REQUEST:
        return length == count * _OPERATION_STRUCT.size
    holes_bytes = length - count * _RESULT_STRUCT.size
    return sequence == 0 and holes_bytes >= 0 and holes_bytes % _HOLE_STRUCT.size == 0 and length <= _REPLY_BYTES_MAX


def _pack_frame(frame_type: FrameType, payload: bytes, *, count: int, sequence: int) -> bytes:
    header = _HEADER_STRUCT.pack(MAGIC, VERSION, frame_type, len(payload), count, sequence, crc32c(payload))
    return header + _CHECKSUM_STRUCT.pack(crc32c(header)) + payload


def _refuse(problem: str) -> NoReturn:
    message = f"frame: {problem}"
    raise UsageError(message, reason=Reason.MALFORMED)
