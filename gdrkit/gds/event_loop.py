"""Waits of the coroutines of an event loop for jobs. No thread waits: one descriptor wakes the loop for all of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING, Any

from gdrkit.gds._native import native

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopWaits", "loop_waits"]


class LoopWaits:
    """The jobs that the coroutines of one event loop await.

    The jobs that end while the loop runs other code are taken in one batch.

    Attributes
    ----------
    loop : AbstractEventLoop
        The event loop, whose thread calls the methods.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queue = native.CompletionQueue(has_event=True)
        self._tokens = itertools.count()
        self._futures: dict[int, asyncio.Future[None]] = {}

    def wait_for(self, notify: Callable[[Any, int], None]) -> asyncio.Future[None]:
        """Return a future that is done when a job is over. `notify` is the method of the job."""
        if not self._futures:
            self.loop.add_reader(self._queue.fileno(), self._take)
        token = next(self._tokens)
        future = self._futures[token] = self.loop.create_future()
        notify(self._queue, token)
        return future

    def _take(self) -> None:
        """Complete the futures of the jobs that ended. Without further futures, the descriptor is closed."""
        for token in self._queue.take():
            future = self._futures.pop(token)
            if not future.done():  # The coroutine of a future that is done was cancelled.
                future.set_result(None)
        if not self._futures:
            self.loop.remove_reader(self._queue.fileno())
            if getattr(_current, "waits", None) is self:
                del _current.waits


# The waits of the event loop that runs in this thread.
_current = threading.local()


def loop_waits() -> LoopWaits:
    """Return the waits of the running event loop."""
    loop = asyncio.get_running_loop()
    waits: LoopWaits | None = getattr(_current, "waits", None)
    if waits is None or waits.loop is not loop:
        waits = _current.waits = LoopWaits(loop)
    return waits
