"""Base classes of objects that must be closed, a count of the open objects, and stacks of release actions.

Every object that holds a resource of a driver or of the kernel is counted here by its kind, so that a test can check
that no object is left open.

An object that is garbage-collected without being closed does not free its resource. A NIC may still access the memory
of such a resource, and after a free, this memory could belong to other code. A leak does less harm than that.
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

__all__ = ["Closeable", "Handle", "ReleaseStack", "Resource", "live", "live_bytes"]

# The kind and the size of every open object. The key is the id of its handle. No lock protects the dict, because a
# single operation on a dict with integer keys is atomic. A lock could deadlock: the garbage collector may run a
# finalizer, which needs the lock, inside any allocation of this file. A fork could also copy the lock while another
# thread holds it.
_open_objects: dict[int, tuple[str, int]] = {}
_handle_ids = itertools.count()


def live() -> dict[str, int]:
    """Return the number of open objects of each kind. Kinds without open objects are left out.

    An object that was dropped without being closed is still counted, because its resource is still held.
    """
    return dict(sorted(Counter(kind for kind, _size_bytes in _list_open_objects()).items()))


def live_bytes() -> dict[str, int]:
    """Return the total size of the open objects of each kind that has a size, in bytes, such as memory regions."""
    totals = Counter[str]()
    for kind, size_bytes in _list_open_objects():
        if size_bytes:
            totals[kind] += size_bytes
    return dict(sorted(totals.items()))


def _list_open_objects() -> tuple[tuple[str, int], ...]:
    while True:
        try:
            return tuple(_open_objects.values())
        except RuntimeError:
            # A finalizer released a handle during the iteration, which changed the dict. Try again. The number of
            # retries is limited, because each handle is released only once.
            continue


class Handle:
    """The entry of one open object in the count of :func:`live`.

    Parameters
    ----------
    kind : str
        Kind of the object, such as ``verbs.region``.
    size_bytes : int
        Size of the memory that the object stands for, for :func:`live_bytes`; 0 if it has none.
    """

    __slots__ = ("_handle_id", "kind")

    def __init__(self, kind: str, *, size_bytes: int = 0) -> None:
        self.kind = kind
        self._handle_id = next(_handle_ids)
        _open_objects[self._handle_id] = kind, size_bytes

    def release(self) -> None:
        """Stop counting the object, because it was closed. A second call does nothing. Finalizers may call this."""
        _open_objects.pop(self._handle_id, None)

    def __del__(self) -> None:
        if getattr(self, "_handle_id", None) in _open_objects:
            warnings.warn(f"a {self.kind} was never closed", GdrkitWarning, stacklevel=2)


class ReleaseStack:
    """A stack of actions that must succeed before their owner, such as a device or some memory, is released.

    The actions run in the reverse order of their addition. Examples are to close the children of an object, to
    deregister the regions of some memory, or to undo the steps of a half-built object. A failed action stays on the
    stack, so that the next attempt to release the owner repeats it.
    """

    __slots__ = ("_actions",)

    def __init__(self) -> None:
        # A dict keeps the order, and removing from it is fast even with ten thousand actions.
        self._actions: dict[_StackEntry, None] = {}

    def __len__(self) -> int:
        return len(self._actions)

    def push(self, action: Callable[[], None]) -> Callable[[], None]:
        """Add an action, and return a function that removes it if it has not run."""
        entry = _StackEntry(action)
        self._actions[entry] = None

        def remove() -> None:
            # Entries are compared by identity, because the same bound method may have been pushed twice.
            self._actions.pop(entry, None)

        return remove

    def run(self) -> None:
        """Run all actions, last added first. A failed action does not stop the others.

        Raises
        ------
        BaseException
            The error of the first failed action. The errors of later actions are its notes. The failed actions stay on
            the stack.
        """
        first_error: BaseException | None = None
        for entry in reversed(tuple(self._actions)):
            if entry not in self._actions:
                continue  # An earlier action has removed it.
            try:
                entry.action()
            except BaseException as error:  # noqa: BLE001 - raised below, after the other actions.
                if first_error is None:
                    first_error = error
                else:
                    first_error.add_note(f"another action failed too: {error}")
            else:
                self._actions.pop(entry, None)
        if first_error is not None:
            raise first_error

    def run_after(self, error: BaseException) -> None:
        """Run all actions before the caller raises `error`. The failure of an action becomes a note of `error`."""
        try:
            self.run()
        except Exception as action_error:  # noqa: BLE001 - the caller is about to raise `error` with this note.
            error.add_note(f"then the clean-up failed too: {action_error}")


class _StackEntry:
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
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Resource(Closeable):
    """Base of objects that hold one resource of a driver, such as a memory region or a stream.

    The object is counted by :func:`live` while it is open. An owner, such as a device, closes it before the owner
    itself is released.

    Parameters
    ----------
    kind : str
        Kind of the object for :func:`live`, such as ``verbs.region``.
    name : str
        Name of the object in the error that a call after the close raises, such as ``memory region``.
    on_close : callable or None
        The method by which the owner accepts an action to run before the owner is released, such as
        :meth:`ReleaseStack.push`. It returns a function that removes the action. None if there is no owner.
    size_bytes : int
        See :class:`Handle`.
    """

    def __init__(
        self,
        kind: str,
        *,
        name: str,
        on_close: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
        size_bytes: int = 0,
    ) -> None:
        self._name = name
        self._is_closed = self._is_in_release = False
        self._handle = Handle(kind, size_bytes=size_bytes)
        self._remove_from_owner = None if on_close is None else on_close(self.close)

    @property
    def closed(self) -> bool:
        """Whether the object was closed."""
        return self._is_closed

    def close(self) -> None:
        """Release the resource. A second close does nothing, also in a signal handler that interrupts the first one.

        Raises
        ------
        Exception
            The release failed. The object stays open, and another close tries again.
        """
        # A signal handler may close the object during the release, and must not release the resource a second time.
        if self._is_closed or self._is_in_release:
            return
        try:
            self._is_in_release = True
            self._release()
            self._is_closed = True
        finally:
            self._is_in_release = False
        if self._remove_from_owner is not None:
            self._remove_from_owner()
        self._handle.release()

    @abstractmethod
    def _release(self) -> None:
        """Call the driver to release the resource."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedResource(self._name)
