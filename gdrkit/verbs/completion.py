"""Completion queues, and waiting for completions without blocking other threads.

pyverbs holds the GIL in every call, so a call of libibverbs that sleeps would stop all threads. So
:meth:`CompletionQueue.wait` polls the queue until a deadline, with short pauses in which other threads run. pyverbs 59
and newer expose the descriptor of the completion channel, so that poll(2) can wait for an event without the GIL.
"""

from __future__ import annotations

import select
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, Reason, Unsupported, UsageError
from gdrkit.handles import Resource
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.status import CompletionOpcode, Status

if TYPE_CHECKING:
    from gdrkit.verbs._structures import WorkCompletion
    from gdrkit.verbs.context import NicContext

__all__ = ["WORK_ID_MAX", "Completion", "CompletionQueue"]

# A completion has the 64-bit id of its request. In the completion of a failed request, the opcode is undefined. So
# gdrkit stores the type of the request in the upper 8 bits of the id, and callers use the lower 56 bits.
_WORK_ID_BITS = 56
WORK_ID_MAX = (1 << _WORK_ID_BITS) - 1
_REQUEST_TYPES = ("unknown", "rdma_write", "rdma_read", "send", "recv")

_SPIN_S = 50e-6  # The time for which a wait polls without pauses.
_PAUSE_S = 50e-6  # The first pause between two polls.
_PAUSE_MAX_S = 1e-3
_COMPLETIONS_PER_POLL_MAX = 16

_REASON_AND_ADVICE_BY_STATUS = {
    Status.RETRY_EXC_ERR: (
        Reason.PEER_GONE,
        "check that the other side still runs and is connected",
    ),
    Status.RNR_RETRY_EXC_ERR: (Reason.TIMEOUT, "have the other side post its receives earlier"),
    Status.WR_FLUSH_ERR: (Reason.CLOSED, "look for the first failed completion of this queue pair, which is the cause"),
    Status.REM_ACCESS_ERR: (
        Reason.NO_PERMISSION,
        "check the key, the bounds and the access of the region on the other side",
    ),
    Status.LOC_PROT_ERR: (Reason.NO_PERMISSION, "check the key and the bounds of the local scatter/gather elements"),
}


