"""State transitions of a queue pair, and the attributes that each transition requires (ibv_modify_qp(3))."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import READ_WRITE_ACCESS, WAIT_MS, connect_queue_pairs, require_errno
from contract.rdma.raw_queue_pair import (
    REQUIRED_ATTRIBUTES,
    Mask,
    RawQueuePair,
    make_loopback_path,
    make_valid_attributes,
)

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import QueuePairState, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())

RESET, INIT, RTR, RTS, ERR = (
    QueuePairState.RESET,
    QueuePairState.INIT,
    QueuePairState.RTR,
    QueuePairState.RTS,
    QueuePairState.ERR,
)
STATE_BEFORE = {INIT: RESET, RTR: INIT, RTS: RTR}
REQUIRED_ATTRIBUTE_CASES = [
    pytest.param(state, attribute, id=f"{state.name}-without-{attribute.name}")
    for state, attributes in REQUIRED_ATTRIBUTES.items()
    for attribute in Mask
    if attribute in attributes
]


@pytest.fixture
def queue_pair(nic: Nic) -> Iterator[RawQueuePair]:
    """Yield a queue pair in the state RESET."""
    with nic.completion_queue() as completion_queue:
        raw_queue_pair = RawQueuePair(nic, completion_queue)
        yield raw_queue_pair
        raw_queue_pair.close()


def test_queue_pair_goes_from_reset_to_rts_in_three_steps(queue_pair: RawQueuePair) -> None:
    assert queue_pair.state is RESET
    for state in REQUIRED_ATTRIBUTES:
        queue_pair.move_to(state)
        assert queue_pair.state is state


@pytest.mark.parametrize(("state", "missing_attribute"), REQUIRED_ATTRIBUTE_CASES)
def test_transition_without_a_required_attribute_is_refused(
    queue_pair: RawQueuePair, state: QueuePairState, missing_attribute: Mask
) -> None:
    queue_pair.advance_to(STATE_BEFORE[state])
    with require_errno(errno.EINVAL):
        queue_pair.move_to(state, REQUIRED_ATTRIBUTES[state] & ~missing_attribute)
    assert queue_pair.state is STATE_BEFORE[state]
    queue_pair.move_to(state)


@pytest.mark.parametrize(
    ("from_state", "to_state"),
    [
        pytest.param(RESET, RTR, id="RESET-to-RTR"),
        pytest.param(RESET, RTS, id="RESET-to-RTS"),
        pytest.param(RESET, ERR, id="RESET-to-ERR"),
        pytest.param(INIT, RTS, id="INIT-to-RTS"),
        pytest.param(RTS, RTR, id="RTS-to-RTR"),
        pytest.param(RTS, INIT, id="RTS-to-INIT"),
        pytest.param(ERR, INIT, id="ERR-to-INIT"),
        pytest.param(ERR, RTS, id="ERR-to-RTS"),
    ],
)
def test_invalid_transition_is_refused(
    queue_pair: RawQueuePair, from_state: QueuePairState, to_state: QueuePairState
) -> None:
    queue_pair.advance_to(RTS if from_state is ERR else from_state)
    if from_state is ERR:
        queue_pair.move_to(ERR)
    with require_errno(errno.EINVAL):
        queue_pair.move_to(to_state)
    assert queue_pair.state is from_state


@pytest.mark.parametrize(
    ("state", "extra_attribute"),
    [
        pytest.param(INIT, Mask.TIMEOUT, id="INIT-with-TIMEOUT"),
        pytest.param(INIT, Mask.AV, id="INIT-with-AV"),
        pytest.param(RTR, Mask.SQ_PSN, id="RTR-with-SQ_PSN"),
        pytest.param(RTS, Mask.DEST_QPN, id="RTS-with-DEST_QPN"),
        pytest.param(ERR, Mask.PORT, id="ERR-with-PORT"),
    ],
)
def test_transition_with_a_foreign_attribute_is_refused(
    queue_pair: RawQueuePair, state: QueuePairState, extra_attribute: Mask
) -> None:
    from_state = STATE_BEFORE.get(state, INIT)
    queue_pair.advance_to(from_state)
    with require_errno(errno.EINVAL):
        queue_pair.move_to(state, REQUIRED_ATTRIBUTES.get(state, Mask(0)) | extra_attribute)
    assert queue_pair.state is from_state


@pytest.mark.parametrize(
    ("state", "invalid_attribute"),
    [
        pytest.param(INIT, {"port_num": 0}, id="port-0"),
        pytest.param(INIT, {"port_num": 200}, id="port-200"),
        pytest.param(RTS, {"timeout": 32}, id="timeout-32"),
        pytest.param(RTS, {"max_rd_atomic": 255}, id="255-reads"),
    ],
)
def test_invalid_attribute_value_is_refused(
    queue_pair: RawQueuePair, state: QueuePairState, invalid_attribute: dict[str, int]
) -> None:
    queue_pair.advance_to(STATE_BEFORE[state])
    with require_errno(errno.EINVAL):
        queue_pair.move_to(state, REQUIRED_ATTRIBUTES[state], **invalid_attribute)
    assert queue_pair.state is STATE_BEFORE[state]


def test_gid_index_without_a_gid_is_refused(queue_pair: RawQueuePair, nic: Nic) -> None:
    queue_pair.advance_to(INIT)
    # The largest index that fits into ibv_global_route is outside the GID table, or at an empty entry.
    path_fields = make_loopback_path(nic, sgid_index=255)
    attributes = {**make_valid_attributes(nic), "qp_state": int(RTR)}
    with require_errno(errno.EINVAL, errno.ENODATA):
        queue_pair.modify(REQUIRED_ATTRIBUTES[RTR] | Mask.STATE, path_fields, **attributes)
    assert queue_pair.state is INIT


@pytest.mark.parametrize("from_state", [INIT, RTR, RTS, ERR], ids=lambda state: state.name)
def test_queue_pair_can_be_reset_from_every_state(queue_pair: RawQueuePair, from_state: QueuePairState) -> None:
    queue_pair.advance_to(RTS if from_state is ERR else from_state)
    if from_state is ERR:
        queue_pair.move_to(ERR)
    queue_pair.move_to(RESET)
    assert queue_pair.state is RESET
    queue_pair.advance_to(RTS)
    assert queue_pair.state is RTS


@pytest.mark.parametrize("from_state", [RESET, INIT, RTR], ids=lambda state: state.name)
def test_send_before_rts_is_refused(queue_pair: RawQueuePair, from_state: QueuePairState) -> None:
    queue_pair.advance_to(from_state)
    with require_errno(errno.EINVAL):
        queue_pair.post_send(1)


@pytest.mark.parametrize("from_state", [INIT, RTR, RTS], ids=lambda state: state.name)
def test_early_receive_is_flushed_in_the_error_state(queue_pair: RawQueuePair, from_state: QueuePairState) -> None:
    queue_pair.advance_to(from_state)
    queue_pair.post_receive(1)
    queue_pair.move_to(ERR)
    completion = queue_pair.completion_queue.wait(WAIT_MS)
    assert (completion.status, completion.qp_number) == (Status.WR_FLUSH_ERR, queue_pair.number)


def test_send_in_the_error_state_is_flushed(queue_pair: RawQueuePair) -> None:
    # Most devices also flush a receive that is posted in this state. rxe does not, and no manual page guarantees it.
    queue_pair.advance_to(RTS)
    queue_pair.move_to(ERR)
    queue_pair.post_send(1)
    assert queue_pair.completion_queue.wait(WAIT_MS).status is Status.WR_FLUSH_ERR


def test_new_queue_pairs_work_on_memory_of_failed_ones(nic: Nic) -> None:
    remote_bytes = bytearray(KIB)
    with (
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(remote_bytes, access=READ_WRITE_ACCESS) as remote_region,
    ):
        with connect_queue_pairs(nic) as (requester, responder):
            requester.fail()
            responder.fail()
        with connect_queue_pairs(nic) as (requester, _):
            requester.post_write(local_region, remote_region.remote(), work_id=1)
            requester.wait(WAIT_MS).expect(Status.SUCCESS)
    assert remote_bytes == b"\xa5" * KIB
