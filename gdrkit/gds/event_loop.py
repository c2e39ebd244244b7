"""Waits of asyncio coroutines for jobs. One descriptor wakes the event loop for all jobs, so that no thread waits."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from gdrkit.gds._native import call, native

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopWaits", "loop_waits"]


class LoopWaits:
    """The jobs that the coroutines of one event loop await. The loop calls the methods.

    The jobs that end while the loop runs other code are taken in one batch.

    Raises
    ------
    ApiError
        EMFILE or ENFILE: no descriptor is left for the event loop.
    """

    def __init__(self) -> None:
        self._queue = call(native.CompletionQueue, has_event=True)
        self._tokens = itertools.count()
        self._futures: dict[int, asyncio.Future[None]] = {}

    def wait_for(self, notify: Callable[[Any, int], None]) -> asyncio.Future[None]:
        """Return a future that is done when a job is over, or earlier. `notify` is the method of the job."""
        # An interrupt between two of these steps must not leave a future that nothing completes.
        loop = asyncio.get_running_loop()
        token, future = next(self._tokens), loop.create_future()
        notify(self._queue, token)
        if not self._futures:
            loop.add_reader(self._queue.fileno(), self._complete_futures)
        self._futures[token] = future
        return future

    def _complete_futures(self) -> None:
        """Complete the futures of the jobs that ended. Without further futures, the descriptor is closed."""
        try:
            for token in self._queue.take():
                self._complete_future(token)
        except BaseException:
            # A signal handler raised an exception, so tokens may be lost. Each coroutine checks its job again.
            for token in tuple(self._futures):
                self._complete_future(token)
            raise
        if not self._futures:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._queue.fileno())
            vars(loop).pop(_WAITS_ATTRIBUTE, None)

    def _complete_future(self, token: int) -> None:
        future = self._futures.pop(token, None)
        # The coroutine of a future that is done was cancelled.
        if future is not None and not future.done():
            future.set_result(None)


# The attribute of an event loop that has its waits. A stopped loop keeps their descriptor as long as it exists.
_WAITS_ATTRIBUTE = "_gdrkit_waits"


def loop_waits() -> LoopWaits:
    """Return the waits of the running event loop."""
    attributes = vars(asyncio.get_running_loop())
    waits: LoopWaits | None = attributes.get(_WAITS_ATTRIBUTE)
    if waits is None:
        waits = attributes[_WAITS_ATTRIBUTE] = LoopWaits()
    return waits
