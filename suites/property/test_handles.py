"""Valid handles round-trip, and all other bytes are refused with one typed error."""

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

EXAMPLES = int(os.environ.get("GDRKIT_EXAMPLES", "300"))
# 20 s detect regressions. Five minutes (nox -s long) search for unknown defects.
FUZZ_S = float(os.environ.get("GDRKIT_FUZZ_S", "20"))
PAGE = 4096
SIZE_MAX = (1 << 63) - 1


@st.composite
def handles(draw: st.DrawFn) -> ShareHandle:
    """Return any valid handle."""
    kind = draw(st.sampled_from(ShareKind))
    owner = ProcessIdentity(
        boot_id=draw(st.binary(min_size=16, max_size=16)),
        process_id=draw(st.integers(1, (1 << 32) - 1)),
        namespace=draw(st.integers(0, (1 << 32) - 1)),
        started_ticks=draw(st.integers(0, (1 << 64) - 1)),
    )
    uuid = draw(st.binary(min_size=16, max_size=16).filter(any))
    if kind is ShareKind.VMM:
        count, chunk = draw(st.integers(1, 253)), PAGE * draw(st.integers(1, 1 << 40))
        begin = draw(st.integers(0, chunk - 1))
        end = draw(st.integers(max(begin, chunk * (count - 1)) + 1, chunk * count))
        return ShareHandle(
            kind=kind,
            allocation_bytes=chunk * count,
            offset_bytes=begin,
            length_bytes=end - begin,
            chunk_bytes=chunk,
            descriptor_count=count,
            device_uuid=uuid,
            owner=owner,
        )
    size = draw(st.integers(1, SIZE_MAX))
    begin = draw(st.integers(0, size - 1))
    length = draw(st.integers(1, size - begin))
    is_ipc = kind is ShareKind.IPC
    page_max = ((1 << 64) - length - begin % PAGE) // PAGE
    address = 0 if is_ipc else PAGE * draw(st.integers(1, page_max)) + begin % PAGE
    return ShareHandle(
        kind=kind,
        allocation_bytes=size,
        offset_bytes=begin,
        length_bytes=length,
        address=address,
        descriptor_count=0 if is_ipc else 1,
        ipc=draw(st.binary(min_size=64, max_size=64).filter(any)) if is_ipc else bytes(64),
        device_uuid=uuid,
        owner=owner,
    )


def refused(data: bytes) -> None:
    with pytest.raises(UsageError) as raised:
        ShareHandle.parse(data)
    assert type(raised.value) is UsageError
    assert raised.value.reason is Reason.MALFORMED


@settings(max_examples=EXAMPLES, deadline=None)
@given(handles())
def test_handle_round_trips(handle: ShareHandle) -> None:
    data = handle.pack()
    assert len(data) == SHARE_HANDLE_BYTES
    assert ShareHandle.parse(data) == handle


@settings(max_examples=EXAMPLES, deadline=None)
@given(handles(), st.data())
def test_changed_handle_is_refused(handle: ShareHandle, data: st.DataObject) -> None:
    valid = handle.pack()
    at = data.draw(st.integers(0, SHARE_HANDLE_BYTES - 1))
    put = data.draw(st.binary(min_size=1, max_size=32))
    changed = valid[:at] + put + valid[at + len(put) :]
    refused(valid[:at])
    refused(valid[:at] + put + valid[at:])
    if changed != valid:
        refused(changed)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=2 * SHARE_HANDLE_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.one_of(
        st.binary(min_size=GDR_HANDLE_BYTES - 1, max_size=GDR_HANDLE_BYTES + 1),
        # Almost valid handles, which random bytes never are.
        st.builds(
            struct.Struct("<64sQQ").pack, st.binary(max_size=64), st.integers(0, 1 << 63), st.integers(0, 1 << 31)
        ),
    )
)
def test_80_byte_handle_round_trips_or_is_refused(data: bytes) -> None:
    ipc, length, device = data[:64], int.from_bytes(data[64:72], "little"), int.from_bytes(data[72:], "little")
    if len(data) == GDR_HANDLE_BYTES and any(ipc) and 0 < length <= SIZE_MAX and device < 1 << 31:
        assert GdrHandle.parse(data).pack() == data
        return
    with pytest.raises(UsageError) as raised:
        GdrHandle.parse(data)
    assert raised.value.reason is Reason.MALFORMED


@pytest.mark.timeout(FUZZ_S + 120)
def test_fuzzer_finds_no_crash_in_the_parsers() -> None:
    """Fuzz for GDRKIT_FUZZ_S seconds, guided by coverage if atheris is installed, else with random changes."""
    print(run_fuzzer("property.fuzz_handles", seconds=FUZZ_S))  # noqa: T201 - the number of inputs.
