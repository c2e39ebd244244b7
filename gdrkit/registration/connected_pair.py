"""Two connected queue pairs of this process: one accesses memory that is registered with the NIC of the other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from gdrkit import pattern

if TYPE_CHECKING:
    from gdrkit.verbs import Completion, Nic, QueuePair, RemoteRange

__all__ = ["ConnectedPair"]

_COMPLETION_TIMEOUT_MS = 2000.0
_RETRY_COUNT = 3


class ConnectedPair:
    """Two connected queue pairs, one of which posts requests, and registered host memory for the bytes of the requests.

    Use it as a context manager.

    Parameters
    ----------
    responder : Nic
        The NIC that executes the requests. The memory that the requests access is registered with this NIC.
    requester : Nic or None
        The NIC that posts the requests. With None, the responder also posts them, and the bytes stay inside one NIC
        (loopback).
    length_bytes : int
        Size of the host memory in bytes.

    Attributes
    ----------
    data : bytearray
        The host memory: the source of :meth:`write` and the destination of :meth:`read`.
    """

    def __init__(self, responder: Nic, requester: Nic | None = None, *, length_bytes: int) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:
            requester = responder if requester is None else requester
            self._requester_pair, responder_pair = (
                self._create_queue_pair(stack, nic) for nic in (requester, responder)
            )
            # Two NICs of one host may be on separate networks. With few retries, a request between them fails soon.
            self._requester_pair.connect(responder_pair.endpoint(), retry_count=_RETRY_COUNT)
            responder_pair.connect(self._requester_pair.endpoint(), retry_count=_RETRY_COUNT)
            self.data = bytearray(length_bytes)
            self._region = stack.enter_context(requester.register_host(self.data))
            self._stack = stack.pop_all()

    @staticmethod
    def _create_queue_pair(stack: ExitStack, nic: Nic) -> QueuePair:
        return stack.enter_context(nic.queue_pair(stack.enter_context(nic.completion_queue(depth=16))))

    def write(self, remote: RemoteRange) -> Completion:
        """Write :attr:`data` to `remote`, wait for the completion and return it."""
        self._requester_pair.post_write(self._region, remote, work_id=1)
        return self._requester_pair.wait(_COMPLETION_TIMEOUT_MS)

    def read(self, remote: RemoteRange) -> Completion:
        """Read from `remote` into :attr:`data`, wait for the completion and return it."""
        self._requester_pair.post_read(self._region, remote, work_id=2)
        return self._requester_pair.wait(_COMPLETION_TIMEOUT_MS)

    def fill(self, seed: int) -> None:
        """Fill :attr:`data` with the pattern of `seed`."""
        memoryview(self.data)[:] = pattern.payload(len(self.data), seed=seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
