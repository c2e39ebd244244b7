"""What is open, and what must be released before what.

Level 1. Every object that holds something of a driver or of the kernel enters itself here by kind, so that a harness
can see that nothing was left behind. Nothing is ever freed because an object was forgotten: a leak is better than a
key that still reaches memory which someone else owns by now.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitWarning

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Handle", "ReleaseStack", "live"]

_lock = threading.Lock()
_live: Counter[str] = Counter()


def live() -> dict[str, int]:
    """How many objects of each kind are open now; kinds without any are left out.

    An object that was forgotten without being closed stays counted, since what it held is still held.
    """
    with _lock:
        return {kind: count for kind, count in sorted(_live.items()) if count}


class Handle:
    """The entry of one open object.

    Parameters
    ----------
    kind : str
        What it is, e.g. ``verbs.region``.
    """

    __slots__ = ("_open", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._open = True
        with _lock:
            _live[kind] += 1

    def release(self) -> None:
        """The object was closed; a second call does nothing."""
        with _lock:
            if self._open:
                self._open = False
                _live[self.kind] -= 1

    def __del__(self) -> None:
        if getattr(self, "_open", False):
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
