"""Limits on the host memory and the files of the clients of one user, for an agent that serves several users.

The agent maps the iovs and rings that a client publishes in host memory. It registers the iovs with all its NICs, which
pins their memory. The number of files that the agent's session with the server can open is limited, too.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

from gdrkit.storage.server import HANDLES_MAX
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SHARED_FILES_MAX", "FileQuota", "MemoryQuota"]

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
# Largest number of files that one user may register at a shared agent. A file has at most two handles at the server,
# one for reads and one for writes. So one user has at most half of the handles.
SHARED_FILES_MAX = HANDLES_MAX // 4


class MemoryQuota:
    """A count of the published host memory of each user, with a limit. Any number of threads may use it.

    Parameters
    ----------
    user_bytes_max : int or None
        Limit for each user, in bytes. None means no limit.

    Attributes
    ----------
    free_idle_memory : callable
        Function that ends the registrations of host memory that the agent keeps only for later iovs. ``Service`` sets
        the function. Its argument is the uid of the user whose clients release memory, because this user would exceed
        the limit. If the agent cannot pin more memory, the argument is None, which means all users.
    """

    def __init__(self, user_bytes_max: int | None = None) -> None:
        self.free_idle_memory: Callable[[int | None], None] = lambda _uid: None
        self._user_bytes_max = user_bytes_max
        self._lock = threading.Lock()
        self._bytes_by_user: dict[int, int] = {}

    def charge(self, uid: int, length_bytes: int) -> Callable[[], None]:
        """Add memory to the count of a user, in whole pages, and return the function that subtracts it again.

        Even the smallest publication counts as one page, because the kernel pins whole pages. So the limit also limits
        the number of publications.

        Raises
        ------
        AgentError
            EDQUOT: the user would exceed the limit.
        """
        charged_bytes = -(-length_bytes // _PAGE_BYTES) * _PAGE_BYTES
        # free_idle_memory() calls _release(), which takes the lock. So the lock must not be held here.
        if self._exceeds_limit(self._bytes_by_user.get(uid, 0) + charged_bytes):
            self.free_idle_memory(uid)
        with self._lock:
            total_bytes = self._bytes_by_user.get(uid, 0) + charged_bytes
            if self._exceeds_limit(total_bytes):
                message = (
                    f"user {uid} would publish {total_bytes} bytes of host memory, and the agent allows "
                    f"{self._user_bytes_max} (--user-memory-mib): destroy iovs, or start the agent with a higher limit"
                )
                raise AgentError(errno.EDQUOT, message)
            self._bytes_by_user[uid] = total_bytes
        return lambda: self._release(uid, charged_bytes)

    def _exceeds_limit(self, total_bytes: int) -> bool:
        return self._user_bytes_max is not None and total_bytes > self._user_bytes_max

    def _release(self, uid: int, charged_bytes: int) -> None:
        with self._lock:
            remaining_bytes = self._bytes_by_user[uid] - charged_bytes
            if remaining_bytes:
                self._bytes_by_user[uid] = remaining_bytes
            else:
                del self._bytes_by_user[uid]


class FileQuota:
    """A count of the registered files of each user, with a limit. Callers hold ``AgentContext.files_lock``.

    Parameters
    ----------
    user_files_max : int or None
        Largest number of files of one user. None means no limit.
    """

    def __init__(self, user_files_max: int | None = None) -> None:
        self._user_files_max = user_files_max
        self._file_count_by_user: Counter[int] = Counter()

    def charge(self, uid: int) -> None:
        """Add a file to the count of a user.

        Raises
        ------
        AgentError
            EMFILE: the user has as many files as the limit allows.
        """
        if self._user_files_max is not None and self._file_count_by_user[uid] >= self._user_files_max:
            message = (
                f"user {uid} has registered {self._user_files_max} files, the limit of a shared agent: deregister files"
            )
            raise AgentError(errno.EMFILE, message)
        self._file_count_by_user[uid] += 1

    def release(self, uid: int) -> None:
        """Subtract a file from the count of a user."""
        self._file_count_by_user[uid] -= 1
        if not self._file_count_by_user[uid]:
            del self._file_count_by_user[uid]
