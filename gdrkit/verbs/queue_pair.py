"""Reliable connected queue pairs.

Sources: ibv_create_qp(3), ibv_modify_qp(3), ibv_post_send(3), and the states of the InfiniBand specification (RESET,
INIT, RTR: ready to receive, RTS: ready to send).
"""

from __future__ import annotations

import enum
import secrets
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.handles import Resource
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.completion import Completion, encode_work_id
from gdrkit.verbs.region import Region, ScatterGatherElement
from gdrkit.verbs.status import Access, LinkLayer, QueuePairState, mtu_code
from gdrkit.verbs.wire import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.verbs.completion import CompletionQueue
    from gdrkit.verbs.context import NicContext
    from gdrkit.verbs.wire import RemoteRange

__all__ = ["QueuePair"]

_MESSAGE_BYTES_MAX = 1 << 31  # The largest message (InfiniBand specification).
_HOP_LIMIT = 64  # The hop limit of the global route header.


class _AttributeMask(enum.IntFlag):
    """The members of ``ibv_qp_attr_mask`` that gdrkit uses."""

    STATE = 1
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    AV = 1 << 7  # The address vector.
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


class _SendOpcode(enum.IntEnum):
    """The members of ``ibv_wr_opcode`` that gdrkit uses."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4


class _SendFlag(enum.IntFlag):
    """The members of ``ibv_send_flags`` that gdrkit uses."""

    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3


class QueuePair(Resource):
    """One side of a reliable connection; made by :meth:`Nic.queue_pair`."""

    def __init__(
        self,
        nic: NicContext,
        send_queue: CompletionQueue,
        receive_queue: CompletionQueue,
        *,
        sends_max: int,
        receives_max: int,
        elements_max: int,
        inline_bytes_max: int,
    ) -> None:
        self.nic = nic
        self.send_queue = send_queue
        self.receive_queue = receive_queue
        self._native_queue_pair, self.number = _pyverbs.create_queue_pair(
            nic.domain,
            send_queue=send_queue.queue,
            receive_queue=receive_queue.queue,
            limits={
                "max_send_wr": sends_max,
                "max_recv_wr": receives_max,
                "max_send_sge": elements_max,
                "max_recv_sge": elements_max,
                "max_inline_data": inline_bytes_max,
            },
        )
        self._psn = secrets.randbits(24)  # The packet sequence number of the first packet.
        super().__init__("verbs.queue_pair", name="queue pair", on_close=nic.on_close)

    @property
    def state(self) -> QueuePairState:
        """The state that the device reports now."""
        return QueuePairState(_pyverbs.query_queue_pair_state(self._require_open_native()))

    def endpoint(self) -> Endpoint:
        """Return the data that the other side needs to connect to this queue pair."""
        self._require_open_native()
        return Endpoint(
            qp_number=self.number,
            psn=self._psn,
            gid=self.nic.gid,
            lid=self.nic.port.lid,
            mtu_bytes=self.nic.port.mtu_bytes,
        )

    def connect(
        self,
        remote: Endpoint,
        *,
        access: Access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE,
        timeout_exponent: int = 14,
        retry_count: int = 7,
        rnr_retry_count: int = 6,
        rnr_timer_code: int = 12,
        reads_max: int = 1,
    ) -> None:
        """Move from RESET through INIT and RTR to RTS (ready to send). The other side has to do the same.

        Parameters
        ----------
        remote : Endpoint
            The endpoint of the other side. The smaller MTU of both sides is used.
        access : Access
            The operations that the other side may do. A region can only restrict them further.
        timeout_exponent : int
            The NIC sends a packet again if it was not acknowledged after 4.096 us * 2**exponent (14: 67 ms). 0: never.
        retry_count : int
            Largest number of these retries, 0 to 7. If the last retry fails, the request ends with RETRY_EXC_ERR. With
            7, rxe retries for ever.
        rnr_retry_count : int
            Largest number of retries of a send if the other side has no receive posted (RNR: receiver not ready), 0 to
            6. With 7, the NIC retries for ever, which hides a missing receive.
        rnr_timer_code : int
            Code of the pause that the other side must make before it repeats a send for which this side has no receive
            posted (12: 0.64 ms; table in ibv_modify_qp(3)).
        reads_max : int
            Number of outstanding RDMA READs in each direction. Both sides pass the same number.

        Raises
        ------
        ApiError
            ibv_modify_qp failed. The queue pair stays in its last state.
        """
        port = self.nic.port
        self._move_to_init(access)
        self._modify(
            QueuePairState.RTR,
            _AttributeMask.AV
            | _AttributeMask.PATH_MTU
            | _AttributeMask.DEST_QPN
            | _AttributeMask.RQ_PSN
            | _AttributeMask.MAX_DEST_RD_ATOMIC
            | _AttributeMask.MIN_RNR_TIMER,
            address=self._make_address_vector(remote),
            path_mtu=mtu_code(min(remote.mtu_bytes, port.mtu_bytes)),
            dest_qp_num=remote.qp_number,
            rq_psn=remote.psn,
            max_dest_rd_atomic=reads_max,
            min_rnr_timer=rnr_timer_code,
        )
        self._modify(
            QueuePairState.RTS,
            _AttributeMask.TIMEOUT
            | _AttributeMask.RETRY_CNT
            | _AttributeMask.RNR_RETRY
            | _AttributeMask.SQ_PSN
            | _AttributeMask.MAX_QP_RD_ATOMIC,
            timeout=timeout_exponent,
            retry_cnt=retry_count,
            rnr_retry=rnr_retry_count,
            sq_psn=self._psn,
            max_rd_atomic=reads_max,
        )

    def _move_to_init(self, access: Access) -> None:
        self._modify(
            QueuePairState.INIT,
            _AttributeMask.PKEY_INDEX | _AttributeMask.PORT | _AttributeMask.ACCESS_FLAGS,
            pkey_index=0,
            port_num=self.nic.port.number,
            qp_access_flags=int(access),
        )

    def fail(self) -> None:
        """Move to the error state.

        Outstanding requests end with WR_FLUSH_ERR, and requests of the other side with an error.
        """
        self._modify(QueuePairState.ERR, _AttributeMask(0))

    def post_write(
        self,
        source: Region | Sequence[ScatterGatherElement],
        remote: RemoteRange,
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
        immediate: int | None = None,
        signaled: bool = True,
        inline: bool = False,
    ) -> None:
        """Post an RDMA WRITE from local bytes to the beginning of `remote`.

        Parameters
        ----------
        source : Region or sequence of ScatterGatherElement
            A region, or scatter/gather elements that are written one after the other. `local_offset_bytes` and
            `length_bytes` choose a part of a region. A length of None means the length of `remote`.
        remote : RemoteRange
            The target; :meth:`RemoteRange.part` returns a part of a range.
        work_id : int
            The id that the completion returns, 0 to 2**56 - 1.
        immediate : int or None
            32 bits that the other side gets with a completion. The other side must have posted a receive for it.
        signaled : bool
            Whether a successful request generates a completion. A failed request always does.
        inline : bool
            Whether the device copies the bytes during the call, up to the inline limit of the queue pair. Then the
            local buffer can be changed immediately.

        Raises
        ------
        ApiError
            ENOMEM: the send queue is full. EINVAL: the state is wrong, there are too many elements, or too many inline
            bytes.
        UsageError
            There are more bytes than `remote` or the region has.
        """
        opcode = _SendOpcode.RDMA_WRITE if immediate is None else _SendOpcode.RDMA_WRITE_WITH_IMM
        elements = _make_elements(
            source, local_offset_bytes, remote.length_bytes if length_bytes is None else length_bytes
        )
        flags = _make_send_flags(signaled=signaled, inline=inline)
        self._post(
            opcode, elements, remote, work_id=work_id, request_type="rdma_write", flags=flags, immediate=immediate
        )

    def post_read(
        self,
        target: Region | Sequence[ScatterGatherElement],
        remote: RemoteRange,
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
        signaled: bool = True,
    ) -> None:
        """Post an RDMA READ from the beginning of `remote` into local bytes; see :meth:`post_write`."""
        elements = _make_elements(
            target, local_offset_bytes, remote.length_bytes if length_bytes is None else length_bytes
        )
        flags = _make_send_flags(signaled=signaled, inline=False)
        self._post(
            _SendOpcode.RDMA_READ,
            elements,
            remote,
            work_id=work_id,
            request_type="rdma_read",
            flags=flags,
            immediate=None,
        )

    def post_send(
        self,
        source: Region | Sequence[ScatterGatherElement],
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
        immediate: int | None = None,
        signaled: bool = True,
        inline: bool = False,
        solicited: bool = False,
    ) -> None:
        """Post a SEND of local bytes into the next receive of the other side.

        A length of None means up to the end of the region. With `solicited`, the receive also triggers an event if the
        other side requested a notification with `solicited_only`.
        """
        opcode = _SendOpcode.SEND if immediate is None else _SendOpcode.SEND_WITH_IMM
        flags = _make_send_flags(signaled=signaled, inline=inline) | (
            _SendFlag.SOLICITED if solicited else _SendFlag(0)
        )
        elements = _make_elements(source, local_offset_bytes, length_bytes)
        self._post(opcode, elements, None, work_id=work_id, request_type="send", flags=flags, immediate=immediate)

    def post_receive(
        self,
        target: Region | Sequence[ScatterGatherElement],
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
    ) -> None:
        """Post a receive of local bytes for the next SEND of the other side.

        With an empty sequence, the receive only takes the immediate of the next RDMA WRITE with immediate.
        """
        elements = _make_elements(target, local_offset_bytes, length_bytes)
        _pyverbs.post_receive(
            self._require_open_native(), work_id=encode_work_id(work_id, "recv"), elements=_make_sge_tuples(elements)
        )

    def wait(self, timeout_ms: float) -> Completion:
        """Return the next completion of the send queue for this queue pair; see :meth:`CompletionQueue.wait`."""
        return self.send_queue.wait(timeout_ms, qp_number=self.number)

    def wait_received(self, timeout_ms: float) -> Completion:
        """Return the next completion of the receive queue for this queue pair.

        If the send queue is also the receive queue, this method does the same as :meth:`wait`.
        """
        return self.receive_queue.wait(timeout_ms, qp_number=self.number)

    def close(self) -> None:
        """Destroy the queue pair. Outstanding requests end without a completion. A second close does nothing."""
        super().close()

    def _release(self) -> None:
        _pyverbs.close("ibv_destroy_qp", self._native_queue_pair)

    def _make_address_vector(self, remote: Endpoint) -> dict[str, int | str]:
        """Return the fields of ``ibv_ah_attr`` that address the other side."""
        port = self.nic.port
        # RoCE has no LIDs and is addressed by the GID. InfiniBand is addressed by the LID within a subnet.
        is_global = port.link_layer is LinkLayer.ETHERNET or not remote.lid
        return {
            "is_global": int(is_global),
            "dlid": remote.lid,
            "port_num": port.number,
            "gid": remote.gid,
            "sgid_index": self.nic.gid_index,
            "hop_limit": _HOP_LIMIT,
        }

    def _modify(
        self,
        state: QueuePairState,
        mask: _AttributeMask,
        *,
        address: dict[str, int | str] | None = None,
        **attributes: int,
    ) -> None:
        _pyverbs.modify_queue_pair(
            self._require_open_native(),
            mask=int(mask | _AttributeMask.STATE),
            address=address,
            qp_state=int(state),
            **attributes,
        )

    def _post(
        self,
        opcode: _SendOpcode,
        elements: Sequence[ScatterGatherElement],
        remote: RemoteRange | None,
        *,
        work_id: int,
        request_type: str,
        flags: _SendFlag,
        immediate: int | None,
    ) -> None:
        """Check the length and the immediate of a send request, and post the request."""
        total_bytes = sum(element.length_bytes for element in elements)
        if total_bytes > _MESSAGE_BYTES_MAX or (remote is not None and total_bytes > remote.length_bytes):
            limit_bytes = _MESSAGE_BYTES_MAX if remote is None else min(_MESSAGE_BYTES_MAX, remote.length_bytes)
            message = f"the request has {total_bytes} bytes, more than the limit of {limit_bytes} bytes"
            raise UsageError(message)
        if immediate is not None and not 0 <= immediate < 1 << 32:
            message = f"immediate must be from 0 to 0xffffffff, not {immediate:#x}"
            raise UsageError(message)
        _pyverbs.post_send(
            self._require_open_native(),
            work_id=encode_work_id(work_id, request_type),
            opcode=int(opcode),
            flags=int(flags),
            elements=_make_sge_tuples(elements),
            remote=None if remote is None else (remote.rkey, remote.address),
            immediate=immediate or 0,
        )

    def _require_open_native(self) -> object:
        self._check_open()
        return self._native_queue_pair

    def __repr__(self) -> str:
        return f"QueuePair({self.nic.name}, number={self.number}{', closed' if self._is_closed else ''})"


def _make_elements(
    source: Region | Sequence[ScatterGatherElement], offset_bytes: int, length_bytes: int | None
) -> Sequence[ScatterGatherElement]:
    if isinstance(source, Region):
        return (source.element(offset_bytes=offset_bytes, length_bytes=length_bytes),)
    if offset_bytes:
        message = "local_offset_bytes must be 0 for scatter/gather elements, because each has its own address"
        raise UsageError(message)
    return source


def _make_sge_tuples(elements: Sequence[ScatterGatherElement]) -> list[tuple[int, int, int]]:
    return [(element.address, element.length_bytes, element.lkey) for element in elements]


def _make_send_flags(*, signaled: bool, inline: bool) -> _SendFlag:
    return (_SendFlag.SIGNALED if signaled else _SendFlag(0)) | (_SendFlag.INLINE if inline else _SendFlag(0))
