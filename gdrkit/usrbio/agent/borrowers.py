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
    """The borrowers of one published buffer, with a count for each. It can be used by any number of threads.

    Parameters
    ----------
    owner : int
        Number of the client that published the buffer. This client can borrow the buffer too, which changes only the
        count.
    uid : int
        User of the owner. Clients of other users cannot borrow the buffer.
    target : str
        Target of the publication's link. A borrower must pass an equal target.
    add_to_client : callable
        Function that adds the buffer to the client with this number in the agent's native loop.
    remove_from_client : callable
        Function that waits for the operations in flight on the buffer of the client with this number, and then removes
        the buffer from the client.
    """

    def __init__(
        self,
        *,
        owner: int,
        uid: int,
        target: str,
        add_to_client: Callable[[int], None],
        remove_from_client: Callable[[int], None],
    ) -> None:
        self._owner = owner
        self._uid = uid
        self._target = target
        self._add_to_client = add_to_client
        self._remove_from_client = remove_from_client
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._is_unpublished = False
        self._was_borrowed = False

    @property
    def was_borrowed(self) -> bool:
        """Whether a client has ever borrowed the buffer. That client may still have the memory mapped."""
        return self._was_borrowed

    def borrow(self, client: int, *, uid: int, target: str) -> None:
        """Add the buffer to a client, or increment the client's count.

        Raises
        ------
        AgentError
            EACCES: the buffer belongs to another user. EINVAL: the buffer has another target. ENOENT: the owner has
            unpublished it.
        OSError
            `add_to_client` failed: the agent's native loop refused the buffer.
        """
        if uid != self._uid:
            raise AgentError(errno.EACCES, f"the buffer belongs to user {self._uid}, not to user {uid}")
        if target != self._target:
            raise AgentError(errno.EINVAL, f"the target of the buffer is {self._target!r}, not {target!r}")
        with self._lock:
            if self._is_unpublished:
                raise AgentError(errno.ENOENT, "the owner has unpublished the buffer")
            # An owner that borrows its own buffer has a second mapping of it, too.
            self._was_borrowed = True
            if client not in self._counts and client != self._owner:
                self._add_to_client(client)
            self._counts[client] = self._counts.get(client, 0) + 1

    def return_buffer(self, client: int, *, all_at_once: bool = False) -> bool:
        """Decrement the count of a client. If the count is then 0, remove the buffer from the client.

        With `all_at_once`, the count becomes 0 at once.

        Return whether the count was above 0.

        Raises
        ------
        AgentError
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
        """Remove the buffer from all borrowers, because its owner unpublishes it. After an error, close again."""
        with self._lock:
            self._is_unpublished = True
            removals = ReleaseStack()
            for client in tuple(self._counts):
                removals.push(lambda client=client: self._drop(client))  # type: ignore[misc]
            removals.run()

    def _drop(self, client: int) -> None:
        if client != self._owner:
            self._remove_from_client(client)
        del self._counts[client]
