"""The bounds of a memory region are exact to the byte, for local and for remote keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import WAIT_MS, connect_queue_pairs

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import RemoteRange, ScatterGatherElement, Status

if TYPE_CHECKING:
    from gdrkit.verbs import Nic, QueuePair, Region

pytestmark = needs(verbs.nic())

REGION_BYTES = 8 * KIB + 5
UNTOUCHED = b"\xa5" * REGION_BYTES

# Bits to flip in a key, so that the key belongs to no region.
FLIPPED_KEY_BITS = 0x0100_0001

OPERATIONS = pytest.mark.parametrize("operation", ["write", "read"])


def post_and_wait(
    operation: str, requester: QueuePair, local_memory: Region | list[ScatterGatherElement], remote_range: RemoteRange
) -> Status:
    """Post a write or a read, and return the status of its completion."""
    if operation == "write":
        requester.post_write(local_memory, remote_range, work_id=1)
    else:
        requester.post_read(local_memory, remote_range, work_id=1)
    return requester.wait(WAIT_MS).status


@OPERATIONS
@pytest.mark.parametrize(
    ("offset_bytes", "length_bytes"),
    [
        pytest.param(-1, 16, id="from-the-byte-before"),
        pytest.param(REGION_BYTES - 15, 16, id="to-the-byte-after"),
        pytest.param(0, REGION_BYTES + 1, id="one-byte-too-long"),
        pytest.param(REGION_BYTES, 1, id="after-the-end"),
        pytest.param(1 << 40, 16, id="far-away"),
    ],
)
def test_remote_bytes_outside_the_region_are_inaccessible(
    nic: Nic, operation: str, offset_bytes: int, length_bytes: int
) -> None:
    remote_bytes, local_bytes = bytearray(UNTOUCHED), bytearray(REGION_BYTES + 1)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(local_bytes) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        whole_range = remote_region.remote()
        outside_range = RemoteRange(
            address=whole_range.address + offset_bytes, rkey=whole_range.rkey, length_bytes=length_bytes
        )
        assert post_and_wait(operation, requester, local_region, outside_range) is Status.REM_ACCESS_ERR
    assert (bytes(remote_bytes), bytes(local_bytes)) == (UNTOUCHED, bytes(REGION_BYTES + 1))


@OPERATIONS
@pytest.mark.parametrize(
    ("offset_bytes", "length_bytes"),
    [
        pytest.param(0, 1, id="first-byte"),
        pytest.param(REGION_BYTES - 1, 1, id="last-byte"),
        pytest.param(0, REGION_BYTES, id="all"),
        pytest.param(4095, 2, id="over-a-page"),
    ],
)
def test_every_byte_inside_a_region_is_accessible(
    nic: Nic, seed: int, operation: str, offset_bytes: int, length_bytes: int
) -> None:
    payload = pattern.payload(length_bytes, seed=seed)
    remote_bytes, local_bytes = bytearray(UNTOUCHED), bytearray(payload)
    if operation == "read":
        remote_bytes[offset_bytes : offset_bytes + length_bytes], local_bytes = payload, bytearray(length_bytes)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(local_bytes) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        remote_range = remote_region.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)
        assert post_and_wait(operation, requester, local_region, remote_range) is Status.SUCCESS
    assert local_bytes == payload
    expected_bytes = bytearray(UNTOUCHED)
    expected_bytes[offset_bytes : offset_bytes + length_bytes] = payload
    assert remote_bytes == expected_bytes


@OPERATIONS
def test_request_of_length_0_needs_no_key(nic: Nic, operation: str) -> None:
    # InfiniBand specification, C9-88: the responder does not check the address and the key of a request of length 0.
    with connect_queue_pairs(nic) as (requester, _), nic.register_host(bytearray(KIB)) as region:
        remote_range = replace(region.remote(length_bytes=0), rkey=region.rkey ^ FLIPPED_KEY_BITS)
        assert post_and_wait(operation, requester, [], remote_range) is Status.SUCCESS


@OPERATIONS
@pytest.mark.parametrize("offset_bytes", [pytest.param(-1, id="before"), pytest.param(KIB - 15, id="after")])
def test_local_bytes_outside_the_region_are_inaccessible(nic: Nic, operation: str, offset_bytes: int) -> None:
    remote_bytes, local_bytes = bytearray(b"\xa5" * KIB), bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(local_bytes) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        element = local_region.element()
        outside_elements = [
            ScatterGatherElement(address=element.address + offset_bytes, length_bytes=16, lkey=element.lkey)
        ]
        assert (
            post_and_wait(operation, requester, outside_elements, remote_region.remote(length_bytes=16))
            is Status.LOC_PROT_ERR
        )
    assert remote_bytes == b"\xa5" * KIB
    assert local_bytes == bytes(KIB)
