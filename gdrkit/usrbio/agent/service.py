"""The service of an agent for its clients, which reach it by the agent's socket or by a FUSE mount.

A :class:`Client` is one connection and owns everything that it published: its rings can name only its own buffers and
files, and all of it is released when the connection ends. A request that fails raises
:class:`~gdrkit.usrbio.agent.refusal.Refused` with the errno that the C interface returns.
"""

from __future__ import annotations

import errno
import itertools
import threading
from typing import TYPE_CHECKING

from gdrkit.handles import ReleaseStack
from gdrkit.usrbio.agent.client import Client
from gdrkit.usrbio.agent.refusal import Refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.client import Peer
    from gdrkit.usrbio.agent.files import Proof
    from gdrkit.usrbio.agent.lending import Lending
    from gdrkit.usrbio.agent.memory import Nics
    from gdrkit.usrbio.agent.publication import Links
    from gdrkit.usrbio.agent.server import Server
    from gdrkit.usrbio.agent.session import AgentSession

__all__ = ["Service"]


class Service:
    """Everything that clients share.

    Parameters
    ----------
    prove : callable
        Makes a :data:`~gdrkit.usrbio.agent.files.Proof` of a descriptor, which it owns.
    root : Path
        Below which files and folders have the paths that the server knows: the store, or a FUSE mount of it.
    loop, nics, links : AgentLoop, Nics, Links
        Where publications go.
    drain_timeout_ms : int
        How long an operation in flight may hold up a removal before the session with the server is ended.
    one_per_process : bool
        Whether a process is one client by all ways that it comes: what it published by a link in a FUSE mount is used
        by rings that it published over the socket.
    """

    def __init__(
        self,
        root: Path,
        *,
        prove: Callable[[int], Proof],
        loop: AgentLoop,
        nics: Nics,
        links: Links,
        drain_timeout_ms: int = 10000,
        one_per_process: bool = False,
    ) -> None:
        self.root = root
        self.prove = prove
        self.loop = loop
        self.nics = nics
        self.links = links
        self._drain_timeout_ms = drain_timeout_ms
        self._one_per_process = one_per_process
        self._server: Server | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._names: dict[str, Client] = {}
        self._lent: dict[str, Lending] = {}
        self.clients: dict[int, Client] = {}
        # Held while files are opened, so that a new session finds all of them or none.
        self.files_lock = threading.RLock()

    @property
    def server(self) -> Server:
        """Set by the agent before the first client comes."""
        if self._server is None:
            raise Refused(errno.EREMOTEIO, "there is no storage server yet")
        return self._server

    @server.setter
    def server(self, server: Server) -> None:
        self._server = server

    def open_client(self, peer: Peer) -> Client:
        """Begin to serve somebody, until :meth:`Client.release`."""
        with self._lock:
            if self._one_per_process and peer.identity is not None:
                for known in self.clients.values():
                    if known.peer == peer and known.holders:
                        known.holders += 1
                        return known
            client = Client(self, next(self._numbers), peer)
            self.loop.add_client(client.number)
            self.clients[client.number] = client
        return client

    def release_client(self, client: Client) -> bool:
        """One of the ways that a client came has ended; whether it was the last one."""
        with self._lock:
            client.holders -= 1
            return client.holders == 0

    def reopen(self, session: AgentSession) -> None:
        """Open all files of all clients again; see :class:`~gdrkit.usrbio.agent.server.Server`."""
        with self.files_lock:
            for client in tuple(self.clients.values()):
                client.reopen(session)

    def ring_broken(self, client: int, identity: bytes) -> None:
        """The loop serves a ring no more; its publication goes."""
        found = self.clients.get(client)
        if found is not None:
            # By a thread of its own: it may have to wait for the one that calls this.
            threading.Thread(target=found.drop_ring, args=(identity,), name="agent-ring", daemon=True).start()

    def drain(self, remove: Callable[[int], bool]) -> None:
        """Remove something from the loop; a server that holds it up loses its session."""
        if remove(self._drain_timeout_ms):
            return
        self.server.interrupt()
        if not remove(self._drain_timeout_ms):
            raise Refused(errno.EBUSY, "operations are still in flight")

    def take_name(self, name: str, client: Client) -> None:
        """Reserve the name of a link; EEXIST when it is published."""
        with self._lock:
            if self._names.setdefault(name, client) is not client:
                raise Refused(errno.EEXIST, f"{name} is published by another process")

    def give_name(self, name: str) -> None:
        """It is free again."""
        with self._lock:
            self._names.pop(name, None)
            self._lent.pop(name, None)

    def lend(self, name: str, lending: Lending) -> None:
        """What is published by a name may be borrowed."""
        with self._lock:
            self._lent[name] = lending

    def lent(self, name: str) -> Lending:
        """What is published by a name.

        Raises
        ------
        Refused
            ENOENT: nothing, or a ring.
        """
        with self._lock:
            lending = self._lent.get(name)
        if lending is None:
            raise Refused(errno.ENOENT, f"no memory is published as {name}")
        return lending

    def forget(self, client: Client) -> None:
        """The client has nothing any more."""
        with self._lock:
            self.clients.pop(client.number, None)
        self.loop.remove_client(client.number)

    def close(self) -> None:
        """Close the clients that are left."""
        parts = ReleaseStack()
        for client in tuple(self.clients.values()):
            parts.push(client.close)
        parts.run()
