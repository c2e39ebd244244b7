"""What a forked child does with the locks and objects that it inherits.

A fork copies a lock as it is. When another thread of the parent holds it then, the child lacks that thread and
would wait for ever. An object that is registered here is told so in the child, before any other code of it runs.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ForkSafeLock", "Inherited", "register"]


class Inherited(Protocol):
    """An object that a forked child gets a copy of."""

    def after_fork_in_child(self) -> None:
        """Make the copy usable, or have it refuse everything. No other thread exists."""


_registered: weakref.WeakSet[Inherited] = weakref.WeakSet()


def register(thing: Inherited) -> None:
    """Have :meth:`Inherited.after_fork_in_child` called in every forked child, as long as the object lives."""
    _registered.add(thing)


class ForkSafeLock:
    """A lock that is free in a forked child; for data that every single statement of its holders leaves whole."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        register(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock, since a thread of the parent may hold it."""
        self._lock = threading.Lock()

    def locked(self) -> bool:
        """Return whether a thread holds it now."""
        return self._lock.locked()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _after_fork_in_child() -> None:
    for thing in list(_registered):
        thing.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
