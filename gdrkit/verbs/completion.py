"""Completion queues, and waiting without blocking.

Level 2. pyverbs holds the interpreter's lock in every call, so nothing here sleeps inside libibverbs: a queue is
polled, with short pauses, until a deadline; where pyverbs shows the descriptor of the completion channel (59 and
newer), a queue with events is waited for by ``select`` on it.
"""

from __future__ import annotations

import select
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, ClosedResource, Reason, Unsupported, UsageError
from gdrkit.handles import Handle
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.status import Opcode, Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.verbs._rows import WorkCompletion
    from gdrkit.verbs.nic import Nic

__all__ = ["WORK_ID_MAX", "Completion", "CompletionQueue"]

# The library gives back the 64 bits of a request's id and, for one that failed, nothing that says what it was. So the
# kind of request travels in the upper bits, and callers have the lower ones.
_WORK_ID_BITS = 56
WORK_ID_MAX = (1 << _WORK_ID_BITS) - 1
_KINDS = ("unknown", "rdma_write", "rdma_read", "send", "recv")

_SPIN_S = 50e-6
_PAUSE_S = 50e-6
_PAUSE_MAX_S = 1e-3
_BATCH = 16

_REASONS = {
    Status.RETRY_EXC_ERR: (
        Reason.PEER_GONE,
        "check that the other side still runs and is connected",
    ),
    Status.RNR_RETRY_EXC_ERR: (Reason.TIMEOUT, "have the other side post its receives earlier"),
    Status.WR_FLUSH_ERR: (Reason.CLOSED, "look for the first failed completion of this queue pair: it is the cause"),
    Status.REM_ACCESS_ERR: (Reason.NO_PERMISSION, "check key, bounds and access of the region at the other side"),
    Status.LOC_PROT_ERR: (Reason.NO_PERMISSION, "check key and bounds of the local pieces"),
}


def tagged(work_id: int, kind: str) -> int:
    """The id under which a request goes to the library."""
    if not 0 <= work_id <= WORK_ID_MAX:
        message = f"work_id {work_id} is not a number from 0 to {WORK_ID_MAX}"
        raise UsageError(message)
    return _KINDS.index(kind) << _WORK_ID_BITS | work_id


@dataclass(frozen=True, slots=True)
class Completion:
    """How one work request ended (``ibv_wc``).

    Attributes
    ----------
    work_id : int
        The caller's own.
    status : Status
        How it ended.
    request : str
        What it was: ``rdma_write``, ``rdma_read``, ``send`` or ``recv``.
    opcode : Opcode or None
        What completed; None when it failed, as the library leaves it undefined then.
    length_bytes : int
        How much arrived, for a receive or a read; else undefined.
    immediate : int or None
        32 bits that came with it.
    vendor_error : int
        The device's own number for a failure.
    qp_number : int
        Which queue pair.
    """

    work_id: int
    status: Status
    request: str
    opcode: Opcode | None
    length_bytes: int
    immediate: int | None
    vendor_error: int
    qp_number: int

    def expect(self, status: Status = Status.SUCCESS) -> Self:
        """The completion itself, if it ended so.

        Raises
        ------
        ApiError
            It ended in another way; ``status`` is the number that it has.
        """
        if self.status is status:
            return self
        reason, what_to_do = _REASONS.get(self.status, (Reason.OTHER, ""))
        raise ApiError(
            api=Api.VERBS,
            operation=f"wc {self.request}",
            status=int(self.status),
            status_name=self.status.header_name,
            arguments={"work_id": self.work_id, "qp_number": self.qp_number, "vendor_error": self.vendor_error},
            reason=reason,
            what_to_do=what_to_do,
            detail=f"expected {status.header_name}",
        )


