"""Notification of objects in a forked child process, and a lock that is usable there.

A fork copies each lock in its current state, but only one of the threads: the thread that called fork. If another
thread held the lock, no thread of the child can release it, and the child would wait forever. So :func:`register`
accepts objects that repair themselves in the child: they are notified there before any other Python code runs.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["ForkAware", "ForkSafeLock", "register"]


class ForkAware(Protocol):
    """An object that a forked child inherits as a copy."""

    def after_fork_in_child(self) -> None:
        """Make the inherited copy usable, or make it refuse all calls. No other thread exists at this time."""


_fork_aware_objects: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register(instance: ForkAware) -> None:
    """Call :meth:`ForkAware.after_fork_in_child` of an object in every forked child, as long as the object lives."""
    _fork_aware_objects.add(instance)


class ForkSafeLock:
    """A lock that is free in a forked child.

    Another thread may fork between any two statements that run with the lock held. So the data that the lock protects
    must be consistent after each of these statements.

    Parameters
    ----------
    reentrant : bool
        Whether the thread that holds the lock may acquire it again, for example in a signal handler or a finalizer.
    """

    __slots__ = ("__weakref__", "_lock", "_make_lock")

    def __init__(self, *, reentrant: bool = False) -> None:
        self._make_lock: Callable[[], Any] = threading.RLock if reentrant else threading.Lock
        self._lock = self._make_lock()
        register(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock, because a thread of the parent may have held it during the fork."""
        self._lock = self._make_lock()

    def locked(self) -> bool:
        """Return whether the lock is held now; for a reentrant lock, whether another thread holds it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return False
        return True

    if TYPE_CHECKING:

        def __enter__(self) -> bool: ...

        def __exit__(
            self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

    else:
        # A `with` block directly calls the methods of the inner lock, which are C functions. In a Python method, a
        # KeyboardInterrupt could be raised after the lock was acquired and before the block begins. Then nothing would
        # release the lock.
        __enter__ = property(operator.attrgetter("_lock.__enter__"))
        __exit__ = property(operator.attrgetter("_lock.__exit__"))


def _notify_objects_in_child() -> None:
    # The stack calls all callbacks, even if one raises an error.
    with contextlib.ExitStack() as stack:
        for instance in list(_fork_aware_objects):
            stack.callback(instance.after_fork_in_child)


os.register_at_fork(after_in_child=_notify_objects_in_child)
