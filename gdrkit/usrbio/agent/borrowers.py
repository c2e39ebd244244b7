"""The clients that borrowed a buffer which another client published.

The rings of a borrower can name the buffer in their operations, like the rings of its owner. The borrower uses the
memory registration of the owner. When the owner unpublishes the buffer, the agent first removes it from all borrowers.
Later operations of the borrowers on the buffer fail with EACCES.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from gdrkit.handles import ReleaseStack
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Borrowers"]


class Borrowers:
    """The borrowers of one published buffer, with the number of borrows of each. Any number of threads may use it.

    Parameters
    ----------
    owner_number : int
        Number of the client that published the buffer. This client can borrow the buffer too. The loop already has the
        buffer for it, so only the count changes.
    owner_uid : int
        User of the owner. Clients of other users cannot borrow the buffer.
    target : str
        Target of the symbolic link with which the owner published the buffer. A borrower must pass an equal target.
    add_to_client : callable
        Called with a client number, to add the buffer to this client in the agent's native loop.
    remove_from_client : callable
        Called with a client number, to wait for the operations in flight of this client on the buffer, and then remove
        the buffer from the client in the loop.
    """

    def __init__(
        self,
        *,
        owner_number: int,
        owner_uid: int,
        target: str,
        add_to_client: Callable[[int], None],
        remove_from_client: Callable[[int], None],
    ) -> None:
        self._owner_number = owner_number
        self._owner_uid = owner_uid
        self._target = target
        self._add_to_client = add_to_client
        self._remove_from_client = remove_from_client
        self._lock = threading.Lock()
        self._borrow_count_by_client: dict[int, int] = {}
        self._is_unpublished = False
        self._was_borrowed = False

    @property
    def was_borrowed(self) -> bool:
        """Whether a client has ever borrowed the buffer. That client may still have the memory mapped."""
        return self._was_borrowed

    def borrow(self, client_number: int, *, uid: int, target: str) -> None:
        """Count one more borrow of a client. Its first borrow also adds the buffer to the client.

        Raises
        ------
        AgentError
            EACCES: the buffer belongs to another user. EINVAL: the buffer has another target. ENOENT: the owner has
            unpublished the buffer.
        OSError
            `add_to_client` failed: the agent's native loop refused the buffer.
        """
        if uid != self._owner_uid:
            raise AgentError(errno.EACCES, f"the buffer belongs to user {self._owner_uid}, not to user {uid}")
        if target != self._target:
            raise AgentError(errno.EINVAL, f"the target of the buffer is {self._target!r}, not {target!r}")
        with self._lock:
            if self._is_unpublished:
                raise AgentError(errno.ENOENT, "the owner has unpublished the buffer")
            # An owner that borrows its own buffer also counts, because it has a second mapping of the buffer.
            self._was_borrowed = True
            if client_number not in self._borrow_count_by_client and client_number != self._owner_number:
                self._add_to_client(client_number)
            self._borrow_count_by_client[client_number] = self._borrow_count_by_client.get(client_number, 0) + 1

    def return_buffer(self, client_number: int, *, all_at_once: bool = False) -> bool:
        """Undo one borrow of a client, or all borrows with `all_at_once`. Return whether the client had a borrow.

        After the last borrow, remove the buffer from the client.

        Raises
        ------
        AgentError
            EBUSY: operations are in flight and do not end.
        """
        with self._lock:
            borrow_count = self._borrow_count_by_client.get(client_number, 0)
            if borrow_count == 1 or (borrow_count and all_at_once):
                self._remove_borrower(client_number)
            elif borrow_count:
                self._borrow_count_by_client[client_number] = borrow_count - 1
            return borrow_count > 0

    def close(self) -> None:
        """Remove the buffer from all borrowers, because its owner unpublishes it.

        If the method raises, the caller may call it again for the remaining borrowers.
        """
        with self._lock:
            self._is_unpublished = True
            removals = ReleaseStack()
            for client_number in tuple(self._borrow_count_by_client):
                removals.push(lambda client_number=client_number: self._remove_borrower(client_number))  # type: ignore[misc]
            removals.run()

    def _remove_borrower(self, client_number: int) -> None:
        if client_number != self._owner_number:
            self._remove_from_client(client_number)
        del self._borrow_count_by_client[client_number]
