"""Reliable connected queue pairs.

Level 2. Source: ibv_create_qp(3), ibv_modify_qp(3), ibv_post_send(3), and the state machine of the InfiniBand
specification (RESET, INIT, RTR, RTS).
"""

from __future__ import annotations

import enum
import secrets
from typing import TYPE_CHECKING, Self

from gdrkit.errors import ClosedResource, UsageError
from gdrkit.handles import Handle
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.completion import Completion, tagged
from gdrkit.verbs.region import Piece, Region
from gdrkit.verbs.status import Access, LinkLayer, QueuePairState, mtu_code
from gdrkit.verbs.wire import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.verbs.completion import CompletionQueue
    from gdrkit.verbs.nic import Nic
    from gdrkit.verbs.wire import RemoteRange

__all__ = ["QueuePair"]

_MESSAGE_BYTES_MAX = 1 << 31
_HOP_LIMIT = 64


class _Mask(enum.IntFlag):
    """What of ``ibv_qp_attr_mask`` is used."""

    STATE = 1
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    AV = 1 << 7
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


class _Send(enum.IntEnum):
    """What of ``ibv_wr_opcode`` is used."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4


class _Flag(enum.IntFlag):
    """What of ``ibv_send_flags`` is used."""

    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3


class QueuePair:
    """One side of a reliable connection; made by :meth:`Nic.queue_pair`."""

    def __init__(
        self,
        nic: Nic,
        send_queue: CompletionQueue,
        receive_queue: CompletionQueue,
        *,
        sends_max: int,
        receives_max: int,
        pieces_max: int,
        inline_bytes_max: int,
    ) -> None:
        self.nic = nic
        self.send_queue = send_queue
        self.receive_queue = receive_queue
        self._pair, self.number = _pyverbs.create_queue_pair(
            nic.domain,
            send_queue=send_queue.queue,
            receive_queue=receive_queue.queue,
            limits={
                "max_send_wr": sends_max,
                "max_recv_wr": receives_max,
                "max_send_sge": pieces_max,
                "max_recv_sge": pieces_max,
                "max_inline_data": inline_bytes_max,
            },
        )
        self._psn = secrets.randbits(24)
        self._closed = False
        self._handle = Handle("verbs.queue_pair")
        self._leave: Callable[[], None] = nic.adopt(self.close)

    @property
    def closed(self) -> bool:
        """Whether it was destroyed."""
        return self._closed

    @property
    def state(self) -> QueuePairState:
        """As the device says now."""
        return QueuePairState(_pyverbs.query_state(self._open()))

    def endpoint(self) -> Endpoint:
        """What the other side must know to connect to this one."""
        self._open()
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
        """Go from RESET to ready-to-send (INIT, RTR, RTS); the other side does the same.

        Parameters
        ----------
        remote : Endpoint
            Of the other side; the smaller of both MTUs is used.
        access : Access
            What the other side may do at all, whatever the regions allow.
        timeout_exponent : int
            A packet without an answer is sent again after 4.096 us * 2**exponent (14: 67 ms); 0 waits for ever.
        retry_count : int
            How often, 0 to 7; then the request ends in RETRY_EXC_ERR. rxe takes 7 as for ever.
        rnr_retry_count : int
            How often a send is tried again when no receive is there, 0 to 6; 7 means for ever and would hide a
            receive that is missing.
        rnr_timer_code : int
            How long the other side shall wait before such a try (12: 0.64 ms; table in ibv_modify_qp(3)).
        reads_max : int
            RDMA READs under way at once, each way; both sides say the same.

        Raises
        ------
        ApiError
            ibv_modify_qp refused a step; the queue pair stays in the state before it.
        """
        port = self.nic.port
        self._initialize(access)
        self._modify(
            QueuePairState.RTR,
            _Mask.AV | _Mask.PATH_MTU | _Mask.DEST_QPN | _Mask.RQ_PSN | _Mask.MAX_DEST_RD_ATOMIC | _Mask.MIN_RNR_TIMER,
            address=self._address_of(remote),
            path_mtu=mtu_code(min(remote.mtu_bytes, port.mtu_bytes)),
            dest_qp_num=remote.qp_number,
            rq_psn=remote.psn,
            max_dest_rd_atomic=reads_max,
            min_rnr_timer=rnr_timer_code,
        )
        self._modify(
            QueuePairState.RTS,
            _Mask.TIMEOUT | _Mask.RETRY_CNT | _Mask.RNR_RETRY | _Mask.SQ_PSN | _Mask.MAX_QP_RD_ATOMIC,
            timeout=timeout_exponent,
            retry_cnt=retry_count,
            rnr_retry=rnr_retry_count,
            sq_psn=self._psn,
            max_rd_atomic=reads_max,
        )

    def _initialize(self, access: Access) -> None:
        self._modify(
            QueuePairState.INIT,
            _Mask.PKEY_INDEX | _Mask.PORT | _Mask.ACCESS_FLAGS,
            pkey_index=0,
            port_num=self.nic.port.number,
            qp_access_flags=int(access),
        )

    def fail(self) -> None:
        """Put it into the error state: requests under way end in WR_FLUSH_ERR, and the other side's in an error."""
        self._modify(QueuePairState.ERR, _Mask(0))

    def post_write(
        self,
        source: Region | Sequence[Piece],
        remote: RemoteRange,
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
        immediate: int | None = None,
        signaled: bool = True,
        inline: bool = False,
    ) -> None:
        """RDMA WRITE from local bytes to the beginning of `remote`.

        Parameters
        ----------
        source : Region or sequence of Piece
            A region, of which `local_offset_bytes` and `length_bytes` choose a part (None: as much as `remote` has),
            or pieces that are written one behind the other.
        remote : RemoteRange
            Where to; :meth:`RemoteRange.part` gives a part of one.
        work_id : int
            Comes back in the completion, 0 to 2**56 - 1.
        immediate : int or None
            32 bits that the other side gets as a completion, for which it must have posted a receive.
        signaled : bool
            Whether success makes a completion; failure always does.
        inline : bool
            Have the device take the bytes at once, so that the local buffer may be changed right away (up to the
            limit of the queue pair).

        Raises
        ------
        ApiError
            ENOMEM: the send queue is full. EINVAL: a wrong state, too many pieces, too many bytes inline.
        UsageError
            More bytes than `remote` has, or than the region.
        """
        opcode = _Send.RDMA_WRITE if immediate is None else _Send.RDMA_WRITE_WITH_IMM
        pieces = _pieces(source, local_offset_bytes, remote.length_bytes if length_bytes is None else length_bytes)
        flags = _flags(signaled=signaled, inline=inline)
        self._post(opcode, pieces, remote, work_id=work_id, kind="rdma_write", flags=flags, immediate=immediate)

    def post_read(
        self,
        target: Region | Sequence[Piece],
        remote: RemoteRange,
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
        signaled: bool = True,
    ) -> None:
        """RDMA READ from the beginning of `remote` into local bytes; see :meth:`post_write`."""
        pieces = _pieces(target, local_offset_bytes, remote.length_bytes if length_bytes is None else length_bytes)
        flags = _flags(signaled=signaled, inline=False)
        self._post(_Send.RDMA_READ, pieces, remote, work_id=work_id, kind="rdma_read", flags=flags, immediate=None)

    def post_send(
        self,
        source: Region | Sequence[Piece],
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
        immediate: int | None = None,
        signaled: bool = True,
        inline: bool = False,
        solicited: bool = False,
    ) -> None:
        """SEND local bytes into the next receive of the other side (None: up to the end); `solicited` asks for an
        event there.
        """
        opcode = _Send.SEND if immediate is None else _Send.SEND_WITH_IMM
        flags = _flags(signaled=signaled, inline=inline) | (_Flag.SOLICITED if solicited else _Flag(0))
        pieces = _pieces(source, local_offset_bytes, length_bytes)
        self._post(opcode, pieces, None, work_id=work_id, kind="send", flags=flags, immediate=immediate)

    def post_receive(
        self,
        target: Region | Sequence[Piece],
        *,
        work_id: int,
        local_offset_bytes: int = 0,
        length_bytes: int | None = None,
    ) -> None:
        """Offer local bytes to the next SEND of the other side, or an empty sequence to the next immediate of a
        write.
        """
        pieces = _pieces(target, local_offset_bytes, length_bytes)
        _pyverbs.post_receive(self._open(), work_id=tagged(work_id, "recv"), pieces=_raw(pieces))

    def wait(self, timeout_ms: float) -> Completion:
        """The next completion of its send queue for this queue pair; see :meth:`CompletionQueue.wait`."""
        return self.send_queue.wait(timeout_ms, qp_number=self.number)

    def wait_received(self, timeout_ms: float) -> Completion:
        """The same of its receive queue (which may be the same queue)."""
        return self.receive_queue.wait(timeout_ms, qp_number=self.number)

    def close(self) -> None:
        """Destroy it; requests under way are gone without a completion. A second close does nothing."""
        if self._closed:
            return
        _pyverbs.close("ibv_destroy_qp", self._pair)
        self._closed = True
        self._leave()
        self._handle.release()

    def _address_of(self, remote: Endpoint) -> dict[str, int | str]:
        port = self.nic.port
        # RoCE has no LIDs: the GID says where to. On InfiniBand the LID does, within a subnet.
        use_gid = port.link_layer is LinkLayer.ETHERNET or not remote.lid
        return {
            "is_global": int(use_gid),
            "dlid": remote.lid,
            "port_num": port.number,
            "gid": remote.gid,
            "sgid_index": self.nic.gid_index,
            "hop_limit": _HOP_LIMIT,
        }

    def _modify(
        self,
        state: QueuePairState,
        mask: _Mask,
        *,
        address: dict[str, int | str] | None = None,
        **attributes: int,
    ) -> None:
        _pyverbs.modify(self._open(), mask=int(mask | _Mask.STATE), address=address, qp_state=int(state), **attributes)

    def _post(
        self,
        opcode: _Send,
        pieces: Sequence[Piece],
        remote: RemoteRange | None,
        *,
        work_id: int,
        kind: str,
        flags: _Flag,
        immediate: int | None,
    ) -> None:
        total_bytes = sum(piece.length_bytes for piece in pieces)
        if total_bytes > _MESSAGE_BYTES_MAX or (remote is not None and total_bytes > remote.length_bytes):
            there_bytes = _MESSAGE_BYTES_MAX if remote is None else remote.length_bytes
            message = f"{total_bytes} bytes do not fit into {there_bytes}"
            raise UsageError(message)
        if immediate is not None and not 0 <= immediate < 1 << 32:
            message = f"an immediate has 32 bits, not {immediate:#x}"
            raise UsageError(message)
        _pyverbs.post_send(
            self._open(),
            work_id=tagged(work_id, kind),
            opcode=int(opcode),
            flags=int(flags),
            pieces=_raw(pieces),
            remote=None if remote is None else (remote.rkey, remote.address),
            immediate=immediate or 0,
        )

    def _open(self) -> object:
        if self._closed:
            what = "queue pair"
            raise ClosedResource(what)
        return self._pair

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"QueuePair({self.nic.name}, number={self.number}{', closed' if self._closed else ''})"


def _pieces(source: Region | Sequence[Piece], offset_bytes: int, length_bytes: int | None) -> Sequence[Piece]:
    if isinstance(source, Region):
        return (source.piece(offset_bytes=offset_bytes, length_bytes=length_bytes),)
    if offset_bytes:
        message = "pieces have their own offsets"
        raise UsageError(message)
    return source


def _raw(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    return [(piece.address, piece.length_bytes, piece.lkey) for piece in pieces]


def _flags(*, signaled: bool, inline: bool) -> _Flag:
    return (_Flag.SIGNALED if signaled else _Flag(0)) | (_Flag.INLINE if inline else _Flag(0))
