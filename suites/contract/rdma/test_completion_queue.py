"""Completions, their order, and completion events (ibv_create_cq(3), ibv_poll_cq(3), ibv_req_notify_cq(3))."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import WAIT_MS, connect_queue_pairs, require_errno
from support.processes import limit_open_files

from gdrkit.harness.needs import host, needs, verbs
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
    with require_errno(errno.EINVAL), nic.completion_queue(depth=depth):
        pass


def test_completions_of_a_queue_pair_are_in_request_order(nic: Nic) -> None:
    with connect_queue_pairs(nic) as (requester, _), nic.register_host(bytearray(8 * KIB)) as local_region:
        remote_range = local_region.remote(length_bytes=16)
        for work_id in range(16):
            post = requester.post_read if work_id % 3 == 1 else requester.post_write
            post(local_region, remote_range, work_id=work_id, local_offset_bytes=4 * KIB)
        completions = [requester.wait(WAIT_MS).expect(Status.SUCCESS) for _ in range(16)]
    assert [completion.work_id for completion in completions] == list(range(16))
    expected_opcodes = [
        CompletionOpcode.RDMA_READ if work_id % 3 == 1 else CompletionOpcode.RDMA_WRITE for work_id in range(16)
    ]
    assert [completion.opcode for completion in completions] == expected_opcodes


@pytest.mark.parametrize("work_id", [0, 1 << 32, WORK_ID_MAX])
def test_completion_has_the_work_id_of_its_request(nic: Nic, work_id: int) -> None:
    with connect_queue_pairs(nic) as (requester, responder), nic.register_host(bytearray(KIB)) as region:
        responder.post_receive(region, work_id=work_id)
        requester.post_send(region, work_id=work_id, length_bytes=1)
        assert requester.wait(WAIT_MS).expect(Status.SUCCESS).work_id == work_id
        receive_completion = responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
    assert (receive_completion.work_id, receive_completion.opcode, receive_completion.qp_number) == (
        work_id,
        CompletionOpcode.RECV,
        responder.number,
    )


def test_unsignaled_success_has_no_completion(nic: Nic) -> None:
    with connect_queue_pairs(nic) as (requester, _), nic.register_host(bytearray(KIB)) as region:
        remote_range = region.remote(length_bytes=16)
        for work_id in range(4):
            requester.post_write(region, remote_range, work_id=work_id, local_offset_bytes=512, signaled=work_id == 3)
        assert requester.wait(WAIT_MS).expect(Status.SUCCESS).work_id == 3
        assert requester.send_queue.poll() == []


def test_unsignaled_failure_has_a_completion(nic: Nic) -> None:
    with connect_queue_pairs(nic) as (requester, _), nic.register_host(bytearray(KIB)) as region:
        with nic.register_host(bytearray(KIB)) as closed_region:
            remote_range = closed_region.remote()
        requester.post_write(region, remote_range, work_id=5, signaled=False)
        failed_completion = requester.wait(WAIT_MS)
    assert (failed_completion.work_id, failed_completion.status) == (5, Status.REM_ACCESS_ERR)


def test_shared_queue_separates_completions_by_queue_pair(nic: Nic) -> None:
    with (
        nic.completion_queue() as queue,
        nic.queue_pair(queue) as first_pair,
        nic.queue_pair(queue) as second_pair,
        nic.register_host(bytearray(KIB)) as region,
    ):
        first_pair.connect(second_pair.endpoint())
        second_pair.connect(first_pair.endpoint())
        remote_range = region.remote(length_bytes=16)
        first_pair.post_write(region, remote_range, work_id=1, local_offset_bytes=512)
        second_pair.post_write(region, remote_range, work_id=2, local_offset_bytes=512)
        completions = [queue.wait(WAIT_MS).expect(Status.SUCCESS) for _ in range(2)]
    assert {(completion.qp_number, completion.work_id) for completion in completions} == {
        (first_pair.number, 1),
        (second_pair.number, 2),
    }


@pytest.mark.parametrize("solicited_only", [False, True], ids=["any", "solicited"])
def test_completion_generates_an_event(nic: Nic, solicited_only: bool) -> None:  # noqa: FBT001 - a parameter of pytest.
    with (
        nic.completion_queue(events=True) as responder_queue,
        nic.completion_queue() as requester_queue,
        nic.queue_pair(responder_queue) as responder,
        nic.queue_pair(requester_queue) as requester,
        nic.register_host(bytearray(KIB)) as region,
    ):
        requester.connect(responder.endpoint())
        responder.connect(requester.endpoint())
        responder_queue.request_notification(solicited_only=solicited_only)
        responder.post_receive(region, work_id=1)
        requester.post_send(region, work_id=2, length_bytes=16, solicited=True)
        responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
        responder_queue.take_event(WAIT_MS)


def test_failed_completion_generates_a_solicited_event(nic: Nic) -> None:
    with (
        nic.completion_queue(events=True) as queue,
        nic.queue_pair(queue) as requester,
        nic.queue_pair(queue) as responder,
        nic.register_host(bytearray(KIB)) as region,
    ):
        requester.connect(responder.endpoint())
        responder.connect(requester.endpoint())
        queue.request_notification(solicited_only=True)
        responder.post_receive(region, work_id=1)
        responder.fail()
        assert responder.wait_received(WAIT_MS).status is Status.WR_FLUSH_ERR
        queue.take_event(WAIT_MS)


@needs(host.open_files(4096))
def test_event_arrives_on_a_descriptor_above_1023(nic: Nic) -> None:
    # select(2) fails for such descriptors. `event_fd` is None with pyverbs before 59, which hides the descriptor.
    with limit_open_files(4096), contextlib.ExitStack() as stack:
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        queue = stack.enter_context(nic.completion_queue(events=True))
        queue_pair = stack.enter_context(nic.queue_pair(queue))
        peer = stack.enter_context(nic.queue_pair(queue))
        region = stack.enter_context(nic.register_host(bytearray(KIB)))
        assert queue.event_fd is None or queue.event_fd > 1023
        queue_pair.connect(peer.endpoint())
        peer.connect(queue_pair.endpoint())
        queue.request_notification(solicited_only=True)
        peer.post_receive(region, work_id=1)
        peer.fail()
        assert peer.wait_received(WAIT_MS).status is Status.WR_FLUSH_ERR
        queue.take_event(WAIT_MS)
