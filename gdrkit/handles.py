"""Counts of open objects, the order of their release, and the base classes of objects that must be closed.

Every object that holds a resource of a driver or of the kernel registers itself here by its type, so that a test can
check that no object is left open. No resource is freed just because its object was dropped: a leak is better than a key
that still allows access to memory that now belongs to other code.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Self

from gdrkit.errors import ClosedResource, GdrkitWarning

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Closeable", "Handle", "ReleaseStack", "Resource", "live"]

# The kind of every open object, by its number. There is no lock, for two reasons: the garbage collector may run a
# finalizer inside any allocation of this file, and a fork copies a lock that another thread holds. A single operation
# on a dict with integer keys is atomic.
_live: dict[int, str] = {}
_numbers = itertools.count()


def live() -> dict[str, int]:
    """Return the number of open objects of each kind. Kinds without open objects are left out.

    An object that was dropped without being closed is still counted, because its resource is still held.
    """
    while True:
        try:
            kinds = tuple(_live.values())
        except RuntimeError:
            # A finalizer that ran inside this call released a handle, which changed the dict. Each handle does so only
            # once.
            continue
        return dict(sorted(Counter(kinds).items()))


class Handle:
    """The registration of one open object.

    Parameters
    ----------
    kind : str
        Kind of the object, such as ``verbs.region``.
    """

    __slots__ = ("_number", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._number = next(_numbers)
        _live[self._number] = kind

    def release(self) -> None:
        """Record that the object was closed. A second call does nothing. Finalizers may call this method."""
        _live.pop(self._number, None)

    def __del__(self) -> None:
        if getattr(self, "_number", None) in _live:
            warnings.warn(f"a {self.kind} was never closed", GdrkitWarning, stacklevel=2)


class ReleaseStack:
    """Actions that must succeed before their owner is released. They run in the reverse order of their addition.

    Actions are, for example, to close the children of an object, to deregister the regions of some memory, or to undo
    the steps of a half-built object. A failed action stays on the stack, so that releasing the owner again repeats it.
    """

    __slots__ = ("_actions",)

    def __init__(self) -> None:
        # A dict keeps the order, and removing from it is fast even with ten thousand actions.
        self._actions: dict[_Action, None] = {}

    def __len__(self) -> int:
        return len(self._actions)

    def push(self, action: Callable[[], None]) -> Callable[[], None]:
        """Add an action. Return a function that removes it, and does nothing if the action has run."""
        entry = _Action(action)
        self._actions[entry] = None

        def remove() -> None:
            # The entry is found by identity, because the same bound method may have been pushed twice.
            self._actions.pop(entry, None)

        return remove

    def run(self) -> None:
        """Run all actions, last added first. A failed action does not stop the others.

        Raises
        ------
        BaseException
            The first failure, with the later ones as notes. The failed actions are still on the stack.
        """
        first: BaseException | None = None
        for entry in reversed(tuple(self._actions)):
            if entry not in self._actions:
                continue  # An earlier action has removed it.
            try:
                entry.action()
            except BaseException as error:  # noqa: BLE001 - raised below, after the other actions.
                if first is None:
                    first = error
                else:
                    first.add_note(f"then also: {error}")
            else:
                self._actions.pop(entry, None)
        if first is not None:
            raise first

    def run_after(self, error: BaseException) -> None:
        """Run all actions because `error` is being raised. A failure becomes a note of `error`."""
        try:
            self.run()
        except Exception as second:  # noqa: BLE001 - the caller is about to raise `error`, which carries this one.
            error.add_note(f"then, while undoing: {second}")


class _Action:
    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action


class Closeable(ABC):
    """Base of objects that are closed at the end of their ``with`` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release everything that the object holds. A second close does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Resource(Closeable):
    """Base of objects that hold one resource of a driver, such as a memory region or a stream.

    The object is counted while it is open. When its owner, such as a device, is closed, the owner closes it.

    Parameters
    ----------
    kind : str
        Kind of the object for :func:`live`, such as ``verbs.region``.
    name : str
        Name of the object for the error of a use after its close, such as ``memory region``.
    on_close : callable
        The method of the owner that adds an action to run before the owner is closed. It returns a function that
        removes the action.
    """

    def __init__(
        self, kind: str, *, name: str, on_close: Callable[[Callable[[], None]], Callable[[], None]] | None = None
    ) -> None:
        self._name = name
        self._closed = False
        self._handle = Handle(kind)
        self._remove_from_owner = None if on_close is None else on_close(self.close)

    @property
    def closed(self) -> bool:
        """Whether the object was closed."""
        return self._closed

    def close(self) -> None:
        """Release the resource. A second close does nothing.

        Raises
        ------
        Exception
            The release failed. The object stays open, and another close tries again.
        """
        if self._closed:
            return
        self._release()
        self._closed = True
        if self._remove_from_owner is not None:
            self._remove_from_owner()
        self._handle.release()

    @abstractmethod
    def _release(self) -> None:
        """Call the driver to release the resource."""

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedResource(self._name)
