"""A peer that accesses memory without the right to do so gets an error completion, and the memory is unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import MEMORY_KINDS, connect_peer_queue_pair

from gdrkit.harness.needs import needs
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.units import KIB
from gdrkit.verbs import Access, RemoteRange, Status

if TYPE_CHECKING:
    from support.memory_kinds import RdmaMemoryKind

    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

LENGTH_BYTES = 256 * KIB
# RdmaMemoryKind.memory() fills the memory with these bytes.
UNCHANGED_DATA = b"\xa5" * LENGTH_BYTES
# Bits to invert in the key of a region. The result is a key of no region.
WRONG_KEY_BITS = 0x0100_0001

pytestmark = pytest.mark.qualify


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
def test_outside_key_is_refused(nic: Nic, peer: Peer, seed: int, memory_kind: RdmaMemoryKind) -> None:
    with memory_kind.memory() as memory, connect_peer_queue_pair(nic, peer) as peer_pair:
        valid_range = memory.remote(length_bytes=4 * KIB)
        peer_pair.write(replace(valid_range, rkey=valid_range.rkey ^ WRONG_KEY_BITS), seed=seed).expect(
            Status.REM_ACCESS_ERR
        )
        assert memory.read() == UNCHANGED_DATA


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize(
    ("begin_offset_bytes", "length_bytes"),
    [
        pytest.param(-1, 16, id="from-the-byte-before"),
        pytest.param(LENGTH_BYTES - 15, 16, id="to-the-byte-behind"),
        pytest.param(0, LENGTH_BYTES + 1, id="one-byte-too-long"),
    ],
)
def test_access_one_byte_out_of_bounds_is_refused(
    nic: Nic, peer: Peer, seed: int, memory_kind: RdmaMemoryKind, begin_offset_bytes: int, length_bytes: int
) -> None:
    with memory_kind.memory() as memory, connect_peer_queue_pair(nic, peer) as peer_pair:
        valid_range = memory.remote()
        # A region may begin at address 0, as a dma-buf region does. Then the byte before it has the highest address.
        address = (valid_range.address + begin_offset_bytes) % 2**64
        invalid_range = RemoteRange(address=address, rkey=valid_range.rkey, length_bytes=length_bytes)
        peer_pair.write(invalid_range, seed=seed).expect(Status.REM_ACCESS_ERR)
        assert memory.read() == UNCHANGED_DATA


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
def test_write_without_remote_write_access_is_refused(
    nic: Nic, peer: Peer, seed: int, memory_kind: RdmaMemoryKind
) -> None:
    access_without_write = Access.LOCAL_WRITE | Access.REMOTE_READ
    with memory_kind.memory(access=access_without_write) as memory, connect_peer_queue_pair(nic, peer) as peer_pair:
        remote_range = memory.remote(length_bytes=4 * KIB)
        peer_pair.write(remote_range, seed=seed).expect(Status.REM_ACCESS_ERR)
        assert memory.read() == UNCHANGED_DATA


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
def test_read_without_remote_read_access_is_refused(nic: Nic, peer: Peer, memory_kind: RdmaMemoryKind) -> None:
    access_without_read = Access.LOCAL_WRITE | Access.REMOTE_WRITE
    with memory_kind.memory(access=access_without_read) as memory, connect_peer_queue_pair(nic, peer) as peer_pair:
        remote_range = memory.remote(length_bytes=4 * KIB)
        peer_pair.read(remote_range).completion.expect(Status.REM_ACCESS_ERR)


@needs(verbs_needs.nic())
def test_queue_pair_access_limits_the_region_access(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as local_pair, nic.register_host(data) as region:
        peer_pair = peer.queue_pair()
        peer_pair.connect(local_pair.endpoint())
        local_pair.connect(peer_pair.endpoint, access=Access.REMOTE_READ)
        # A responder may report such a request as an access error or as an invalid request.
        status = peer_pair.write(region.remote(), seed=seed).status
        assert status in {Status.REM_ACCESS_ERR, Status.REM_INV_REQ_ERR}
    assert data == bytes(4 * KIB)


@needs(verbs_needs.nic())
def test_requests_after_an_error_are_flushed(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as local_pair, nic.register_host(data) as region:
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(local_pair)
        buffer = peer.buffer(4 * KIB, seed=seed)
        invalid_range = replace(region.remote(), rkey=region.rkey ^ WRONG_KEY_BITS)
        peer_pair.post_write(buffer, invalid_range, work_id=1)
        peer_pair.post_write(buffer, region.remote(), work_id=2)
        first_completion, second_completion = peer_pair.wait(), peer_pair.wait()
        assert (first_completion.work_id, first_completion.status) == (1, Status.REM_ACCESS_ERR)
        assert (second_completion.work_id, second_completion.status) == (2, Status.WR_FLUSH_ERR)
        assert peer_pair.state == "ERR"
    assert data == bytes(4 * KIB)
