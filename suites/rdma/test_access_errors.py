"""A request of a peer without the access right ends in an error completion at the peer and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.reach import KINDS, joined

from gdrkit.harness.needs import needs
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.units import KIB
from gdrkit.verbs import Access, RemoteRange, Status

if TYPE_CHECKING:
    from support.reach import Reach

    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

LENGTH_BYTES = 256 * KIB
UNTOUCHED = b"\xa5" * LENGTH_BYTES

pytestmark = pytest.mark.qualify


@pytest.mark.parametrize("reach", KINDS, indirect=True)
def test_outside_key_is_refused(nic: Nic, peer: Peer, seed: int, reach: Reach) -> None:
    with reach.memory() as memory, joined(nic, peer) as theirs:
        valid = memory.remote(length_bytes=4 * KIB)
        theirs.write(replace(valid, rkey=valid.rkey ^ 0x0100_0001), seed=seed).expect(Status.REM_ACCESS_ERR)
        assert memory.read() == UNTOUCHED


@pytest.mark.parametrize("reach", KINDS, indirect=True)
@pytest.mark.parametrize(
    ("begin", "length_bytes"),
    [
        pytest.param(-1, 16, id="from-the-byte-before"),
        pytest.param(LENGTH_BYTES - 15, 16, id="to-the-byte-behind"),
        pytest.param(0, LENGTH_BYTES + 1, id="one-byte-too-long"),
    ],
)
def test_access_one_byte_out_of_bounds_is_refused(
    nic: Nic, peer: Peer, seed: int, reach: Reach, begin: int, length_bytes: int
) -> None:
    with reach.memory() as memory, joined(nic, peer) as theirs:
        valid = memory.remote()
        # A region may begin at address 0 (a DmaBufMR does). The byte before it is then the last possible address.
        address = (valid.address + begin) % 2**64
        outside = RemoteRange(address=address, rkey=valid.rkey, length_bytes=length_bytes)
        theirs.write(outside, seed=seed).expect(Status.REM_ACCESS_ERR)
        assert memory.read() == UNTOUCHED


@pytest.mark.parametrize("reach", KINDS, indirect=True)
def test_write_without_remote_write_access_is_refused(nic: Nic, peer: Peer, seed: int, reach: Reach) -> None:
    access = Access.LOCAL_WRITE | Access.REMOTE_READ
    with reach.memory(access=access) as memory, joined(nic, peer) as theirs:
        remote = memory.remote(length_bytes=4 * KIB)
        theirs.write(remote, seed=seed).expect(Status.REM_ACCESS_ERR)
        assert memory.read() == UNTOUCHED


@pytest.mark.parametrize("reach", KINDS, indirect=True)
def test_read_without_remote_read_access_is_refused(nic: Nic, peer: Peer, reach: Reach) -> None:
    access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
    with reach.memory(access=access) as memory, joined(nic, peer) as theirs:
        remote = memory.remote(length_bytes=4 * KIB)
        theirs.read(remote).completion.expect(Status.REM_ACCESS_ERR)


@needs(verbs_needs.nic())
def test_queue_pair_access_limits_the_region_access(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as ours, nic.register_host(data) as region:
        theirs = peer.queue_pair()
        theirs.connect(ours.endpoint())
        ours.connect(theirs.endpoint, access=Access.REMOTE_READ)
        # A responder may report such a request as an access error or as an invalid request.
        refused = theirs.write(region.remote(), seed=seed).status
        assert refused in {Status.REM_ACCESS_ERR, Status.REM_INV_REQ_ERR}
    assert data == bytes(4 * KIB)


@needs(verbs_needs.nic())
def test_requests_after_an_error_are_flushed(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as ours, nic.register_host(data) as region:
        theirs = peer.queue_pair()
        theirs.join(ours)
        buffer = peer.buffer(4 * KIB, seed=seed)
        outside = replace(region.remote(), rkey=region.rkey ^ 0x0100_0001)
        theirs.post_write(buffer, outside, work_id=1)
        theirs.post_write(buffer, region.remote(), work_id=2)
        first, second = theirs.wait(), theirs.wait()
        assert (first.work_id, first.status) == (1, Status.REM_ACCESS_ERR)
        assert (second.work_id, second.status) == (2, Status.WR_FLUSH_ERR)
        assert theirs.state == "ERR"
    assert data == bytes(4 * KIB)
