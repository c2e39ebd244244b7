"""Handling of inherited locks and objects in a forked child.

A fork copies a lock in its current state. If another thread of the parent holds the lock then, the child does not have
that thread, and would wait for ever. Objects that are registered here are notified in the child before any other Python
code runs.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ForkAware", "ForkSafeLock", "register"]


class ForkAware(Protocol):
    """An object that a forked child inherits as a copy."""

    def after_fork_in_child(self) -> None:
        """Make the copy usable, or make it refuse all calls. No other thread exists at this time."""


_registered: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register(instance: ForkAware) -> None:
    """Call :meth:`ForkAware.after_fork_in_child` of an object in every forked child, as long as the object lives."""
    _registered.add(instance)


class ForkSafeLock:
    """A lock that is free in a forked child.

    It may protect only data that is consistent after every statement that runs with the lock held.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        register(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock, because a thread of the parent may hold it."""
        self._lock = threading.Lock()

    def locked(self) -> bool:
        """Return whether a thread holds the lock now."""
        return self._lock.locked()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _after_fork_in_child() -> None:
    for instance in list(_registered):
        instance.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
