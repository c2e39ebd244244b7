"""The processes that publish iovs by symbolic links in a FUSE mount, without the agent's socket."""

from __future__ import annotations

import errno
import os
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.children import join_threads
from gdrkit.host import process_identity
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.client import PeerProcess

if TYPE_CHECKING:
    from gdrkit.usrbio.agent.client import Client
    from gdrkit.usrbio.agent.service import Service

__all__ = ["LinkClients"]

# Limit of the wait for the thread. The thread may wait 30 s for a request to the storage server.
_END_TIMEOUT_S = 60.0
# Bytes that wake the thread.
_STOP, _NEW_CLIENT = b"x", b"."


class LinkClients:
    """The processes that published iovs by links. When a process ends, its publications are removed.

    Parameters
    ----------
    service : Service
        The service that gets a client for each process.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        # The client and the pidfd of each process, by process id.
        self._clients: dict[int, tuple[Client, int]] = {}
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._release_ended_processes, name="agent-processes", daemon=True)
        self._thread.start()

    def publish(self, name: str, target: str, *, uid: int, thread_id: int) -> None:
        """Publish the iov that a new link names, for the process of a thread.

        Raises
        ------
        OSError
            The agent refused the publication.
        """
        try:
            self._client_of(uid, _process_of(thread_id)).publish(name, target)
        except AgentError as error:
            raise _os_error(error.errno) from error

    def unpublish(self, name: str) -> None:
        """Remove a publication. Every process of the user may do this. The kernel refuses other users.

        Raises
        ------
        OSError
            ENOENT: the name is not published. Other errors have the errno of the agent.
        """
        with self._lock:
            clients = [client for client, _ in self._clients.values()]
        for client in (*clients, *self._service.clients.values()):
            try:
                client.unpublish(name)
            except AgentError as error:
                if error.errno != errno.ENOENT:
                    raise _os_error(error.errno) from error
            else:
                return
        raise _os_error(errno.ENOENT)

    def close(self) -> None:
        """Stop watching the processes. The service closes their clients.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the thread still releases the objects of a process. Another close waits again.
        """
        os.write(self._wake_writer, _STOP)
        join_threads([self._thread], timeout_s=_END_TIMEOUT_S)
        for fd in (self._wake_reader, self._wake_writer, *(pidfd for _, pidfd in self._clients.values())):
            os.close(fd)
        self._clients.clear()

    def _client_of(self, uid: int, process_id: int) -> Client:
        """Return the client of a process. Watch the process if it is new."""
        with self._lock:
            entry = self._clients.get(process_id)
            if entry is not None:
                return entry[0]
            try:
                pidfd = os.pidfd_open(process_id)
            except ProcessLookupError as error:
                raise _process_not_visible(process_id) from error
            client = self._service.open_client(PeerProcess(uid, process_id, process_identity(process_id)))
            self._clients[process_id] = (client, pidfd)
        os.write(self._wake_writer, _NEW_CLIENT)
        return client

    def _release_ended_processes(self) -> None:
        """Release the client of each process when the process ends, until :meth:`close`."""
        while True:
            with self._lock:
                watched = {pidfd: process_id for process_id, (_, pidfd) in self._clients.items()}
            poller = select.poll()
            for fd in (self._wake_reader, *watched):
                poller.register(fd, select.POLLIN)
            readable = [fd for fd, _ in poller.poll()]
            if self._wake_reader in readable and _STOP in os.read(self._wake_reader, 4096):
                return
            for pidfd in readable:
                if pidfd != self._wake_reader:
                    with self._lock:
                        client, _ = self._clients.pop(watched[pidfd])
                    os.close(pidfd)
                    self._service.release(client)


def _process_of(thread_id: int) -> int:
    """Return the process of a thread. FUSE reports the thread that sent a request."""
    try:
        status = Path(f"/proc/{thread_id}/status").read_text()
    except OSError as error:
        raise _process_not_visible(thread_id) from error
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:"))


def _process_not_visible(process_id: int) -> AgentError:
    return AgentError(errno.ESRCH, f"the agent cannot see process {process_id}")


def _os_error(error_number: int) -> OSError:
    return OSError(error_number, os.strerror(error_number))
