"""Two connected queue pairs of one process, so that a case has both ends of a transfer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import ApiError
from gdrkit.verbs import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import CompletionQueue, Nic, QueuePair

__all__ = ["ALL_ACCESS", "WAIT_MS", "connected", "refused", "unconnected"]

ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
# Soft-RoCE in an emulated guest is slow. Only a case that fails waits this long.
WAIT_MS = 20_000.0


@contextlib.contextmanager
def connected(
    nic: Nic, *, limits: dict[str, int] | None = None, access: Access = ALL_ACCESS, **options: int
) -> Iterator[tuple[QueuePair, QueuePair]]:
    """Yield the local and the remote queue pair, each with its own completion queue.

    Parameters
    ----------
    nic : Nic
        The NIC of both.
    limits : dict of str to int, optional
        Limits of both queue pairs, as for :meth:`unconnected`.
    access : Access
        The access that the remote queue pair allows.
    options : int
        Further options of ``QueuePair.connect``.
    """
    with unconnected(nic, limits=limits) as ours, unconnected(nic, limits=limits) as theirs:
        ours.connect(theirs.endpoint(), access=ALL_ACCESS, **options)
        theirs.connect(ours.endpoint(), access=access, **options)
        yield ours, theirs


@contextlib.contextmanager
def unconnected(
    nic: Nic, *, limits: dict[str, int] | None = None, queue: CompletionQueue | None = None
) -> Iterator[QueuePair]:
    """Yield a queue pair in the state RESET, which uses `queue` or a new completion queue."""
    with contextlib.ExitStack() as stack:
        chosen = queue or stack.enter_context(nic.completion_queue())
        yield stack.enter_context(nic.queue_pair(chosen, chosen, **(limits or {})))


@contextlib.contextmanager
def refused(*numbers: int) -> Iterator[None]:
    """Require that the block raises an ApiError with one of these errnos."""
    with pytest.raises(ApiError) as raised:
        yield
    assert raised.value.errno in numbers, raised.value
