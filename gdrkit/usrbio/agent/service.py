"""The clients of an agent, which connect by the agent's socket or by a FUSE mount."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError
from gdrkit.handles import ReleaseStack
from gdrkit.usrbio.agent.client import Client

if TYPE_CHECKING:
    from gdrkit.usrbio.agent.client import PeerProcess
    from gdrkit.usrbio.agent.context import AgentContext
    from gdrkit.usrbio.agent.session import AgentSession

__all__ = ["Service"]

_LOG = logging.getLogger(__name__)


class Service:
    """All clients of an agent.

    Parameters
    ----------
    context : AgentContext
        The objects that the clients share.
    is_one_client_per_process : bool
        Whether all connections of a process are one client. Then the rings that the process publishes through the
        socket can use the iovs that it publishes by links in a FUSE mount.

    Attributes
    ----------
    clients : dict
        The clients by their numbers.
    """

    def __init__(self, context: AgentContext, *, is_one_client_per_process: bool = False) -> None:
        self.clients: dict[int, Client] = {}
        self._context = context
        self._is_one_client_per_process = is_one_client_per_process
        self._client_numbers = itertools.count(1)
        self._lock = threading.Lock()
        context.memory_quota.free_idle_memory = self._free_idle_memory

    def open_client(self, process: PeerProcess) -> Client:
        """Return the client for a new connection of a process. At the end of the connection, call :meth:`release`."""
        with self._lock:
            if self._is_one_client_per_process and process.identity is not None:
                for client in self.clients.values():
                    if client.process == process and client.connection_count:
                        client.connection_count += 1
                        return client
            new_client = Client(self._context, next(self._client_numbers), process)
            self._context.loop.add_client(new_client.number)
            self.clients[new_client.number] = new_client
        return new_client

    def release(self, client: Client) -> None:
        """End one connection of a client. If it was the last connection, close the client."""
        with self._lock:
            client.connection_count -= 1
            is_last_connection = client.connection_count == 0
        if is_last_connection:
            self._close(client)

    def reopen(self, session: AgentSession) -> None:
        """Reopen all files of all clients at a new session with the storage server."""
        with self._context.files_lock:
            for client in tuple(self.clients.values()):
                client.reopen(session)

    def remove_ring(self, client_number: int, ring_id: bytes) -> None:
        """Remove a ring of a client, because the loop has found that the ring is broken."""
        client = self.clients.get(client_number)
        if client is not None:
            # The removal may wait until the session has ended, and only the thread that calls this method ends
            # sessions. So another thread removes the ring.
            threading.Thread(target=client.remove_ring, args=(ring_id,), name="agent-ring", daemon=True).start()

    def close(self) -> None:
        """Close all clients."""
        close_actions = ReleaseStack()
        for client in tuple(self.clients.values()):
            close_actions.push(lambda client=client: self._close(client))  # type: ignore[misc]
        close_actions.run()

    def _free_idle_memory(self, uid: int | None) -> None:
        """End the registrations of host memory that the clients of a user, or all clients, keep for later iovs."""
        for client in tuple(self.clients.values()):
            if uid in {None, client.process.uid}:
                try:
                    client.drop_kept_host_memory()
                except GdrkitError as error:
                    _LOG.warning("idle memory of process %d is not released: %s", client.process.process_id, error)

    def _close(self, client: Client) -> None:
        client.close()
        with self._lock:
            removed_client = self.clients.pop(client.number, None)
        if removed_client is not None:
            self._context.loop.remove_client(client.number)
