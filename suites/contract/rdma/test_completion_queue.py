"""Completions, their order, and completion events; ibv_create_cq(3), ibv_poll_cq(3), ibv_req_notify_cq(3)."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import WAIT_MS, connected, refused

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import WORK_ID_MAX, CompletionOpcode, Status

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


def test_new_completion_queue_is_empty(nic: Nic) -> None:
    with nic.completion_queue() as queue:
        assert queue.poll() == []


@pytest.mark.parametrize("depth", [pytest.param(0, id="none"), pytest.param(1 << 30, id="too-many")])
def test_invalid_depth_is_refused(nic: Nic, depth: int) -> None:
    with refused(errno.EINVAL), nic.completion_queue(depth=depth):
        pass


def test_completions_of_a_queue_pair_are_in_request_order(nic: Nic) -> None:
    with connected(nic) as (ours, _), nic.register_host(bytearray(8 * KIB)) as local:
        remote = local.remote(length_bytes=16)
        for number in range(16):
            post = ours.post_read if number % 3 == 1 else ours.post_write
            post(local, remote, work_id=number, local_offset_bytes=4 * KIB)
        completions = [ours.wait(WAIT_MS).expect(Status.SUCCESS) for _ in range(16)]
    assert [completion.work_id for completion in completions] == list(range(16))
    expected = [CompletionOpcode.RDMA_READ if number % 3 == 1 else CompletionOpcode.RDMA_WRITE for number in range(16)]
    assert [completion.opcode for completion in completions] == expected


@pytest.mark.parametrize("work_id", [0, 1 << 32, WORK_ID_MAX])
def test_completion_has_the_work_id_of_its_request(nic: Nic, work_id: int) -> None:
    with connected(nic) as (ours, theirs), nic.register_host(bytearray(KIB)) as region:
        theirs.post_receive(region, work_id=work_id)
        ours.post_send(region, work_id=work_id, length_bytes=1)
        assert ours.wait(WAIT_MS).expect(Status.SUCCESS).work_id == work_id
        received = theirs.wait_received(WAIT_MS).expect(Status.SUCCESS)
    assert (received.work_id, received.opcode, received.qp_number) == (work_id, CompletionOpcode.RECV, theirs.number)


def test_unsignaled_success_has_no_completion(nic: Nic) -> None:
    with connected(nic) as (ours, _), nic.register_host(bytearray(KIB)) as region:
        remote = region.remote(length_bytes=16)
        for number in range(4):
            ours.post_write(region, remote, work_id=number, local_offset_bytes=512, signaled=number == 3)
        assert ours.wait(WAIT_MS).expect(Status.SUCCESS).work_id == 3
        assert ours.send_queue.poll() == []


def test_unsignaled_failure_has_a_completion(nic: Nic) -> None:
    with connected(nic) as (ours, _), nic.register_host(bytearray(KIB)) as region:
        with nic.register_host(bytearray(KIB)) as closed_region:
            remote = closed_region.remote()
        ours.post_write(region, remote, work_id=5, signaled=False)
        failed = ours.wait(WAIT_MS)
    assert (failed.work_id, failed.status) == (5, Status.REM_ACCESS_ERR)


def test_shared_queue_separates_completions_by_queue_pair(nic: Nic) -> None:
    with (
        nic.completion_queue() as queue,
        nic.queue_pair(queue) as first,
        nic.queue_pair(queue) as second,
        nic.register_host(bytearray(KIB)) as region,
    ):
        first.connect(second.endpoint())
        second.connect(first.endpoint())
        remote = region.remote(length_bytes=16)
        first.post_write(region, remote, work_id=1, local_offset_bytes=512)
        second.post_write(region, remote, work_id=2, local_offset_bytes=512)
        completions = [queue.wait(WAIT_MS).expect(Status.SUCCESS) for _ in range(2)]
    assert {(each.qp_number, each.work_id) for each in completions} == {(first.number, 1), (second.number, 2)}


@pytest.mark.parametrize("solicited_only", [False, True], ids=["any", "solicited"])
def test_completion_generates_an_event(nic: Nic, solicited_only: bool) -> None:  # noqa: FBT001 - a parameter of pytest.
    with (
        nic.completion_queue(events=True) as queue,
        nic.completion_queue() as others,
        nic.queue_pair(queue) as theirs,
        nic.queue_pair(others) as ours,
        nic.register_host(bytearray(KIB)) as region,
    ):
        ours.connect(theirs.endpoint())
        theirs.connect(ours.endpoint())
        queue.request_notification(solicited_only=solicited_only)
        theirs.post_receive(region, work_id=1)
        ours.post_send(region, work_id=2, length_bytes=16, solicited=True)
        theirs.wait_received(WAIT_MS).expect(Status.SUCCESS)
        queue.take_event(WAIT_MS)


def test_failed_completion_generates_a_solicited_event(nic: Nic) -> None:
    with (
        nic.completion_queue(events=True) as queue,
        nic.queue_pair(queue) as ours,
        nic.queue_pair(queue) as theirs,
        nic.register_host(bytearray(KIB)) as region,
    ):
        ours.connect(theirs.endpoint())
        theirs.connect(ours.endpoint())
        queue.request_notification(solicited_only=True)
        theirs.post_receive(region, work_id=1)
        theirs.fail()
        assert theirs.wait_received(WAIT_MS).status is Status.WR_FLUSH_ERR
        queue.take_event(WAIT_MS)
