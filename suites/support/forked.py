"""Functions for cases about forks: run a function in a forked child, and hold a lock in another thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


def get_lock(owner: Any) -> AbstractContextManager[object]:  # noqa: ANN401 - a module, or an object of any class.
    """Return the private lock of an object or a module of gdrkit."""
    lock: AbstractContextManager[object] = owner._lock  # noqa: SLF001 - no public call holds the lock long enough.
    return lock


@contextlib.contextmanager
def hold_in_another_thread(lock: AbstractContextManager[object]) -> Iterator[None]:
    """Hold the lock in another thread until the block ends."""
    is_held, may_release = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with lock:
            is_held.set()
            may_release.wait(60)

    thread = threading.Thread(target=hold_lock)
    thread.start()
    try:
        assert is_held.wait(30)
        yield
    finally:
        may_release.set()
        thread.join(30)


def run_in_forked_child(function: Callable[[], None]) -> int:
    """Fork, run `function` in the child, and return the child's wait status. SIGALRM ends the child after 10 s."""
    child_pid = os.fork()
    if not child_pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            function()
        except BaseException:  # noqa: BLE001 - the child must not continue the parent's test run.
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child_pid, 0)[1]
