"""The bytes of a share handle match the documented layout (docs/sharing.md), and all other bytes are refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.sharing import flip_bit, make_handle, require_error

from gdrkit import cuda, pattern
from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.registration.gdr_handle import export_gdr
from gdrkit.registration.handle import SHARE_HANDLE_BYTES, ShareHandle, ShareKind
from gdrkit.registration.share import (
    export_memory,
)
from gdrkit.units import MIB

if TYPE_CHECKING:
    from gdrkit.cuda import Device

NEEDS_IPC = needs(cuda_needs.device(), cuda_needs.ipc)


def parse_and_get_error(data: bytes) -> GdrkitError:
    """Require that the parser refuses the data as malformed, and return the error."""
    error = require_error(ShareHandle.parse, data)
    assert type(error) is UsageError
    assert error.reason is Reason.MALFORMED
    return error


@NEEDS_IPC
def test_handle_bytes_match_the_documented_layout(device: Device, seed: int) -> None:
    with device.allocate(MIB) as memory:
        packed_handle = export_memory(memory, kind=ShareKind.IPC, offset_bytes=4096, length_bytes=100).data
        assert len(packed_handle) == SHARE_HANDLE_BYTES == 192
        # Magic number, version 1, kind 1 (IPC), and the length of 192 bytes.
        assert packed_handle[:16] == b"GDRSHARE\x01\x00\x01\x00\xc0\x00\x00\x00"
        # Then six fields of 8 bytes: allocation size, offset, length, address, chunk size, number of descriptors. The
        # last three are 0 for IPC.
        field_values = [
            int.from_bytes(packed_handle[offset : offset + 8], "little") for offset in (16, 24, 32, 40, 48, 56)
        ]
        assert field_values == [MIB, 4096, 100, 0, 0, 0]
        # The process id of the owner, and the IPC handle of CUDA.
        assert int.from_bytes(packed_handle[96:100], "little") == os.getpid()
        assert packed_handle[112:176] == cuda.export_handle(memory) == export_gdr(memory)[:64]
        memory.write(pattern.payload(16, seed=seed))


@pytest.mark.parametrize("length_bytes", [0, 1, 80, SHARE_HANDLE_BYTES - 1, SHARE_HANDLE_BYTES + 1, 4096])
def test_a_handle_of_another_length_is_refused(length_bytes: int) -> None:
    parse_and_get_error((make_handle().pack() * 30)[:length_bytes])


def test_any_flipped_bit_is_refused() -> None:
    packed_handle = make_handle().pack()
    for bit in range(8 * SHARE_HANDLE_BYTES):
        parse_and_get_error(flip_bit(packed_handle, bit))


def test_handle_of_another_version_is_refused_by_name() -> None:
    packed_handle = make_handle().pack()
    error = parse_and_get_error(packed_handle[:8] + b"\x02\x00" + packed_handle[10:])
    assert "version 2" in error.message


# Each entry changes fields of a valid handle to values that are out of their limits or contradict the other fields.
WRONG_FIELDS = [
    pytest.param({"length_bytes": 0}, id="empty"),
    pytest.param({"allocation_bytes": 0}, id="no-allocation"),
    pytest.param({"length_bytes": MIB}, id="beyond-the-end"),
    pytest.param({"offset_bytes": (1 << 64) - 4096}, id="offset-that-would-wrap"),
    pytest.param({"length_bytes": (1 << 64) - 4096}, id="length-that-would-wrap"),
    pytest.param({"allocation_bytes": 1 << 63}, id="allocation-above-half"),
    pytest.param({"ipc": bytes(64)}, id="empty-ipc"),
    pytest.param({"address": 4096}, id="address-in-ipc"),
    pytest.param({"descriptor_count": 1}, id="descriptor-in-ipc"),
    pytest.param({"chunk_bytes": MIB}, id="chunk-in-ipc"),
    pytest.param({"device_uuid": bytes(16)}, id="no-device"),
    pytest.param({"kind": ShareKind.DMABUF, "ipc": bytes(64), "descriptor_count": 1}, id="dmabuf-without-address"),
    pytest.param(
        {"kind": ShareKind.DMABUF, "ipc": bytes(64), "descriptor_count": 1, "address": (1 << 64) - 4096},
        id="dmabuf-beyond-all-addresses",
    ),
    pytest.param(
        {"kind": ShareKind.DMABUF, "ipc": bytes(64), "descriptor_count": 1, "address": 8191}, id="dmabuf-askew"
    ),
    pytest.param(
        {"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 254, "chunk_bytes": 4096}, id="too-many-chunks"
    ),
    pytest.param(
        {"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 2, "chunk_bytes": MIB}, id="chunks-of-another-sum"
    ),
    pytest.param(
        {"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 2, "chunk_bytes": MIB // 2}, id="unused-chunk"
    ),
    pytest.param({"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 1, "chunk_bytes": 0}, id="no-chunk"),
]


@pytest.mark.parametrize("changes", WRONG_FIELDS)
def test_contradictory_fields_are_refused(changes: dict[str, object]) -> None:
    assert require_error(make_handle, **changes).reason is Reason.MALFORMED
