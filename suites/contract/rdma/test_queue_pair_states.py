"""State transitions of a queue pair, and the attributes that each requires; ibv_modify_qp(3)."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import ALL_ACCESS, WAIT_MS, connected_pairs, raises_errno
from contract.rdma.raw_queue_pair import REQUIRED_ATTRIBUTES, Mask, RawPair, path_to_itself, valid_attributes

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
REQUIRED_CASES = [
    pytest.param(state, attribute, id=f"{state.name}-without-{attribute.name}")
    for state, attributes in REQUIRED_ATTRIBUTES.items()
    for attribute in Mask
    if attribute in attributes
]


@pytest.fixture
def pair(nic: Nic) -> Iterator[RawPair]:
    """Yield a queue pair in RESET."""
    with nic.completion_queue() as queue:
        raw_pair = RawPair(nic, queue)
        yield raw_pair
        raw_pair.close()


def test_queue_pair_goes_from_reset_to_rts_in_three_steps(pair: RawPair) -> None:
    assert pair.state is RESET
    for state in REQUIRED_ATTRIBUTES:
        pair.move_to(state)
        assert pair.state is state


@pytest.mark.parametrize(("state", "missing_attribute"), REQUIRED_CASES)
def test_transition_without_a_required_attribute_is_refused(
    pair: RawPair, state: QueuePairState, missing_attribute: Mask
) -> None:
    pair.advance(STATE_BEFORE[state])
    with raises_errno(errno.EINVAL):
        pair.move_to(state, REQUIRED_ATTRIBUTES[state] & ~missing_attribute)
    assert pair.state is STATE_BEFORE[state]
    pair.move_to(state)


@pytest.mark.parametrize(
    ("from_state", "state"),
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
def test_invalid_transition_is_refused(pair: RawPair, from_state: QueuePairState, state: QueuePairState) -> None:
    pair.advance(RTS if from_state is ERR else from_state)
    if from_state is ERR:
        pair.move_to(ERR)
    with raises_errno(errno.EINVAL):
        pair.move_to(state)
    assert pair.state is from_state


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
    pair: RawPair, state: QueuePairState, extra_attribute: Mask
) -> None:
    from_state = STATE_BEFORE.get(state, INIT)
    pair.advance(from_state)
    with raises_errno(errno.EINVAL):
        pair.move_to(state, REQUIRED_ATTRIBUTES.get(state, Mask(0)) | extra_attribute)
    assert pair.state is from_state


@pytest.mark.parametrize(
    ("state", "invalid_value"),
    [
        pytest.param(INIT, {"port_num": 0}, id="port-0"),
        pytest.param(INIT, {"port_num": 200}, id="port-200"),
        pytest.param(RTS, {"timeout": 32}, id="timeout-32"),
        pytest.param(RTS, {"max_rd_atomic": 255}, id="255-reads"),
    ],
)
def test_invalid_attribute_value_is_refused(
    pair: RawPair, state: QueuePairState, invalid_value: dict[str, int]
) -> None:
    pair.advance(STATE_BEFORE[state])
    with raises_errno(errno.EINVAL):
        pair.move_to(state, REQUIRED_ATTRIBUTES[state], **invalid_value)
    assert pair.state is STATE_BEFORE[state]


def test_gid_index_without_a_gid_is_refused(pair: RawPair, nic: Nic) -> None:
    pair.advance(INIT)
    # The largest index that fits into ibv_global_route is outside the GID table, or at an empty entry.
    address = path_to_itself(nic, sgid_index=255)
    attributes = {**valid_attributes(nic), "qp_state": int(RTR)}
    with raises_errno(errno.EINVAL, errno.ENODATA):
        pair.modify(REQUIRED_ATTRIBUTES[RTR] | Mask.STATE, address, **attributes)
    assert pair.state is INIT


@pytest.mark.parametrize("from_state", [INIT, RTR, RTS, ERR], ids=lambda state: state.name)
def test_queue_pair_can_be_reset_from_every_state(pair: RawPair, from_state: QueuePairState) -> None:
    pair.advance(RTS if from_state is ERR else from_state)
    if from_state is ERR:
        pair.move_to(ERR)
    pair.move_to(RESET)
    assert pair.state is RESET
    pair.advance(RTS)
    assert pair.state is RTS


@pytest.mark.parametrize("from_state", [RESET, INIT, RTR], ids=lambda state: state.name)
def test_send_before_rts_is_refused(pair: RawPair, from_state: QueuePairState) -> None:
    pair.advance(from_state)
    with raises_errno(errno.EINVAL):
        pair.post_send(1)


@pytest.mark.parametrize("from_state", [INIT, RTR, RTS], ids=lambda state: state.name)
def test_early_receive_is_flushed_in_the_error_state(pair: RawPair, from_state: QueuePairState) -> None:
    pair.advance(from_state)
    pair.post_receive(1)
    pair.move_to(ERR)
    completion = pair.queue.wait(WAIT_MS)
    assert (completion.status, completion.qp_number) == (Status.WR_FLUSH_ERR, pair.number)


def test_send_in_the_error_state_is_flushed(pair: RawPair) -> None:
    # Most devices also flush a receive that is posted in this state. rxe does not, and no manual page guarantees it.
    pair.advance(RTS)
    pair.move_to(ERR)
    pair.post_send(1)
    assert pair.queue.wait(WAIT_MS).status is Status.WR_FLUSH_ERR


def test_new_queue_pairs_work_on_memory_of_failed_ones(nic: Nic) -> None:
    target = bytearray(KIB)
    with (
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        nic.register_host(target, access=ALL_ACCESS) as target_region,
    ):
        with connected_pairs(nic) as (requester, responder):
            requester.fail()
            responder.fail()
        with connected_pairs(nic) as (requester, _):
            requester.post_write(local, target_region.remote(), work_id=1)
            requester.wait(WAIT_MS).expect(Status.SUCCESS)
    assert target == b"\xa5" * KIB
