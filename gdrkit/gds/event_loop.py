"""Support of asyncio: coroutines can await the jobs (asynchronous transfers) of gdrkit.gds.

One descriptor wakes an event loop for all jobs, so that no thread waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from gdrkit.gds._native import call_native, native

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopWaits", "loop_waits"]


class LoopWaits:
    """The jobs that the coroutines of one event loop await. Only the thread of that loop may call the methods.

    If several jobs end while the loop runs other code, one callback of the loop completes the futures of all of them.

    Raises
    ------
    ApiError
        EMFILE or ENFILE: no descriptor is left for the event loop.
    """

    def __init__(self) -> None:
        self._queue = call_native(native.CompletionQueue, has_event=True)
        self._tokens = itertools.count()
        self._futures: dict[int, asyncio.Future[None]] = {}

    def wait_for(self, notify: Callable[[Any, int], None]) -> asyncio.Future[None]:
        """Return a future that completes when a job ends, or earlier. The caller must therefore check the job.

        `notify` is the method :meth:`~gdrkit.gds.transfer.TransferJob.notify` of the job.
        """
        # The future is stored last, so that an interrupt in this method leaves no future in the dict that would never
        # complete.
        loop = asyncio.get_running_loop()
        token, future = next(self._tokens), loop.create_future()
        notify(self._queue, token)
        if not self._futures:
            loop.add_reader(self._queue.fileno(), self._complete_futures)
        self._futures[token] = future
        return future

    def _complete_futures(self) -> None:
        """Complete the futures of the jobs that ended. If no future is left, remove the descriptor from the loop."""
        try:
            for token in self._queue.take():
                self._complete_future(token)
        except BaseException:
            # A signal handler raised an exception, so tokens may be lost. All futures are completed, and each coroutine
            # checks its job again.
            for token in tuple(self._futures):
                self._complete_future(token)
            raise
        if not self._futures:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._queue.fileno())
            vars(loop).pop(_WAITS_ATTRIBUTE, None)

    def _complete_future(self, token: int) -> None:
        future = self._futures.pop(token, None)
        # If the future is done already, its coroutine was cancelled.
        if future is not None and not future.done():
            future.set_result(None)


# Name of the attribute of an event loop that holds its LoopWaits. If the loop stops before the jobs end, the descriptor
# stays open until the loop is freed.
_WAITS_ATTRIBUTE = "_gdrkit_waits"


def loop_waits() -> LoopWaits:
    """Return the LoopWaits of the running event loop."""
    attributes = vars(asyncio.get_running_loop())
    waits: LoopWaits | None = attributes.get(_WAITS_ATTRIBUTE)
    if waits is None:
        waits = attributes[_WAITS_ATTRIBUTE] = LoopWaits()
    return waits
