"""The processes that publish iovs and rings by symbolic links in a FUSE mount, without the agent's socket.

A ring that was published by a link names files by their inodes, as in 3FS: it can use every file that its user has open
through the mount. So this module registers each open file for each process of the user with such a ring.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.children import join_threads
from gdrkit.host import process_identity
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.client import PeerProcess
from gdrkit.usrbio.agent.link_names import parse_name

if TYPE_CHECKING:
    from gdrkit.storage.messages import SetUser
    from gdrkit.usrbio.agent.client import Client
    from gdrkit.usrbio.agent.files import PathAccess
    from gdrkit.usrbio.agent.service import Service

__all__ = ["LinkClients"]

# Longest wait of close() for the thread. The thread may wait 30 s for a reply of the storage server.
_END_TIMEOUT_S = 60.0
# Bytes that wake the thread.
_STOP_BYTE, _NEW_CLIENT_BYTE = b"x", b"."
_LOG = logging.getLogger(__name__)


class LinkClients:
    """The processes that published iovs or rings by links. When a process ends, its publications are removed.

    Parameters
    ----------
    service : Service
        The service that gets a client for each process.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        # The client and the pidfd of each process, by process id, uid, and user with groups. A process that changes its
        # user or groups gets another client.
        self._watched_clients: dict[tuple[int, int, SetUser | None], tuple[Client, int]] = {}
        # Held while files are registered or deregistered. Every open file is registered for every client of its user
        # that has a ring.
        self._files_lock = threading.Lock()
        # The access to each open file and the user who opened it, by the number of the open file.
        self._open_files: dict[int, tuple[PathAccess, int]] = {}
        # The clients that have published a ring, by their numbers.
        self._ring_clients: dict[int, Client] = {}
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._release_ended_processes, name="agent-processes", daemon=True)
        self._thread.start()

    def publish(self, name: str, target: str, *, uid: int, user: SetUser | None, thread_id: int) -> None:
        """Publish the iov or ring that a new link names, for the process of the thread that creates the link.

        `uid` is the user of this thread. For `user` see :class:`PeerProcess`.

        Raises
        ------
        OSError
            The agent refused the publication.
        """
        try:
            client = self._find_client(uid, user, _find_process_id(thread_id))
            client.publish(name, target)
            if parse_name(name).ring_options is not None:
                self._register_open_files(client)
        except AgentError as error:
            raise _make_os_error(error.errno) from error

    def owner_uid(self, name: str) -> int | None:
        """Return the user who has published a name, or None if it is not published."""
        clients = tuple(self._service.clients.values())
        return next((client.process.uid for client in clients if client.has_published(name)), None)

    def unpublish(self, name: str, *, uid: int) -> None:
        """Remove a publication for a user. Root and all processes of the user who published it may do this.

        Raises
        ------
        OSError
            EPERM: another user has published the name. ENOENT: the name is not published. Other errors have the errno
            of the agent.
        """
        if uid != 0 and self.owner_uid(name) not in {None, uid}:
            raise _make_os_error(errno.EPERM)
        with self._lock:
            clients = [client for client, _ in self._watched_clients.values()]
        for client in (*clients, *self._service.clients.values()):
            try:
                client.unpublish(name)
            except AgentError as error:
                if error.errno != errno.ENOENT:
                    raise _make_os_error(error.errno) from error
            else:
                return
        raise _make_os_error(errno.ENOENT)

    def add_file(self, fh: int, access: PathAccess, *, uid: int) -> None:
        """Allow the rings that a user published by links to use a file that this user opened through the mount.

        Parameters
        ----------
        fh : int
            Number of the open file.
        access : PathAccess
            The access to the file. It grants the rights with which the file was opened.
        uid : int
            The user who opened the file.
        """
        with self._files_lock:
            self._open_files[fh] = access, uid
            for client in self._find_ring_clients(uid):
                _register_file(client, access)

    def remove_file(self, fh: int) -> None:
        """Undo :meth:`add_file`. Then rings can use the file only if the user has it open a second time."""
        with self._files_lock:
            if fh in self._open_files:
                access, uid = self._open_files.pop(fh)
                for client in self._find_ring_clients(uid):
                    _deregister_file(client, access)

    def close(self) -> None:
        """Stop watching the processes. The service closes their clients.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the thread still releases the objects of a process. The caller may call this method again.
        """
        os.write(self._wake_writer, _STOP_BYTE)
        join_threads([self._thread], timeout_s=_END_TIMEOUT_S)
        for fd in (self._wake_reader, self._wake_writer, *(pidfd for _, pidfd in self._watched_clients.values())):
            os.close(fd)
        self._watched_clients.clear()

    def _register_open_files(self, client: Client) -> None:
        """Register the open files for a client that has published a ring, unless this was done for an earlier ring."""
        with self._files_lock:
            if client.number not in self._ring_clients:
                self._ring_clients[client.number] = client
                for access, uid in self._open_files.values():
                    if uid == client.process.uid:
                        _register_file(client, access)

    def _find_ring_clients(self, uid: int) -> list[Client]:
        return [client for client in self._ring_clients.values() if client.process.uid == uid]

    def _find_client(self, uid: int, user: SetUser | None, process_id: int) -> Client:
        """Return the client of a process. For a new process, open a client, and watch the process."""
        with self._lock:
            client_and_pidfd = self._watched_clients.get((process_id, uid, user))
            if client_and_pidfd is not None:
                return client_and_pidfd[0]
            try:
                pidfd = os.pidfd_open(process_id)
            except ProcessLookupError as error:
                raise _make_hidden_process_error(process_id) from error
            client = self._service.open_client(PeerProcess(uid, process_id, process_identity(process_id), user))
            self._watched_clients[process_id, uid, user] = (client, pidfd)
        os.write(self._wake_writer, _NEW_CLIENT_BYTE)
        return client

    def _release_ended_processes(self) -> None:
        """Release the client of each process when the process ends, until :meth:`close`."""
        while True:
            with self._lock:
                key_by_pidfd = {pidfd: key for key, (_, pidfd) in self._watched_clients.items()}
            poller = select.poll()
            for fd in (self._wake_reader, *key_by_pidfd):
                poller.register(fd, select.POLLIN)
            readable_fds = [fd for fd, _ in poller.poll()]
            if self._wake_reader in readable_fds and _STOP_BYTE in os.read(self._wake_reader, 4096):
                return
            for pidfd in readable_fds:
                if pidfd != self._wake_reader:
                    with self._lock:
                        client, _ = self._watched_clients.pop(key_by_pidfd[pidfd])
                    os.close(pidfd)
                    with self._files_lock:
                        self._ring_clients.pop(client.number, None)
                    self._service.release(client)


def _register_file(client: Client, access: PathAccess) -> None:
    """Register a file for a client. After an error, operations of the client on the file fail with EBADF."""
    try:
        client.add_file(access)
    except AgentError as error:
        _LOG.warning("rings of process %d cannot use %s: %s", client.process.process_id, access.path, error)


def _deregister_file(client: Client, access: PathAccess) -> None:
    try:
        client.deregister_file(access.inode)
    except AgentError as error:
        # ENOENT: the registration failed.
        if error.errno != errno.ENOENT:
            _LOG.warning("process %d still uses %s: %s", client.process.process_id, access.path, error)


def _find_process_id(thread_id: int) -> int:
    """Return the process id of a thread. FUSE reports only the thread that sent a request."""
    try:
        status = Path(f"/proc/{thread_id}/status").read_text()
    except OSError as error:
        raise _make_hidden_process_error(thread_id) from error
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:"))


def _make_hidden_process_error(process_id: int) -> AgentError:
    return AgentError(errno.ESRCH, f"the agent cannot see process {process_id}")


def _make_os_error(error_number: int) -> OSError:
    return OSError(error_number, os.strerror(error_number))
