"""The limit of the host memory that the clients of one user may publish, because the agent pins it for all its NICs."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryQuota"]

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class MemoryQuota:
    """The published host memory of each user. It can be used by any number of threads.

    Parameters
    ----------
    user_bytes_max : int or None
        Limit for each user, in bytes. None means no limit.

    Attributes
    ----------
    free_idle_memory : callable
        Called with a user who would exceed the limit, or with None if the agent cannot pin more memory. It ends the
        registrations that clients of this user, or all clients, only keep for later iovs.
    """

    def __init__(self, user_bytes_max: int | None = None) -> None:
        self.free_idle_memory: Callable[[int | None], None] = lambda _uid: None
        self._user_bytes_max = user_bytes_max
        self._lock = threading.Lock()
        self._bytes_by_user: dict[int, int] = {}

    def charge(self, uid: int, length_bytes: int) -> Callable[[], None]:
        """Count memory of a user in whole pages, and return the function that ends this.

        The smallest publication costs a page, as in the kernel. So the limit also limits the number of publications.

        Raises
        ------
        AgentError
            EDQUOT: the user would exceed the limit.
        """
        length_bytes = -(-length_bytes // _PAGE_BYTES) * _PAGE_BYTES
        if self._exceeds_limit(self._bytes_by_user.get(uid, 0) + length_bytes):
            self.free_idle_memory(uid)
        with self._lock:
            total_bytes = self._bytes_by_user.get(uid, 0) + length_bytes
            if self._exceeds_limit(total_bytes):
                message = (
                    f"user {uid} would publish {total_bytes} bytes of host memory, and the agent allows "
                    f"{self._user_bytes_max} (--user-memory-mib): destroy iovs, or start the agent with a higher limit"
                )
                raise AgentError(errno.EDQUOT, message)
            self._bytes_by_user[uid] = total_bytes
        return lambda: self._release(uid, length_bytes)

    def _exceeds_limit(self, total_bytes: int) -> bool:
        return self._user_bytes_max is not None and total_bytes > self._user_bytes_max

    def _release(self, uid: int, length_bytes: int) -> None:
        with self._lock:
            left_bytes = self._bytes_by_user[uid] - length_bytes
            if left_bytes:
                self._bytes_by_user[uid] = left_bytes
            else:
                del self._bytes_by_user[uid]
