"""Two connected queue pairs of one process: the requester posts the requests, and the responder is its peer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import ApiError
from gdrkit.verbs import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import CompletionQueue, Nic, QueuePair

__all__ = ["READ_WRITE_ACCESS", "WAIT_MS", "connect_queue_pairs", "create_queue_pair", "require_errno"]

# The access that SEND, RDMA WRITE and RDMA READ need. Atomic operations are not allowed.
READ_WRITE_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
# Time limit of the wait for one completion. It is long, because Soft-RoCE in an emulated guest is slow.
WAIT_MS = 20_000.0


@contextlib.contextmanager
def connect_queue_pairs(
    nic: Nic, *, limits: dict[str, int] | None = None, responder_access: Access = READ_WRITE_ACCESS, **options: int
) -> Iterator[tuple[QueuePair, QueuePair]]:
    """Yield the requester and the responder. Each of these queue pairs has a separate completion queue.

    Parameters
    ----------
    nic : Nic
        The NIC of both queue pairs.
    limits : dict of str to int, optional
        Limits of both queue pairs, as for :func:`create_queue_pair`.
    responder_access : Access
        The access that the responder allows. The requester allows READ_WRITE_ACCESS.
    options : int
        Further options of ``QueuePair.connect``.
    """
    with create_queue_pair(nic, limits=limits) as requester, create_queue_pair(nic, limits=limits) as responder:
        requester.connect(responder.endpoint(), access=READ_WRITE_ACCESS, **options)
        responder.connect(requester.endpoint(), access=responder_access, **options)
        yield requester, responder


@contextlib.contextmanager
def create_queue_pair(
    nic: Nic, *, limits: dict[str, int] | None = None, completion_queue: CompletionQueue | None = None
) -> Iterator[QueuePair]:
    """Yield a queue pair in the state RESET.

    If `completion_queue` is None, the queue pair gets a new one. `limits` are arguments of ``Nic.queue_pair``.
    """
    with contextlib.ExitStack() as stack:
        completion_queue = completion_queue or stack.enter_context(nic.completion_queue())
        yield stack.enter_context(nic.queue_pair(completion_queue, completion_queue, **(limits or {})))


@contextlib.contextmanager
def require_errno(*error_numbers: int) -> Iterator[None]:
    """Require that the block raises an ApiError with one of these errnos."""
    with pytest.raises(ApiError) as error_info:
        yield
    assert error_info.value.errno in error_numbers, error_info.value
