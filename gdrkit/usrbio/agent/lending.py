"""To whom a publication is lent: processes that opened or imported memory which another one published.

Level 5. A borrower's rings may name the buffer as the owner's do, with the owner's registration. When the owner takes
the publication back, the borrowers lose it first; what they do later is -EACCES.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from gdrkit.handles import ReleaseStack
from gdrkit.usrbio.agent.refusal import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lending"]


class Lending:
    """Who has borrowed one publication, and how often; for use by any number of threads.

    Parameters
    ----------
    owner : int
        The client that published it, which may open it too; the buffer is its own anyway.
    uid : int
        The user of the owner; no other one borrows.
    target : str
        What the link says.
    add, remove : callable
        Serve the buffer to a client, and no more; `remove` waits for what is in flight.
    """

    def __init__(
        self, *, owner: int, uid: int, target: str, add: Callable[[int], None], remove: Callable[[int], None]
    ) -> None:
        self._owner = owner
        self._uid = uid
        self._target = target
        self._add = add
        self._remove = remove
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._is_over = False

    def borrow(self, client: int, *, uid: int, target: str) -> None:
        """Serve it to a client; a second time is counted.

        Raises
        ------
        Refused
            EACCES: another user's. EINVAL: it is not what its name stands for. ENOENT: it is taken back.
        OSError
            As the loop refuses it.
        """
        if uid != self._uid:
            raise Refused(errno.EACCES, f"it belongs to user {self._uid} and not to {uid}")
        if target != self._target:
            raise Refused(errno.EINVAL, "another target is published by this name")
        with self._lock:
            if self._is_over:
                raise Refused(errno.ENOENT, "it is taken back")
            if client not in self._counts and client != self._owner:
                self._add(client)
            self._counts[client] = self._counts.get(client, 0) + 1

    def give_back(self, client: int, *, all_at_once: bool = False) -> bool:
        """End one borrowing, or all of a client; False: it has none any more.

        Raises
        ------
        Refused
            EBUSY: operations are in flight and do not end.
        """
        with self._lock:
            count = self._counts.get(client, 0)
            if count == 1 or (count and all_at_once):
                self._drop(client)
            elif count:
                self._counts[client] = count - 1
            return count > 0

    def close(self) -> None:
        """The owner takes it back: nobody has it any more; a failure leaves the rest for the next call."""
        with self._lock:
            self._is_over = True
            parts = ReleaseStack()
            for client in tuple(self._counts):
                parts.push(lambda client=client: self._drop(client))  # type: ignore[misc]
            parts.run()

    def _drop(self, client: int) -> None:
        if client != self._owner:
            self._remove(client)
        del self._counts[client]
