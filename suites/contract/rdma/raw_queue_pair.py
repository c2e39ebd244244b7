"""Calls of libibverbs with any arguments: transitions of a queue pair, and registrations of any range.

The calls use gdrkit.verbs._pyverbs, the module below the classes of gdrkit.verbs. Arguments that these classes would
refuse, such as a length of 0, reach libibverbs.
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.verbs import Access, QueuePairState, _pyverbs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.verbs import CompletionQueue, Nic

__all__ = ["REQUIRED_ATTRIBUTES", "Mask", "RawQueuePair", "make_loopback_path", "make_valid_attributes", "register"]


class Mask(enum.IntFlag):
    """``ibv_qp_attr_mask``: the attributes that a call of ibv_modify_qp passes."""

    STATE = 1 << 0
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    AV = 1 << 7  # the address vector: the path to the peer
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    DEST_QPN = 1 << 20


# The attributes that ibv_modify_qp(3) requires for each transition of a reliable connection.
REQUIRED_ATTRIBUTES: Mapping[QueuePairState, Mask] = {
    QueuePairState.INIT: Mask.PKEY_INDEX | Mask.PORT | Mask.ACCESS_FLAGS,
    QueuePairState.RTR: Mask.AV
    | Mask.PATH_MTU
    | Mask.DEST_QPN
    | Mask.RQ_PSN
    | Mask.MAX_DEST_RD_ATOMIC
    | Mask.MIN_RNR_TIMER,
    QueuePairState.RTS: Mask.TIMEOUT | Mask.RETRY_CNT | Mask.RNR_RETRY | Mask.SQ_PSN | Mask.MAX_QP_RD_ATOMIC,
}

_MTU_256 = 1  # IBV_MTU_256
_OPCODE_SEND, _SIGNALED = 2, 2  # IBV_WR_SEND and IBV_SEND_SIGNALED


def make_valid_attributes(nic: Nic) -> dict[str, int]:
    """Return a valid value for each attribute of all transitions. The mask of a call selects the attributes to pass."""
    return {
        "pkey_index": 0,
        "port_num": nic.port.number,
        "qp_access_flags": int(Access.REMOTE_READ | Access.REMOTE_WRITE),
        "path_mtu": _MTU_256,
        "dest_qp_num": 17,  # This can be any number, because no case sends a packet to the peer.
        "rq_psn": 1,
        "sq_psn": 1,
        "max_dest_rd_atomic": 1,
        "max_rd_atomic": 1,
        "min_rnr_timer": 12,  # 0.64 ms
        "timeout": 14,  # 4.096 us * 2**14 = 67 ms
        "retry_cnt": 1,
        "rnr_retry": 1,
    }


def make_loopback_path(nic: Nic, **changed_fields: int | str) -> dict[str, int | str]:
    """Return the fields of ``ibv_ah_attr`` for the path from a NIC to itself, with `changed_fields` replaced."""
    fields: dict[str, int | str] = {
        "is_global": 1,
        "dlid": nic.port.lid,
        "port_num": nic.port.number,
        "gid": nic.gid,
        "sgid_index": nic.gid_index,
        "hop_limit": 64,
    }
    return fields | changed_fields


@dataclass
class RawQueuePair:
    """A queue pair that a case moves from state to state by single calls of ibv_modify_qp."""

    nic: Nic
    completion_queue: CompletionQueue

    def __post_init__(self) -> None:
        limits = {"max_send_wr": 4, "max_recv_wr": 4, "max_send_sge": 1, "max_recv_sge": 1, "max_inline_data": 0}
        native_queue = self.completion_queue.queue
        self.native_queue_pair, self.number = _pyverbs.create_queue_pair(
            self.nic.domain, send_queue=native_queue, receive_queue=native_queue, limits=limits
        )

    @property
    def state(self) -> QueuePairState:
        """The state that ibv_query_qp returns."""
        return QueuePairState(_pyverbs.query_queue_pair_state(self.native_queue_pair))

    def move_to(self, state: QueuePairState | int, mask: Mask | None = None, **changed_fields: int) -> None:
        """Make one transition to `state` with valid attributes. `changed_fields` replaces values of attributes.

        The call passes the attributes of `mask`. If `mask` is None, it passes the attributes that the transition
        requires.
        """
        attribute_mask = REQUIRED_ATTRIBUTES.get(QueuePairState(state), Mask(0)) if mask is None else mask
        path_fields = make_loopback_path(self.nic) if Mask.AV in attribute_mask else None
        attributes = {**make_valid_attributes(self.nic), **changed_fields, "qp_state": int(state)}
        _pyverbs.modify_queue_pair(
            self.native_queue_pair, mask=int(attribute_mask | Mask.STATE), address=path_fields, **attributes
        )

    def modify(self, mask: Mask, path_fields: dict[str, int | str] | None = None, **attributes: int) -> None:
        """Call ibv_modify_qp with exactly these attributes. `path_fields` are the fields of the attribute AV."""
        _pyverbs.modify_queue_pair(self.native_queue_pair, mask=int(mask), address=path_fields, **attributes)

    def advance_to(self, state: QueuePairState) -> None:
        """Make all transitions from RESET to `state`."""
        for next_state in REQUIRED_ATTRIBUTES:
            if next_state <= state:
                self.move_to(next_state)

    def post_send(self, work_id: int) -> None:
        """Post a SEND without data."""
        _pyverbs.post_send(
            self.native_queue_pair,
            work_id=work_id,
            opcode=_OPCODE_SEND,
            flags=_SIGNALED,
            elements=(),
            remote=None,
            immediate=0,
        )

    def post_receive(self, work_id: int) -> None:
        """Post a receive without memory."""
        _pyverbs.post_receive(self.native_queue_pair, work_id=work_id, elements=())

    def close(self) -> None:
        """Call ibv_destroy_qp."""
        _pyverbs.close("ibv_destroy_qp", self.native_queue_pair)


@contextlib.contextmanager
def register(nic: Nic, address: int, *, length_bytes: int, access: int) -> Iterator[tuple[int, int]]:
    """Call ibv_reg_mr with exactly these arguments, and yield lkey and rkey."""
    region = _pyverbs.register_address(
        nic.domain, address=address, length_bytes=length_bytes, access=access, is_device=False
    )
    try:
        yield region.lkey, region.rkey
    finally:
        region.close()
