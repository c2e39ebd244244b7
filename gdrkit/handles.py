"""What is open, and what must be released before what.

Level 1. Every object that holds something of a driver or of the kernel enters itself here by kind, so that a harness
can see that nothing was left behind. Nothing is ever freed because an object was forgotten: a leak is better than a
key that still reaches memory which someone else owns by now.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitWarning

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Handle", "ReleaseStack", "live"]

# The kind of every open object by its number. There is no lock: the garbage collector may run the finalizer of another
# object inside any allocation of this file, and a fork copies a lock that another thread holds. One operation on a dict
# with integer keys is atomic.
_live: dict[int, str] = {}
_numbers = itertools.count()


def live() -> dict[str, int]:
    """How many objects of each kind are open now; kinds without any are left out.

    An object that was forgotten without being closed stays counted, since what it held is still held.
    """
    while True:
        try:
            kinds = tuple(_live.values())
        except RuntimeError:
            # A finalizer that ran inside this call released a handle, so the dict changed; each handle does so once.
            continue
        return dict(sorted(Counter(kinds).items()))


class Handle:
    """The entry of one open object.

    Parameters
    ----------
    kind : str
        What it is, e.g. ``verbs.region``.
    """

    __slots__ = ("_number", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._number = next(_numbers)
        _live[self._number] = kind

    def release(self) -> None:
        """Record that the object was closed; a second call does nothing. Finalizers may call it."""
        _live.pop(self._number, None)

    def __del__(self) -> None:
        if getattr(self, "_number", None) in _live:
            warnings.warn(f"a {self.kind} was never closed", GdrkitWarning, stacklevel=2)


class ReleaseStack:
    """Actions that must have succeeded before their owner may go, run last-added first.

    It holds the children of a parent, the regions over a piece of memory, the steps that a half-built object must
    undo. An action that failed stays, so that releasing the owner again tries it again.
    """

    __slots__ = ("_actions",)

    def __init__(self) -> None:
        # In order, and quick to take from also when there are ten thousand.
        self._actions: dict[_Entry, None] = {}

    def __len__(self) -> int:
        return len(self._actions)

    def push(self, action: Callable[[], None]) -> Callable[[], None]:
        """Add an action; returns what takes it back (and does nothing when it has run)."""
        entry = _Entry(action)
        self._actions[entry] = None

        def take_back() -> None:
            # By identity: the same bound method may have been pushed twice.
            self._actions.pop(entry, None)

        return take_back

    def run(self) -> None:
        """Run all, last-added first, also those after one that failed.

        Raises
        ------
        BaseException
            The first failure; the later ones are notes on it. What failed is still on the stack.
        """
        first: BaseException | None = None
        for entry in reversed(tuple(self._actions)):
            if entry not in self._actions:
                continue  # An action that ran before it has taken it back.
            try:
                entry.action()
            except BaseException as error:  # noqa: BLE001 - raised below, after the others had their turn.
                if first is None:
                    first = error
                else:
                    first.add_note(f"then also: {error}")
            else:
                self._actions.pop(entry, None)
        if first is not None:
            raise first

    def run_after(self, error: BaseException) -> None:
        """Run all because `error` is on its way; a failure becomes a note on it."""
        try:
            self.run()
        except Exception as second:  # noqa: BLE001 - the caller is about to raise `error`, which carries this one.
            error.add_note(f"then, while undoing: {second}")


class _Entry:
    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
