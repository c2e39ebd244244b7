"""Frames and control messages: a parser restores the packed values, and each invalid input raises UsageError.

The tests of the C++ parser use the same vectors (native/storage/tests/parser_test.cpp).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.fuzz_frames import repack_frame
from support.fuzz import run_fuzzer

from gdrkit.errors import Reason, UsageError
from gdrkit.storage import messages
from gdrkit.storage._native import engine
from gdrkit.storage.checksum import crc32c, crc32c_by_table
from gdrkit.storage.control import REQUESTS, pack_request, parse_reply, parse_request
from gdrkit.storage.wire import (
    HEADER_BYTES,
    HoleExtent,
    IoOpcode,
    Operation,
    OperationFlag,
    Result,
    ResultFlag,
    pack_operations,
    pack_results,
    parse_header,
    parse_operations,
    parse_results,
)

# Number of random examples of each property test, and duration of the fuzzer.
EXAMPLE_COUNT = int(os.environ.get("GDRKIT_EXAMPLES", "300"))
FUZZ_DURATION_S = float(os.environ.get("GDRKIT_FUZZ_S", "3"))
SUITES_FOLDER = Path(__file__).resolve().parents[1]
# Each vector has the word right or wrong, a name, and a frame in hexadecimal digits.
FRAME_VECTORS = [
    line.split()
    for line in (SUITES_FOLDER / "vectors" / "frames.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
UINT64_VALUES = st.integers(0, (1 << 64) - 1)
# A program whose daemon threads compute checksums while the interpreter ends.
DAEMON_PROGRAM = """
import threading, time
from gdrkit.storage._native import engine
class SlowDestructor:
    def __del__(self):
        end_s = time.monotonic() + 0.5
        while time.monotonic() < end_s:
            pass
slow_destructor = SlowDestructor()  # The interpreter deletes this object after it has begun to end the other threads.
start_barrier = threading.Barrier(9)  # 8 threads and the main thread wait for each other.
def compute():
    data = bytes(1 << 20)
    start_barrier.wait()
    while True:
        engine.crc32c_portable(data)
for _ in range(8):
    threading.Thread(target=compute, daemon=True).start()
