"""Two queue pairs of this process, connected to each other: both ends of a contract in one place."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import ApiError
from gdrkit.verbs import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import CompletionQueue, Nic, QueuePair

__all__ = ["ALL_ACCESS", "WAIT_MS", "connected", "refused", "unready"]

ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
# Long, since software in a kernel in software is slow; only a case that fails waits for it.
WAIT_MS = 20_000.0


@contextlib.contextmanager
def connected(
    nic: Nic, *, limits: dict[str, int] | None = None, access: Access = ALL_ACCESS, **options: int
) -> Iterator[tuple[QueuePair, QueuePair]]:
    """Ours and theirs, each with a completion queue of its own; `options` are those of ``QueuePair.connect``, `access`
    is what theirs allows.
    """
    with unready(nic, limits=limits) as ours, unready(nic, limits=limits) as theirs:
        ours.connect(theirs.endpoint(), access=ALL_ACCESS, **options)
        theirs.connect(ours.endpoint(), access=access, **options)
        yield ours, theirs


@contextlib.contextmanager
def unready(
    nic: Nic, *, limits: dict[str, int] | None = None, queue: CompletionQueue | None = None
) -> Iterator[QueuePair]:
    """A queue pair in the state RESET."""
    with contextlib.ExitStack() as stack:
        chosen = queue or stack.enter_context(nic.completion_queue())
        yield stack.enter_context(nic.queue_pair(chosen, chosen, **(limits or {})))


@contextlib.contextmanager
def refused(*numbers: int) -> Iterator[None]:
    """The library refuses what is in the block with one of these errnos."""
    with pytest.raises(ApiError) as raised:
        yield
    assert raised.value.errno in numbers, raised.value
