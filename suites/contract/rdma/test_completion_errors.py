"""After an error, the queue pair is in the error state and posted requests are flushed in order; ibv_poll_cq(3)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import WAIT_MS, connected_pairs

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import QueuePairState, Status

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


def test_requests_after_an_error_are_flushed_in_order(nic: Nic) -> None:
    target = bytearray(KIB)
    with (
        connected_pairs(nic) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        nic.register_host(target) as target_region,
    ):
        wrong_remote = replace(target_region.remote(), rkey=target_region.rkey ^ 0x0100_0001)
        requester.post_write(local, wrong_remote, work_id=0)
        for work_id in range(1, 5):
            requester.post_write(local, target_region.remote(), work_id=work_id)
        completions = [requester.wait(WAIT_MS) for _ in range(5)]
        assert requester.state is QueuePairState.ERR
    assert [completion.work_id for completion in completions] == [0, 1, 2, 3, 4]
    assert [completion.status for completion in completions] == [Status.REM_ACCESS_ERR, *[Status.WR_FLUSH_ERR] * 4]
    assert target == bytes(KIB)


def test_requests_before_an_error_have_succeeded(nic: Nic) -> None:
    target = bytearray(KIB)
    with (
        connected_pairs(nic) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        nic.register_host(target) as target_region,
    ):
        requester.post_write(local, target_region.remote(), work_id=0)
        requester.post_write(local, replace(target_region.remote(), rkey=target_region.rkey ^ 0x0100_0001), work_id=1)
        completions = [requester.wait(WAIT_MS) for _ in range(2)]
    assert [completion.status for completion in completions] == [Status.SUCCESS, Status.REM_ACCESS_ERR]
    assert target == b"\xa5" * KIB


def test_responder_that_refused_flushes_its_receives(nic: Nic) -> None:
    with connected_pairs(nic) as (requester, responder), nic.register_host(bytearray(KIB)) as region:
        responder.post_receive((), work_id=7)
        requester.post_write(region, replace(region.remote(), rkey=region.rkey ^ 0x0100_0001), work_id=0)
        assert requester.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
        flushed = responder.wait_received(WAIT_MS)
        assert (flushed.work_id, flushed.status) == (7, Status.WR_FLUSH_ERR)
        assert responder.state is QueuePairState.ERR


def test_receives_are_flushed_in_order(nic: Nic) -> None:
    with connected_pairs(nic) as (requester, _):
        for work_id in range(8):
            requester.post_receive((), work_id=work_id)
        requester.fail()
        completions = [requester.wait_received(WAIT_MS) for _ in range(8)]
    assert [completion.work_id for completion in completions] == list(range(8))
    assert {completion.status for completion in completions} == {Status.WR_FLUSH_ERR}


@pytest.mark.parametrize("operation", ["write", "read", "send"])
def test_peer_in_the_error_state_ends_in_retry_exceeded(nic: Nic, operation: str) -> None:
    target = bytearray(KIB)
    with (
        connected_pairs(nic, retry_count=1, timeout_exponent=12) as (requester, responder),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        nic.register_host(target) as target_region,
    ):
        responder.fail()
        if operation == "send":
            requester.post_send(local, work_id=1)
        elif operation == "write":
            requester.post_write(local, target_region.remote(), work_id=1)
        else:
            requester.post_read(local, target_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status is Status.RETRY_EXC_ERR
    assert target == bytes(KIB)