start_barrier.wait()
threading.Event().wait(0.05)
"""
READ_FLAGS = [OperationFlag.FORBID_HOLES, OperationFlag.CHECKSUM_WANTED, OperationFlag.REPORT_HOLES]


@st.composite
def draw_operation(draw: st.DrawFn) -> Operation:
    """Draw any valid operation."""
    opcode = draw(st.sampled_from(IoOpcode))
    allowed_flags = (
        READ_FLAGS if opcode is IoOpcode.READ else [OperationFlag.CHECKSUM_GIVEN, OperationFlag.CHECKSUM_WANTED]
    )
    flags = OperationFlag(0)
    for flag in draw(st.sets(st.sampled_from(allowed_flags))):
        flags |= flag
    checksum = draw(st.integers(0, (1 << 32) - 1)) if flags & OperationFlag.CHECKSUM_GIVEN else 0
    tag, handle, file_offset, length, remote_address = (draw(UINT64_VALUES) for _ in range(5))
    rkey, queue_pair = draw(st.integers(0, (1 << 32) - 1)), draw(st.integers(0, 65535))
    return Operation(
        tag,
        handle,
        file_offset,
        length,
        remote_address,
        rkey,
        queue_pair,
        opcode,
        flags,
        checksum,
    )


@st.composite
def draw_result(draw: st.DrawFn) -> Result:
    """Draw any valid result, with holes."""
    result = draw(st.integers(-4096, 1 << 40))
    hole_edges = sorted(draw(st.sets(st.integers(0, max(result, 0)), max_size=8)))
    holes = tuple(HoleExtent(begin, end - begin) for begin, end in zip(hole_edges[::2], hole_edges[1::2], strict=False))
    flags = draw(st.sampled_from((ResultFlag(0), ResultFlag.CHECKSUM_VALID)))
    return Result(draw(UINT64_VALUES), result, draw(st.integers(0, (1 << 32) - 1)), flags, holes)


@pytest.mark.parametrize(
    ("validity", "frame_hex"),
    [pytest.param(validity, frame_hex, id=name) for validity, name, frame_hex in FRAME_VECTORS],
)
def test_vectors_are_parsed_or_refused_as_in_cpp(validity: str, frame_hex: str) -> None:
    if validity == "right":
        assert repack_frame(bytes.fromhex(frame_hex)) == bytes.fromhex(frame_hex)
    else:
        with pytest.raises(UsageError) as error_info:
            repack_frame(bytes.fromhex(frame_hex))
        assert error_info.value.reason is Reason.MALFORMED


@settings(max_examples=EXAMPLE_COUNT, deadline=None)
@given(st.lists(draw_operation(), min_size=1, max_size=20), UINT64_VALUES)
def test_operations_survive_packing_and_parsing(operations: list[Operation], sequence: int) -> None:
    frame = pack_operations(operations, sequence=sequence)
    header = parse_header(frame[:HEADER_BYTES])
    assert (header.count, header.sequence) == (len(operations), sequence)
    assert parse_operations(header, frame[HEADER_BYTES:]) == tuple(operations)


@settings(max_examples=EXAMPLE_COUNT, deadline=None)
@given(st.lists(draw_result(), min_size=1, max_size=20))
def test_results_survive_packing_and_parsing(results: list[Result]) -> None:
    frame = pack_results(results)
    assert parse_results(parse_header(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]) == tuple(results)


@settings(max_examples=EXAMPLE_COUNT, deadline=None)
@given(st.lists(draw_operation(), min_size=1, max_size=3), st.data())
def test_any_changed_byte_is_refused(operations: list[Operation], data: st.DataObject) -> None:
    frame = bytearray(pack_operations(operations, sequence=1))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(UsageError) as error_info:
        repack_frame(bytes(frame))
    assert error_info.value.reason is Reason.MALFORMED


@settings(max_examples=EXAMPLE_COUNT, deadline=None)
@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_checksums_by_instruction_and_by_table_are_equal(data: bytes, split_index: int) -> None:
    expected_checksum = crc32c_by_table(data)
    assert crc32c(data) == engine.crc32c(data) == engine.crc32c_portable(data) == expected_checksum
    head, tail = data[:split_index], data[split_index:]
    assert engine.crc32c(tail, crc32c(head)) == crc32c_by_table(tail, crc32c_by_table(head)) == expected_checksum
    assert engine.crc32c_combine(crc32c(head), crc32c(tail), len(tail)) == expected_checksum


def test_daemon_threads_do_not_abort_the_exit() -> None:
    """In an older version, the process aborted when the interpreter ended a thread that returned from native code."""
    for _ in range(3):
        completed_process = subprocess.run(
            [sys.executable, "-c", DAEMON_PROGRAM], capture_output=True, text=True, check=False
        )
        assert completed_process.returncode == 0, completed_process.stderr


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=EXAMPLE_COUNT, deadline=None)
@given(st.sampled_from(sorted(REQUESTS)), st.dictionaries(st.text(max_size=12), JSON_VALUES, max_size=5))
def test_any_json_object_is_a_request_or_is_refused(operation_name: str, fields: dict[str, object]) -> None:
    payload = json.dumps({"op": operation_name, **fields}).encode()
    with contextlib.suppress(UsageError):
        request = parse_request(payload)
        assert parse_request(pack_request(request)) == request


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 60000,
        b'{"op":"statfs","op":"statfs"}',
        b'{"op":"truncate","path":"a","size_bytes":NaN}',
        # "after" may be null. It must not be NaN or an infinity, which are not JSON.
        b'{"op":"list","path":"a","after":NaN}',
        b'{"op":"list","path":"a","after":Infinity}',
        b'{"op":"list","path":"a","after":-Infinity}',
        b'{"op":"truncate","path":"a","size_bytes":-1}',
        b'{"op":"truncate","path":"a","size_bytes":9223372036854775808}',
        b'{"op":"utimens","path":"a","access_time_ns":-9223372036854775808}',
        b'{"op":"punch_hole","handle":1,"ranges":[[0,9223372036854775808]]}',
        b'{"op":"sync","handle":9223372036854775808}',
        b'{"op":"truncate","path":"a","size_bytes":' + b"9" * 5000 + b"}",
        b'{"op":"truncate","path":"a","size_bytes":true}',
        b'{"op":"truncate","path":"a","handle":1,"size_bytes":1}',
        b'{"op":"open","path":"a\\u0000b"}',
        b'{"op":"open","path":"' + b"a" * 5000 + b'"}',
        b'{"op":"open","path":"a","mode":65536}',
        b'{"op":"open","path":"a","other":1}',
        b'{"op":"punch_hole","handle":1,"ranges":[[2,1]]}',
        b'{"op":"punch_hole","handle":1,"ranges":[]}',
        b'{"op":"hello","version":1,"client":"a","lanes":[]}',
        b'{"op":"reformat"}',
    ],
)
def test_invalid_request_is_malformed(payload: bytes) -> None:
    with pytest.raises(UsageError) as error_info:
        parse_request(payload)
    assert error_info.value.reason is Reason.MALFORMED


def test_numbers_of_63_bits_are_accepted() -> None:
    int63_max = (1 << 63) - 1
    for request in (
        messages.Truncate(int63_max, path="a"),
        messages.PunchHole(1, ((0, int63_max),)),
        messages.Utimens("a", access_time_ns=-int63_max, modification_time_ns=int63_max),
    ):
        assert parse_request(pack_request(request)) == request


@pytest.mark.parametrize("surrogate", [0xD800, 0xDC7F, 0xDD00, 0xDFFF])
def test_lone_surrogate_is_a_bad_argument(surrogate: int) -> None:
    text = f"a{chr(surrogate)}"
    for request in (messages.Stat(text), messages.Symlink("a", text), messages.StorageHello(1, text, ({},))):
        with pytest.raises(UsageError) as error_info:
            parse_request(pack_request(request))
        assert error_info.value.reason is Reason.BAD_ARGUMENT
    # These surrogates represent the bytes 0x80 and 0xff of a file name that is not UTF-8.
    assert parse_request(pack_request(messages.Stat("\udc80\udcff"))) == messages.Stat("\udc80\udcff")


@pytest.mark.parametrize("payload", [b"{}", b'{"ok":{},"error":{}}', b'{"ok":{"x":1}}', b'{"error":{"errno":"x"}}'])
def test_invalid_reply_is_malformed(payload: bytes) -> None:
    with pytest.raises(UsageError) as error_info:
        parse_reply(payload, messages.Done)
    assert error_info.value.reason is Reason.MALFORMED


@pytest.mark.timeout(FUZZ_DURATION_S + 120)
def test_fuzzer_finds_no_defect_in_the_parsers() -> None:
    run_fuzzer("storage.fuzz_frames", seconds=FUZZ_DURATION_S)
