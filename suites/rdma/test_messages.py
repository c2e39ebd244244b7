"""Messages (SEND and RECV) and immediate data, also if a receive is missing, late or too small, or the peer ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import connect_peer_queue_pair

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


@pytest.mark.qualify
def test_message_arrives_with_its_immediate(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(8 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as local_pair, nic.register_host(data) as region:
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(local_pair)
        local_pair.post_receive(region, work_id=7)
        peer_pair.send(seed=seed, length_bytes=5001, immediate=0xDEADBEEF).expect(Status.SUCCESS)
        completion = local_pair.wait_received(5_000).expect(Status.SUCCESS)
    assert (completion.work_id, completion.length_bytes, completion.immediate) == (7, 5001, 0xDEADBEEF)
    pattern.check(memoryview(data)[:5001], seed=seed)
    assert data[5001:] == bytes(8 * KIB - 5001)


@pytest.mark.qualify
def test_write_with_immediate_notifies_the_owner(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(64 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as local_pair, nic.register_host(data) as region:
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(local_pair)
        local_pair.post_receive((), work_id=3)
        peer_pair.write(region.remote(), seed=seed, immediate=41).expect(Status.SUCCESS)
        completion = local_pair.wait_received(5_000).expect(Status.SUCCESS)
        pattern.check(data, seed=seed)
    assert (completion.work_id, completion.immediate) == (3, 41)


def test_completion_queue_with_events_waits_for_an_event(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with (
        nic.completion_queue(events=True) as queue,
        nic.queue_pair(queue) as local_pair,
        nic.register_host(data) as region,
    ):
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(local_pair)
        for round_index in range(3):
            local_pair.post_receive(region, work_id=round_index)
            peer_pair.send(seed=seed + round_index, length_bytes=4 * KIB).expect(Status.SUCCESS)
            assert local_pair.wait_received(5_000).expect(Status.SUCCESS).work_id == round_index
            pattern.check(data, seed=seed + round_index)


def test_message_longer_than_the_receive_fails_on_both_sides(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as local_pair, nic.register_host(data) as region:
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(local_pair)
        local_pair.post_receive(region, work_id=1)
        # By the InfiniBand specification (9.9.3), the sender gets an invalid request error and the receiver a length
        # error. rxe reports operation errors instead.
        sent_status = peer_pair.send(seed=seed, length_bytes=4 * KIB + 1).status
        received_status = local_pair.wait_received(5_000).status
    assert sent_status in {Status.REM_INV_REQ_ERR, Status.REM_OP_ERR}
    assert received_status in {Status.LOC_LEN_ERR, Status.LOC_QP_OP_ERR}


def test_message_without_a_receive_is_retried_and_fails(nic: Nic, peer: Peer, seed: int) -> None:
    with connect_peer_queue_pair(nic, peer, rnr_retry_count=2) as peer_pair:
        peer_pair.send(seed=seed, length_bytes=16).expect(Status.RNR_RETRY_EXC_ERR)


def test_late_receive_within_the_retries_succeeds(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as local_pair, nic.register_host(data) as region:
        peer_pair = peer.queue_pair()
        # Timer code 30 means 327.68 ms between retries, so the receive below is posted long before the last retry.
        peer_pair.connect_with(local_pair, rnr_timer_code=30)
        buffer = peer.buffer(KIB, seed=seed)
        peer_pair.post_send(buffer, work_id=1)
        local_pair.post_receive(region, work_id=2)
        peer_pair.wait().expect(Status.SUCCESS)
        local_pair.wait_received(5_000).expect(Status.SUCCESS)
        pattern.check(data, seed=seed)


@pytest.mark.qualify
def test_requests_to_an_ended_peer_end_in_retry_exceeded(nic: Nic, peer: Peer) -> None:
    with (
        nic.completion_queue() as queue,
        nic.queue_pair(queue) as local_pair,
        nic.register_host(bytearray(KIB)) as region,
    ):
        peer_pair = peer.queue_pair()
        # rxe with a retry count of 7 retries without end, and never reports the loss of the peer.
        peer_pair.connect_with(local_pair, retry_count=3)
        peer_memory = peer.buffer(KIB).remote()
        local_pair.post_write(region, peer_memory, work_id=1)
        local_pair.wait(5_000).expect(Status.SUCCESS)
        peer.kill()
        local_pair.post_write(region, peer_memory, work_id=2)
        assert local_pair.wait(20_000).status is Status.RETRY_EXC_ERR