class CompletionQueue:
    """Where completions of queue pairs arrive; made by :meth:`Nic.completion_queue`.

    Several queue pairs may share one; :meth:`wait` for one of them keeps what belongs to the others for them.
    """

    def __init__(self, nic: Nic, *, depth: int, events: bool) -> None:
        self.nic = nic
        self.depth = depth
        self._channel = _pyverbs.create_channel(nic.context) if events else None
        try:
            self._queue = _pyverbs.create_queue(nic.context, depth=depth, channel=self._channel)
        except BaseException:
            if self._channel is not None:
                _pyverbs.close("ibv_destroy_comp_channel", self._channel)
            raise
        self._waiting: deque[Completion] = deque()
        self._closed = False
        self._handle = Handle("verbs.completion_queue")
        self._leave: Callable[[], None] = nic.adopt(self.close)

    @property
    def closed(self) -> bool:
        """Whether it was destroyed."""
        return self._closed

    @property
    def queue(self) -> object:
        """What pyverbs has for it."""
        if self._closed:
            what = "completion queue"
            raise ClosedResource(what)
        return self._queue

    @property
    def event_fd(self) -> int | None:
        """The descriptor of its completion channel; None without events, and with pyverbs before 59, which hides it."""
        return None if self._channel is None else _pyverbs.event_fd(self._channel)

    def poll(self, count: int = _BATCH) -> list[Completion]:
        """Up to `count` completions that are there now, oldest first."""
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        if len(taken) < count:
            taken += [_completion(entry) for entry in _pyverbs.poll(self.queue, count - len(taken))]
        return taken

    def wait(self, timeout_ms: float, *, qp_number: int | None = None) -> Completion:
        """The next completion, of this queue pair or of any.

        Parameters
        ----------
        timeout_ms : float
            How long to wait at most, milliseconds.
        qp_number : int or None
            Whose; those of others stay in the queue, in order.

        Raises
        ------
        ApiError
            TIMEOUT: nothing came.
        """
        end = time.monotonic() + timeout_ms / 1e3
        spin_end, pause_s = time.monotonic() + _SPIN_S, _PAUSE_S
        while True:
            found = self._next(qp_number)
            if found is not None:
                return found
            now = time.monotonic()
            if now >= end:
                raise ApiError(
                    api=Api.VERBS,
                    operation="ibv_poll_cq",
                    status=None,
                    status_name="no completion",
                    arguments={"timeout_ms": timeout_ms, "qp_number": qp_number},
                    reason=Reason.TIMEOUT,
                )
            if now >= spin_end:
                # Other threads run meanwhile; the pause grows, so that a long wait costs little.
                select.select((), (), (), min(pause_s, end - now))
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def request_notification(self, *, solicited_only: bool = False) -> None:
        """Have the next completion make an event (ibv_req_notify_cq)."""
        self._check_events()
        _pyverbs.request_notification(self.queue, solicited_only=solicited_only)

    def take_event(self, timeout_ms: float) -> None:
        """Wait for one event and acknowledge it; poll afterwards.

        With pyverbs before 59 the descriptor is hidden and libibverbs itself waits, without a limit and holding the
        interpreter: call it then only when an event is certain, i.e. after a notification was requested and a later
        completion was seen.

        Raises
        ------
        ApiError
            TIMEOUT: none came.
        """
        self._check_events()
        fd = self.event_fd
        if fd is not None and not select.select((fd,), (), (), timeout_ms / 1e3)[0]:
            raise ApiError(
                api=Api.VERBS,
                operation="ibv_get_cq_event",
                status=None,
                status_name="no event",
                arguments={"timeout_ms": timeout_ms},
                reason=Reason.TIMEOUT,
            )
        _pyverbs.take_event(self._channel, self.queue)

    def close(self) -> None:
        """Destroy it, and its channel; a second close does nothing. Queue pairs that use it are closed before."""
        if self._closed:
            return
        _pyverbs.close("ibv_destroy_cq", self._queue)
        if self._channel is not None:
            _pyverbs.close("ibv_destroy_comp_channel", self._channel)
        self._closed = True
        self._leave()
        self._handle.release()

    def _next(self, qp_number: int | None) -> Completion | None:
        for waiting in self._waiting:
            if qp_number in {None, waiting.qp_number}:
                self._waiting.remove(waiting)
                return waiting
        arrived = [_completion(entry) for entry in _pyverbs.poll(self.queue, _BATCH)]
        self._waiting.extend(arrived)
        if any(qp_number in {None, completion.qp_number} for completion in arrived):
            return self._next(qp_number)
        return None

    def _check_events(self) -> None:
        if self._channel is None:
            raise Unsupported(
                api=Api.VERBS,
                operation="ibv_req_notify_cq",
                status=None,
                status_name="no completion channel",
                reason=Reason.BAD_ARGUMENT,
                what_to_do="make the queue with events=True",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _completion(entry: WorkCompletion) -> Completion:
    status = Status(entry.status)
    kind = entry.work_id >> _WORK_ID_BITS
    return Completion(
        work_id=entry.work_id & WORK_ID_MAX,
        status=status,
        request=_KINDS[kind] if kind < len(_KINDS) else _KINDS[0],
        opcode=Opcode(entry.opcode) if status is Status.SUCCESS else None,
        length_bytes=entry.length_bytes,
        immediate=entry.immediate if status is Status.SUCCESS else None,
        vendor_error=entry.vendor_error,
        qp_number=entry.qp_number,
    )
