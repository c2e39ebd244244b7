"""SEND with immediates, scatter/gather elements and inline data, and receives that are too short or missing.

Sources: ibv_post_send(3), ibv_post_recv(3).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import WAIT_MS, connect_queue_pairs, create_queue_pair, require_errno

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import CompletionOpcode, ScatterGatherElement, Status

if TYPE_CHECKING:
    from gdrkit.verbs import Nic, QueuePair, Region

pytestmark = needs(verbs.nic())

REGION_BYTES = 80 * KIB
# Lengths in bytes: empty, one byte, lengths near the path MTUs of 256, 1024 and 4096 bytes, and many packets.
MESSAGE_LENGTHS = [0, 1, 255, 1024, 1025, 4097, 64 * KIB]
IMMEDIATES = [0, 1, 0x01020304, 0xFFFFFFFF]
# If a message is longer than the receive, the InfiniBand specification (9.9.3) requires an invalid request error at the
# requester and a length error at the receiver. rxe reports an operation error on both sides.
TOO_LONG_REQUESTER_STATUSES = frozenset({Status.REM_INV_REQ_ERR, Status.REM_OP_ERR})
TOO_LONG_RECEIVER_STATUSES = frozenset({Status.LOC_LEN_ERR, Status.LOC_QP_OP_ERR})


def make_quarter_elements(region: Region, length_bytes: int) -> list[ScatterGatherElement]:
    """Return four elements, each with one quarter of the region, in reverse order."""
    quarter_bytes = length_bytes // 4
    return [region.element(offset_bytes=index * quarter_bytes, length_bytes=quarter_bytes) for index in (3, 2, 1, 0)]


def reverse_quarters(data: bytes) -> bytes:
    """Return the quarters of the data in reverse order, like the elements of :func:`make_quarter_elements`."""
    quarter_bytes = len(data) // 4
    return b"".join(data[index * quarter_bytes : (index + 1) * quarter_bytes] for index in (3, 2, 1, 0))


def post_receives(queue_pair: QueuePair, count: int) -> None:
    """Post `count` receives without elements."""
    for work_id in range(count):
        queue_pair.post_receive((), work_id=work_id)


@pytest.mark.parametrize("length_bytes", MESSAGE_LENGTHS)
def test_message_arrives_and_bytes_after_it_are_unchanged(nic: Nic, seed: int, length_bytes: int) -> None:
    payload = pattern.payload(length_bytes, seed=seed)
    destination_bytes = bytearray(REGION_BYTES)
    with (
        connect_queue_pairs(nic) as (requester, responder),
        nic.register_host(bytearray(payload) or bytearray(1)) as source_region,  # An empty buffer cannot be registered.
        nic.register_host(destination_bytes) as destination_region,
    ):
        responder.post_receive(destination_region, work_id=1)
        requester.post_send(source_region, work_id=2, length_bytes=length_bytes)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
        receive_completion = responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
    assert (receive_completion.length_bytes, receive_completion.opcode, receive_completion.immediate) == (
        length_bytes,
        CompletionOpcode.RECV,
        None,
    )
    assert destination_bytes == payload + bytes(REGION_BYTES - length_bytes)


@pytest.mark.parametrize("immediate", IMMEDIATES)
def test_send_transfers_its_immediate(nic: Nic, immediate: int) -> None:
    with connect_queue_pairs(nic) as (requester, responder), nic.register_host(bytearray(KIB)) as region:
        responder.post_receive(region, work_id=1)
        requester.post_send(region, work_id=2, length_bytes=3, immediate=immediate)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
        receive_completion = responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
    assert (receive_completion.immediate, receive_completion.length_bytes, receive_completion.opcode) == (
        immediate,
        3,
        CompletionOpcode.RECV,
    )


@pytest.mark.parametrize("immediate", IMMEDIATES)
def test_write_with_immediate_consumes_a_receive(nic: Nic, immediate: int) -> None:
    destination_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, responder),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(destination_bytes) as destination_region,
    ):
        responder.post_receive((), work_id=1)
        requester.post_write(local_region, destination_region.remote(), work_id=2, immediate=immediate)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
        receive_completion = responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
    assert (receive_completion.immediate, receive_completion.opcode, receive_completion.work_id) == (
        immediate,
        CompletionOpcode.RECV_RDMA_WITH_IMM,
        1,
    )
    assert destination_bytes == b"\xa5" * KIB


def test_receives_are_filled_in_posting_order(nic: Nic) -> None:
    destination_bytes = bytearray(8)
    with (
        connect_queue_pairs(nic) as (requester, responder),
        nic.register_host(bytearray(range(8))) as source_region,
        nic.register_host(destination_bytes) as destination_region,
    ):
        for work_id in range(8):
            responder.post_receive(destination_region, work_id=work_id, local_offset_bytes=7 - work_id, length_bytes=1)
        for work_id in range(8):
            requester.post_send(source_region, work_id=work_id, local_offset_bytes=work_id, length_bytes=1)
        for work_id in range(8):
            assert requester.wait(WAIT_MS).expect(Status.SUCCESS).work_id == work_id
            assert responder.wait_received(WAIT_MS).expect(Status.SUCCESS).work_id == work_id
    assert destination_bytes == bytes(reversed(range(8)))


@pytest.mark.parametrize("operation", ["send", "write"])
def test_elements_are_gathered_in_order(nic: Nic, seed: int, operation: str) -> None:
    payload = pattern.payload(8 * KIB, seed=seed)
    destination_bytes = bytearray(8 * KIB)
    with (
        connect_queue_pairs(nic) as (requester, responder),
        nic.register_host(bytearray(payload)) as source_region,
        nic.register_host(destination_bytes) as destination_region,
    ):
        if operation == "send":
            responder.post_receive(destination_region, work_id=1)
            requester.post_send(make_quarter_elements(source_region, 8 * KIB), work_id=2)
            responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
        else:
            requester.post_write(make_quarter_elements(source_region, 8 * KIB), destination_region.remote(), work_id=2)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
    assert destination_bytes == reverse_quarters(payload)


@pytest.mark.parametrize("operation", ["send", "read"])
def test_elements_are_scattered_in_order(nic: Nic, seed: int, operation: str) -> None:
    payload = pattern.payload(8 * KIB, seed=seed)
    destination_bytes = bytearray(8 * KIB)
    with (
        connect_queue_pairs(nic) as (requester, responder),
        nic.register_host(bytearray(payload)) as source_region,
        nic.register_host(destination_bytes) as destination_region,
    ):
        if operation == "send":
            responder.post_receive(make_quarter_elements(destination_region, 8 * KIB), work_id=1)
            requester.post_send(source_region, work_id=2)
            responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
        else:
            requester.post_read(make_quarter_elements(destination_region, 8 * KIB), source_region.remote(), work_id=2)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
    assert reverse_quarters(bytes(destination_bytes)) == payload


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_too_many_elements_are_refused(nic: Nic, operation: str) -> None:
    with (
        connect_queue_pairs(nic, limits={"elements_max": 2}) as (requester, _),
        nic.register_host(bytearray(KIB)) as region,
    ):
        # A device may grant more elements than the two that were requested, but not 1000.
        elements = [region.element(length_bytes=1)] * 1000
        with require_errno(errno.EINVAL):
            (requester.post_send if operation == "send" else requester.post_receive)(elements, work_id=1)


def test_inline_bytes_can_be_changed_after_the_post(nic: Nic, seed: int) -> None:
    payload = pattern.payload(32, seed=seed)
    source_bytes, destination_bytes = bytearray(payload), bytearray(32)
    with (
        connect_queue_pairs(nic, limits={"inline_bytes_max": 32}) as (requester, _),
        nic.register_host(source_bytes) as local_region,
        nic.register_host(destination_bytes) as destination_region,
    ):
        requester.post_write(local_region, destination_region.remote(), work_id=1, inline=True)
        memoryview(source_bytes)[:] = bytes(32)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
    assert destination_bytes == payload


def test_inline_bytes_need_no_key(nic: Nic, seed: int) -> None:
    payload = pattern.payload(32, seed=seed)
    destination_bytes = bytearray(32)
    with (
        connect_queue_pairs(nic, limits={"inline_bytes_max": 32}) as (requester, responder),
        nic.register_host(bytearray(payload)) as local_region,
        nic.register_host(destination_bytes) as destination_region,
    ):
        element = local_region.element()
        responder.post_receive(destination_region, work_id=1)
        requester.post_send([ScatterGatherElement(element.address, element.length_bytes, 0)], work_id=2, inline=True)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
        responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
    assert destination_bytes == payload


def test_too_many_inline_bytes_are_refused(nic: Nic) -> None:
    # The case posts 64 KiB inline, because a device may grant a larger limit than the requested 32 bytes.
    with (
        connect_queue_pairs(nic, limits={"inline_bytes_max": 32}) as (requester, _),
        nic.register_host(bytearray(64 * KIB)) as local_region,
        require_errno(errno.EINVAL, errno.ENOMEM),
    ):
        requester.post_send(local_region, work_id=1, inline=True)


def test_full_receive_queue_refuses_another_receive(nic: Nic) -> None:
    with connect_queue_pairs(nic, limits={"receives_max": 4}) as (requester, _):
        post_receives(requester, 4)
        # A device may grant a deeper queue than requested, but not an unlimited one.
        with require_errno(errno.ENOMEM):
            post_receives(requester, 100_000)


def test_message_longer_than_the_receive_fails_on_both_sides(nic: Nic) -> None:
    with connect_queue_pairs(nic) as (requester, responder), nic.register_host(bytearray(4 * KIB)) as region:
        responder.post_receive(region, work_id=1, length_bytes=2 * KIB)
        requester.post_send(region, work_id=2, length_bytes=2 * KIB + 1)
        assert requester.wait(WAIT_MS).status in TOO_LONG_REQUESTER_STATUSES
        assert responder.wait_received(WAIT_MS).status in TOO_LONG_RECEIVER_STATUSES


@pytest.mark.parametrize("operation", ["send", "write-with-immediate"])
def test_missing_receive_ends_in_rnr_retry_exceeded(nic: Nic, operation: str) -> None:
    with connect_queue_pairs(nic, rnr_retry_count=1) as (requester, _), nic.register_host(bytearray(KIB)) as region:
        if operation == "send":
            requester.post_send(region, work_id=1, length_bytes=16)
        else:
            requester.post_write(region, region.remote(length_bytes=16), work_id=1, local_offset_bytes=512, immediate=1)
        assert requester.wait(WAIT_MS).status is Status.RNR_RETRY_EXC_ERR


def test_late_receive_within_the_retries_succeeds(nic: Nic) -> None:
    destination_bytes = bytearray(KIB)
    with (
        # Timer code 30 means that the requester retries after 0.33 s.
        connect_queue_pairs(nic, rnr_timer_code=30) as (requester, responder),
        nic.register_host(bytearray(b"\xa5" * KIB)) as source_region,
        nic.register_host(destination_bytes) as destination_region,
    ):
        requester.post_send(source_region, work_id=1)
        responder.post_receive(destination_region, work_id=2)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
        responder.wait_received(WAIT_MS).expect(Status.SUCCESS)
    assert destination_bytes == b"\xa5" * KIB


def test_missing_peer_queue_pair_ends_in_retry_exceeded(nic: Nic) -> None:
    with create_queue_pair(nic) as requester, nic.register_host(bytearray(KIB)) as region:
        with create_queue_pair(nic) as destroyed_pair:
            destroyed_endpoint = destroyed_pair.endpoint()
        # With the default retry count of 7, some drivers retry for ever.
        requester.connect(destroyed_endpoint, retry_count=1, timeout_exponent=12)
        requester.post_send(region, work_id=1)
        assert requester.wait(WAIT_MS).status is Status.RETRY_EXC_ERR
