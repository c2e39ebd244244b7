"""A forked child process, and a lock that another thread of the parent holds during the fork."""

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


def lock_of(owner: Any) -> AbstractContextManager[object]:  # noqa: ANN401 - a module, or an object of any class.
    """Return the lock of an object or a module of gdrkit, which another thread holds during the fork."""
    lock: AbstractContextManager[object] = owner._lock  # noqa: SLF001 - no public call holds the lock long enough.
    return lock


@contextlib.contextmanager
def held_by_another_thread(lock: AbstractContextManager[object]) -> Iterator[None]:
    """Let another thread hold the lock inside the block."""
    is_held, may_release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_held.wait(30)
        yield
    finally:
        may_release.set()
        thread.join(30)


def wait_status_of_child(work: Callable[[], None]) -> int:
    """Fork, run `work` in the child, and return its wait status. SIGALRM ends a child that takes too long."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            work()
        except BaseException:  # noqa: BLE001 - the child never returns into the run of the parent.
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]
