"""The objects that all clients of an agent share, and the names of their publications."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.storage.messages import SetUser
    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.borrowers import Borrowers
    from gdrkit.usrbio.agent.connection import ServerConnection
    from gdrkit.usrbio.agent.files import FileAccess
    from gdrkit.usrbio.agent.memory import Nics
    from gdrkit.usrbio.agent.mount import LinkFolder
    from gdrkit.usrbio.agent.quota import FileQuota, MemoryQuota

__all__ = ["AgentContext"]


class AgentContext:
    """The loop, the NICs, the links and the storage server of an agent. It can be used by any number of threads.

    Parameters
    ----------
    root : Path
        The folder of the store, or its FUSE mount. The storage server uses paths relative to `root`.
    make_file_access : callable
        Called with a file descriptor that a client sent, and the user of the client (``PeerProcess.user``). The
        function owns the descriptor, and returns the access to the file.
    loop : AgentLoop
        The loop that serves the rings.
    nics : Nics
        The NICs that memory is registered with.
    links : LinkFolder
        The links of publications.
    drain_timeout_ms : int
        How long :meth:`drain` waits for the operations in flight on an object, before it ends the session with the
        server. In milliseconds.
    memory_quota : MemoryQuota
        The count and the limit of the host memory that the clients of each user have published.
    file_quota : FileQuota
        The count and the limit of the files that the clients of each user have registered.

    Attributes
    ----------
    local_store : Path or None
        The store, if the loop itself reads bytes of its files from the page cache. Else None.
    files_lock : threading.RLock
        Held while files are added, removed or reopened, so that a new session reopens every registered file.
    """

    def __init__(
        self,
        root: Path,
        *,
        make_file_access: Callable[[int, SetUser | None], FileAccess],
        loop: AgentLoop,
        nics: Nics,
        links: LinkFolder,
        drain_timeout_ms: int,
        memory_quota: MemoryQuota,
        file_quota: FileQuota,
    ) -> None:
        self.root = root
        self.make_file_access = make_file_access
        self.loop = loop
        self.nics = nics
        self.links = links
        self.memory_quota = memory_quota
        self.file_quota = file_quota
        self.local_store: Path | None = None
        self.files_lock = threading.RLock()
        self._drain_timeout_ms = drain_timeout_ms
        self._server: ServerConnection | None = None
        self._lock = threading.Lock()
        # The number of the client that published each name.
        self._owner_number_by_name: dict[str, int] = {}
        # The borrowers of each published iov, by the name of its link.
        self._borrowers_by_name: dict[str, Borrowers] = {}

    @property
    def server(self) -> ServerConnection:
        """The connection to the storage server. The agent sets it before the first client connects."""
        if self._server is None:
            raise AgentError(errno.EREMOTEIO, "the agent has not yet connected to a storage server")
        return self._server

    @server.setter
    def server(self, server: ServerConnection) -> None:
        self._server = server

    def drain(self, remove: Callable[[int], bool]) -> None:
        """Call `remove` to remove an object from the loop, and wait for the operations in flight on the object.

        `remove` is called with a timeout in milliseconds. It returns False if operations are still in flight after the
        timeout. Then the agent ends the session with the server, which ends the operations, and calls `remove` again.

        Raises
        ------
        AgentError
            EBUSY: operations are in flight and do not end.
        """
        if remove(self._drain_timeout_ms):
            return
        self.server.interrupt()
        if not remove(self._drain_timeout_ms):
            raise AgentError(errno.EBUSY, "operations are still in flight")

    def reserve_name(self, name: str, client_number: int) -> None:
        """Reserve the name of a link for a client.

        Raises
        ------
        AgentError
            EEXIST: another client has published a link with this name.
        """
        with self._lock:
            if self._owner_number_by_name.setdefault(name, client_number) != client_number:
                raise AgentError(errno.EEXIST, f"{name} is already published by another process")

    def release_name(self, name: str) -> None:
        """Release the name of a link that is not published any more. The iov can then no longer be borrowed."""
        with self._lock:
            self._owner_number_by_name.pop(name, None)
            self._borrowers_by_name.pop(name, None)

    def add_borrowers(self, name: str, borrowers: Borrowers) -> None:
        """Allow other clients to borrow the iov with this name."""
        with self._lock:
            self._borrowers_by_name[name] = borrowers

    def find_borrowers(self, name: str) -> Borrowers:
        """Return the borrowers of the iov with this name.

        Raises
        ------
        AgentError
            ENOENT: the name is not published, or it is the name of a ring.
        """
        with self._lock:
            borrowers = self._borrowers_by_name.get(name)
        if borrowers is None:
            raise AgentError(errno.ENOENT, f"{name} is not a published iov")
        return borrowers
