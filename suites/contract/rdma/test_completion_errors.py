"""After an error, a queue pair is in the error state, and its requests are flushed in order (ibv_poll_cq(3))."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import WAIT_MS, connect_queue_pairs

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import QueuePairState, Status

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())

# Bits to flip in a key, so that the key belongs to no region.
FLIPPED_KEY_BITS = 0x0100_0001


def test_requests_after_an_error_are_flushed_in_order(nic: Nic) -> None:
    remote_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        range_with_wrong_key = replace(remote_region.remote(), rkey=remote_region.rkey ^ FLIPPED_KEY_BITS)
        requester.post_write(local_region, range_with_wrong_key, work_id=0)
        for work_id in range(1, 5):
            requester.post_write(local_region, remote_region.remote(), work_id=work_id)
        completions = [requester.wait(WAIT_MS) for _ in range(5)]
        assert requester.state is QueuePairState.ERR
    assert [completion.work_id for completion in completions] == [0, 1, 2, 3, 4]
    assert [completion.status for completion in completions] == [Status.REM_ACCESS_ERR, *[Status.WR_FLUSH_ERR] * 4]
    assert remote_bytes == bytes(KIB)


def test_requests_before_an_error_have_succeeded(nic: Nic) -> None:
    remote_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        requester.post_write(local_region, remote_region.remote(), work_id=0)
        requester.post_write(
            local_region, replace(remote_region.remote(), rkey=remote_region.rkey ^ FLIPPED_KEY_BITS), work_id=1
        )
        completions = [requester.wait(WAIT_MS) for _ in range(2)]
    assert [completion.status for completion in completions] == [Status.SUCCESS, Status.REM_ACCESS_ERR]
    assert remote_bytes == b"\xa5" * KIB


def test_responder_that_refused_flushes_its_receives(nic: Nic) -> None:
    with connect_queue_pairs(nic) as (requester, responder), nic.register_host(bytearray(KIB)) as region:
        responder.post_receive((), work_id=7)
        requester.post_write(region, replace(region.remote(), rkey=region.rkey ^ FLIPPED_KEY_BITS), work_id=0)
        assert requester.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
        flushed_completion = responder.wait_received(WAIT_MS)
        assert (flushed_completion.work_id, flushed_completion.status) == (7, Status.WR_FLUSH_ERR)
        assert responder.state is QueuePairState.ERR


def test_receives_are_flushed_in_order(nic: Nic) -> None:
    with connect_queue_pairs(nic) as (requester, _):
        for work_id in range(8):
            requester.post_receive((), work_id=work_id)
        requester.fail()
        completions = [requester.wait_received(WAIT_MS) for _ in range(8)]
    assert [completion.work_id for completion in completions] == list(range(8))
    assert {completion.status for completion in completions} == {Status.WR_FLUSH_ERR}


@pytest.mark.parametrize("operation", ["write", "read", "send"])
def test_peer_in_the_error_state_ends_in_retry_exceeded(nic: Nic, operation: str) -> None:
    remote_bytes = bytearray(KIB)
    with (
        # One retry after 4.096 us * 2**12 = 17 ms, so that the request fails soon.
        connect_queue_pairs(nic, retry_count=1, timeout_exponent=12) as (requester, responder),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        responder.fail()
        if operation == "send":
            requester.post_send(local_region, work_id=1)
        elif operation == "write":
            requester.post_write(local_region, remote_region.remote(), work_id=1)
        else:
            requester.post_read(local_region, remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status is Status.RETRY_EXC_ERR
    assert remote_bytes == bytes(KIB)