def encode_work_id(work_id: int, request_type: str) -> int:
    """Return the id of a request for libibverbs: the id of the caller, with the type in the upper bits."""
    if not 0 <= work_id <= WORK_ID_MAX:
        message = f"work_id must be from 0 to {WORK_ID_MAX}, not {work_id}"
        raise UsageError(message)
    return _REQUEST_TYPES.index(request_type) << _WORK_ID_BITS | work_id


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one work request (``ibv_wc``).

    Attributes
    ----------
    work_id : int
        The id that the caller passed.
    status : Status
        The completion status.
    request : str
        The type of the request: ``rdma_write``, ``rdma_read``, ``send`` or ``recv``.
    opcode : CompletionOpcode or None
        The completed operation. None for a failed request, because libibverbs leaves it undefined.
    length_bytes : int
        Number of bytes that arrived, for a receive or a read. Otherwise it is undefined.
    immediate : int or None
        The 32-bit immediate of the request, if it had one.
    vendor_error : int
        The vendor's error code of a failure.
    qp_number : int
        Number of the queue pair.
    """

    work_id: int
    status: Status
    request: str
    opcode: CompletionOpcode | None
    length_bytes: int
    immediate: int | None
    vendor_error: int
    qp_number: int

    def expect(self, status: Status = Status.SUCCESS) -> Self:
        """Return this completion if it has the expected status.

        Raises
        ------
        ApiError
            The completion has another status. ``status`` of the error is its number.
        """
        if self.status is status:
            return self
        reason, what_to_do = _REASON_AND_ADVICE_BY_STATUS.get(self.status, (Reason.OTHER, ""))
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


class CompletionQueue(Resource):
    """A queue of completions of one or more queue pairs; made by :meth:`Nic.completion_queue`.

    If several queue pairs share a queue, :meth:`wait` for one of them keeps the completions of the others.
    """

    def __init__(self, nic: NicContext, *, depth: int, events: bool) -> None:
        self.nic = nic
        self.depth = depth
        self._channel = _pyverbs.create_channel(nic.context) if events else None
        try:
            self._queue = _pyverbs.create_completion_queue(nic.context, depth=depth, channel=self._channel)
        except BaseException:
            if self._channel is not None:
                _pyverbs.close("ibv_destroy_comp_channel", self._channel)
            raise
        self._undelivered_completions: deque[Completion] = deque()  # Completions that no caller has received yet.
        super().__init__("verbs.completion_queue", name="completion queue", on_close=nic.on_close)

    @property
    def queue(self) -> object:
        """The ``CQ`` object of pyverbs."""
        self._check_open()
        return self._queue

    @property
    def event_fd(self) -> int | None:
        """The descriptor of the completion channel. None without events, or if pyverbs is older than 59."""
        return None if self._channel is None else _pyverbs.event_fd(self._channel)

    def poll(self, count: int = _COMPLETIONS_PER_POLL_MAX) -> list[Completion]:
        """Return up to `count` completions that are available now, oldest first."""
        completions = [
            self._undelivered_completions.popleft() for _ in range(min(count, len(self._undelivered_completions)))
        ]
        if len(completions) < count:
            completions += [
                _parse_completion(entry) for entry in _pyverbs.poll_completions(self.queue, count - len(completions))
            ]
        return completions

    def wait(self, timeout_ms: float, *, qp_number: int | None = None) -> Completion:
        """Wait for the next completion of one queue pair, or of any queue pair, and return it.

        Parameters
        ----------
        timeout_ms : float
            Longest wait, in milliseconds.
        qp_number : int or None
            Wait only for completions of this queue pair. Completions of other queue pairs stay in the queue, in order.

        Raises
        ------
        ApiError
            TIMEOUT: there was no completion in time.
        """
        deadline_s = time.monotonic() + timeout_ms / 1e3
        spin_end_s, pause_s = time.monotonic() + _SPIN_S, _PAUSE_S
        while True:
            completion = self._take_next(qp_number)
            if completion is not None:
                return completion
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise ApiError(
                    api=Api.VERBS,
                    operation="ibv_poll_cq",
                    status=None,
                    status_name="no completion",
                    arguments={"timeout_ms": timeout_ms, "qp_number": qp_number},
                    reason=Reason.TIMEOUT,
                )
            if now_s >= spin_end_s:
                # Other threads run during the pause. The pause doubles up to a limit, so that a long wait costs little.
                select.select((), (), (), min(pause_s, deadline_s - now_s))
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def request_notification(self, *, solicited_only: bool = False) -> None:
        """Request an event for the next completion (ibv_req_notify_cq)."""
        self._require_events()
        _pyverbs.request_notification(self.queue, solicited_only=solicited_only)

    def take_event(self, timeout_ms: float) -> None:
        """Wait for one event and acknowledge it. The caller polls afterwards.

        pyverbs before 59 hides the descriptor. With such a pyverbs, libibverbs itself waits, without a limit, while
        this thread holds the GIL. In that case, call this method only if an event is certain: a notification was
        requested, and a completion that came later was polled.

        Raises
        ------
        ApiError
            TIMEOUT: there was no event in time.
        """
        self._require_events()
        fd = self.event_fd
        if fd is not None and not _is_readable(fd, timeout_ms):
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
        """Destroy the queue and its channel. A second close does nothing.

        The queue pairs that use the queue must be closed first.
        """
        super().close()

    def _release(self) -> None:
        _pyverbs.close("ibv_destroy_cq", self._queue)
        if self._channel is not None:
            _pyverbs.close("ibv_destroy_comp_channel", self._channel)

    def _take_next(self, qp_number: int | None) -> Completion | None:
        """Return the oldest completion of one queue pair, or of any queue pair if `qp_number` is None.

        Return None if no completion has arrived.
        """
        for completion in self._undelivered_completions:
            if qp_number in {None, completion.qp_number}:
                self._undelivered_completions.remove(completion)
                return completion
        new_completions = [
            _parse_completion(entry) for entry in _pyverbs.poll_completions(self.queue, _COMPLETIONS_PER_POLL_MAX)
        ]
        self._undelivered_completions.extend(new_completions)
        if any(qp_number in {None, completion.qp_number} for completion in new_completions):
            return self._take_next(qp_number)
        return None

    def _require_events(self) -> None:
        if self._channel is None:
            raise Unsupported(
                api=Api.VERBS,
                operation="ibv_req_notify_cq",
                status=None,
                status_name="no completion channel",
                reason=Reason.BAD_ARGUMENT,
                what_to_do="create the queue with events=True",
            )


def _parse_completion(entry: WorkCompletion) -> Completion:
    status = Status(entry.status)
    type_index = entry.work_id >> _WORK_ID_BITS
    return Completion(
        work_id=entry.work_id & WORK_ID_MAX,
        status=status,
        request=_REQUEST_TYPES[type_index] if type_index < len(_REQUEST_TYPES) else _REQUEST_TYPES[0],
        opcode=CompletionOpcode(entry.opcode) if status is Status.SUCCESS else None,
        length_bytes=entry.length_bytes,
        immediate=entry.immediate if status is Status.SUCCESS else None,
        vendor_error=entry.vendor_error,
        qp_number=entry.qp_number,
    )


def _is_readable(fd: int, timeout_ms: float) -> bool:
    """Wait until a descriptor is readable. Return False if the timeout expires first."""
    # The function uses poll(2), because select(2) fails for descriptors from 1024 on.
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))
