"""SEND, RECV and immediates, and peers without a receive, with a late or too small one, or that have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.reach import joined

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
    with nic.completion_queue() as queue, nic.queue_pair(queue) as ours, nic.register_host(data) as region:
        theirs = peer.queue_pair()
        theirs.join(ours)
        ours.post_receive(region, work_id=7)
        theirs.send(seed=seed, length_bytes=5001, immediate=0xDEADBEEF).expect(Status.SUCCESS)
        received = ours.wait_received(5_000).expect(Status.SUCCESS)
    assert (received.work_id, received.length_bytes, received.immediate) == (7, 5001, 0xDEADBEEF)
    pattern.check(memoryview(data)[:5001], seed=seed)
    assert data[5001:] == bytes(8 * KIB - 5001)


@pytest.mark.qualify
def test_write_with_immediate_notifies_the_owner(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(64 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as ours, nic.register_host(data) as region:
        theirs = peer.queue_pair()
        theirs.join(ours)
        ours.post_receive((), work_id=3)
        theirs.write(region.remote(), seed=seed, immediate=41).expect(Status.SUCCESS)
        received = ours.wait_received(5_000).expect(Status.SUCCESS)
        pattern.check(data, seed=seed)
    assert (received.work_id, received.immediate) == (3, 41)


def test_completion_queue_with_events_waits_for_an_event(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with nic.completion_queue(events=True) as queue, nic.queue_pair(queue) as ours, nic.register_host(data) as region:
        theirs = peer.queue_pair()
        theirs.join(ours)
        for round_number in range(3):
            ours.post_receive(region, work_id=round_number)
            theirs.send(seed=seed + round_number, length_bytes=4 * KIB).expect(Status.SUCCESS)
            assert ours.wait_received(5_000).expect(Status.SUCCESS).work_id == round_number
            pattern.check(data, seed=seed + round_number)


def test_message_longer_than_the_receive_fails_on_both_sides(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(4 * KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as ours, nic.register_host(data) as region:
        theirs = peer.queue_pair()
        theirs.join(ours)
        ours.post_receive(region, work_id=1)
        # The specification (9.9.3) has an invalid request and a length error. rxe reports an operation error for both.
        sent_status = theirs.send(seed=seed, length_bytes=4 * KIB + 1).status
        received_status = ours.wait_received(5_000).status
    assert sent_status in {Status.REM_INV_REQ_ERR, Status.REM_OP_ERR}
    assert received_status in {Status.LOC_LEN_ERR, Status.LOC_QP_OP_ERR}


def test_message_without_a_receive_is_retried_and_fails(nic: Nic, peer: Peer, seed: int) -> None:
    with joined(nic, peer, rnr_retry_count=2) as theirs:
        theirs.send(seed=seed, length_bytes=16).expect(Status.RNR_RETRY_EXC_ERR)


def test_late_receive_within_the_retries_succeeds(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(KIB)
    with nic.completion_queue() as queue, nic.queue_pair(queue) as ours, nic.register_host(data) as region:
        theirs = peer.queue_pair()
        # Timer code 30 means 491.52 ms between retries: the receive below is posted long before the second retry.
        theirs.join(ours, rnr_timer_code=30)
        buffer = peer.buffer(KIB, seed=seed)
        theirs.post_send(buffer, work_id=1)
        ours.post_receive(region, work_id=2)
        theirs.wait().expect(Status.SUCCESS)
        ours.wait_received(5_000).expect(Status.SUCCESS)
        pattern.check(data, seed=seed)


@pytest.mark.qualify
def test_requests_to_an_ended_peer_end_in_retry_exceeded(nic: Nic, peer: Peer) -> None:
    with nic.completion_queue() as queue, nic.queue_pair(queue) as ours, nic.register_host(bytearray(KIB)) as region:
        theirs = peer.queue_pair()
        # rxe retries without end at a retry count of 7.
        theirs.join(ours, retry_count=3)
        target = peer.buffer(KIB).remote()
        ours.post_write(region, target, work_id=1)
        ours.wait(5_000).expect(Status.SUCCESS)
        peer.kill()
        ours.post_write(region, target, work_id=2)
        assert ours.wait(20_000).status is Status.RETRY_EXC_ERR
