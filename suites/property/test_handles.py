"""Valid memory handles round-trip, and the parsers refuse all other bytes with UsageError(MALFORMED)."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import run_fuzzer

from gdrkit.errors import Reason, UsageError
from gdrkit.host import ProcessIdentity
from gdrkit.registration.gdr_handle import GDR_HANDLE_BYTES, GdrHandle
from gdrkit.registration.handle import SHARE_HANDLE_BYTES, ShareHandle, ShareKind

EXAMPLES_COUNT = int(os.environ.get("GDRKIT_EXAMPLES", "300"))
# 5 s are enough to detect regressions. ``nox -s long`` sets five minutes, to search for unknown defects.
FUZZ_DURATION_S = float(os.environ.get("GDRKIT_FUZZ_S", "5"))
PAGE_BYTES = 4096
LENGTH_BYTES_MAX = (1 << 63) - 1


@st.composite
def draw_handle(draw: st.DrawFn) -> ShareHandle:
    """Draw a valid share handle of any kind."""
    kind = draw(st.sampled_from(ShareKind))
    owner = ProcessIdentity(
        boot_id=draw(st.binary(min_size=16, max_size=16)),
        process_id=draw(st.integers(1, (1 << 32) - 1)),
        pid_namespace=draw(st.integers(0, (1 << 32) - 1)),
        started_ticks=draw(st.integers(0, (1 << 64) - 1)),
    )
    device_uuid = draw(st.binary(min_size=16, max_size=16).filter(any))
    if kind is ShareKind.VMM:
        chunk_count, chunk_bytes = draw(st.integers(1, 253)), PAGE_BYTES * draw(st.integers(1, 1 << 40))
        offset_bytes = draw(st.integers(0, chunk_bytes - 1))
        end_offset_bytes = draw(
            st.integers(max(offset_bytes, chunk_bytes * (chunk_count - 1)) + 1, chunk_bytes * chunk_count)
        )
        return ShareHandle(
            kind=kind,
            allocation_bytes=chunk_bytes * chunk_count,
            offset_bytes=offset_bytes,
            length_bytes=end_offset_bytes - offset_bytes,
            chunk_bytes=chunk_bytes,
            descriptor_count=chunk_count,
            device_uuid=device_uuid,
            owner=owner,
        )
    allocation_bytes = draw(st.integers(1, LENGTH_BYTES_MAX))
    offset_bytes = draw(st.integers(0, allocation_bytes - 1))
    length_bytes = draw(st.integers(1, allocation_bytes - offset_bytes))
    is_ipc = kind is ShareKind.IPC
    page_number_max = ((1 << 64) - length_bytes - offset_bytes % PAGE_BYTES) // PAGE_BYTES
    address = 0 if is_ipc else PAGE_BYTES * draw(st.integers(1, page_number_max)) + offset_bytes % PAGE_BYTES
    return ShareHandle(
        kind=kind,
        allocation_bytes=allocation_bytes,
        offset_bytes=offset_bytes,
        length_bytes=length_bytes,
        address=address,
        descriptor_count=0 if is_ipc else 1,
        ipc=draw(st.binary(min_size=64, max_size=64).filter(any)) if is_ipc else bytes(64),
        device_uuid=device_uuid,
        owner=owner,
    )


def check_refused(data: bytes) -> None:
    """Require that the parser of share handles refuses the data as malformed."""
    with pytest.raises(UsageError) as error_info:
        ShareHandle.parse(data)
    assert type(error_info.value) is UsageError
    assert error_info.value.reason is Reason.MALFORMED


@settings(max_examples=EXAMPLES_COUNT, deadline=None)
@given(draw_handle())
def test_handle_round_trips(handle: ShareHandle) -> None:
    packed_handle = handle.pack()
    assert len(packed_handle) == SHARE_HANDLE_BYTES
    assert ShareHandle.parse(packed_handle) == handle


@settings(max_examples=EXAMPLES_COUNT, deadline=None)
@given(draw_handle(), st.data())
def test_changed_handle_is_refused(handle: ShareHandle, data: st.DataObject) -> None:
    packed_handle = handle.pack()
    offset = data.draw(st.integers(0, SHARE_HANDLE_BYTES - 1))
    inserted_bytes = data.draw(st.binary(min_size=1, max_size=32))
    changed_handle = packed_handle[:offset] + inserted_bytes + packed_handle[offset + len(inserted_bytes) :]
    check_refused(packed_handle[:offset])
    check_refused(packed_handle[:offset] + inserted_bytes + packed_handle[offset:])
    if changed_handle != packed_handle:
        check_refused(changed_handle)


@settings(max_examples=EXAMPLES_COUNT, deadline=None)
@given(st.binary(max_size=2 * SHARE_HANDLE_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    check_refused(data)


@settings(max_examples=EXAMPLES_COUNT, deadline=None)
@given(
    st.one_of(
        st.binary(min_size=GDR_HANDLE_BYTES - 1, max_size=GDR_HANDLE_BYTES + 1),
        # Nearly valid handles: CUipcMemHandle (64 bytes), size and device number. Random bytes are rarely that close.
        st.builds(
            struct.Struct("<64sQQ").pack, st.binary(max_size=64), st.integers(0, 1 << 63), st.integers(0, 1 << 31)
        ),
    )
)
def test_80_byte_handle_round_trips_or_is_refused(data: bytes) -> None:
    ipc_handle, length_bytes, device_index = (
        data[:64],
        int.from_bytes(data[64:72], "little"),
        int.from_bytes(data[72:], "little"),
    )
    if (
        len(data) == GDR_HANDLE_BYTES
        and any(ipc_handle)
        and 0 < length_bytes <= LENGTH_BYTES_MAX
        and device_index < 1 << 31
    ):
        assert GdrHandle.parse(data).pack() == data
        return
    with pytest.raises(UsageError) as error_info:
        GdrHandle.parse(data)
    assert error_info.value.reason is Reason.MALFORMED


@pytest.mark.timeout(FUZZ_DURATION_S + 120)
def test_fuzzer_finds_no_crash_in_the_parsers() -> None:
    """Fuzz for GDRKIT_FUZZ_S seconds, guided by coverage if atheris is installed, else with random changes."""
    print(run_fuzzer("property.fuzz_handles", seconds=FUZZ_DURATION_S))  # noqa: T201 - shows the number of inputs.
