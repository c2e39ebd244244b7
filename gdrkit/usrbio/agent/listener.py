"""The agent's socket: the listener that accepts clients, and the threads that execute the requests of the clients.

Each connection has a thread, because registering memory takes long and must not delay other clients. When the last
connection of a client ends, the agent releases all objects of the client. The kernel reports the user of a process
(SO_PEERCRED). Only a shared agent serves processes of other users.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING

from gdrkit import scm_rights
from gdrkit.children import join_threads
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.host import process_identity
from gdrkit.storage.messages import SetUser
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.agent_error import AgentError, as_agent_error
from gdrkit.usrbio.agent.client import PeerProcess
from gdrkit.usrbio.agent.protocol import AgentMessage, AgentRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.usrbio.agent.client import Client
    from gdrkit.usrbio.agent.mount import AgentMount
    from gdrkit.usrbio.agent.service import Service

__all__ = ["AgentListener"]

_CONNECTIONS_MAX = 1024
# Limit of the connections of one user of a shared agent, so that no user can use up all connections.
_USER_CONNECTIONS_MAX = 256
_BACKLOG = 128
# Pause after accept() failed.
_ACCEPT_PAUSE_S = 0.05
# Longest wait of close() for the listener thread, and then for the threads of all connections. A thread may wait 30 s
# for a reply of the storage server.
_END_TIMEOUT_S = 60.0
_ERROR_TEXT_BYTES_MAX = 2048
# struct ucred of unix(7): process id, user and group.
_CREDENTIALS = struct.Struct("iII")
# SO_PEERGROUPS of asm/socket.h: the groups of the process that has connected.
_SO_PEERGROUPS = 59
# Largest size that socket.getsockopt() can return, enough for 256 groups. A process with more groups is refused
# (ERANGE).
_GROUPS_BYTES_MAX = 1024
_LOG = logging.getLogger(__name__)


class AgentListener:
    """The listener of the agent's socket. It accepts clients until :meth:`close`.

    Parameters
    ----------
    mount : AgentMount
        The mount in whose folder the socket is created.
    service : Service
        The service for the clients.
    """

    def __init__(self, mount: AgentMount, service: Service) -> None:
        self._mount = mount
        self._service = service
        self._lock = threading.Lock()
        self._thread_by_connection: dict[socket.socket, threading.Thread] = {}
        self._uid_by_connection: dict[socket.socket, int] = {}
        self._is_closing = False
        self._stop_event = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A socket address has a length limit. A path through the descriptor of the folder is short.
            address = f"/proc/self/fd/{mount.virtual_folder_fd}/{mount.socket_path.name}"
            self._socket.bind(address)
            # No client can connect before listen(), so the mode is set in time. A change of the umask would affect all
            # threads.
            os.chmod(address, 0o666 if mount.is_shared else 0o600)  # noqa: PTH101 - an address, not a path that users see.
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="agent-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting clients, end all connections, and wait until their clients are released.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the listener thread, or a thread that releases the objects of a client, has not ended. The
            caller may call this method again.
        """
        with self._lock:
            self._is_closing = True
            thread_by_connection = dict(self._thread_by_connection)
        self._stop_event.set()
        if self._socket.fileno() >= 0:
            self._socket.shutdown(socket.SHUT_RDWR)
            join_threads([self._thread], timeout_s=_END_TIMEOUT_S)
            self._socket.close()
        self._mount.socket_path.unlink(missing_ok=True)
        for connection in thread_by_connection:
            _stop_receiving(connection)
        join_threads(thread_by_connection.values(), timeout_s=_END_TIMEOUT_S)

    def _accept(self) -> None:
        """Accept connections until :meth:`close`."""
        logged_errno: int | None = None
        while True:
            try:
                connection, _address = self._socket.accept()
            except OSError as error:
                if self._is_closing:
                    return
                # An error that repeats is logged once, not at each attempt.
                if error.errno != logged_errno:
                    logged_errno = error.errno
                    _LOG.warning("accept on %s failed: %s; the agent tries again", self._mount.socket_path, error)
                # Without this pause, accept() could fail again at once, for example until a descriptor is free.
                self._stop_event.wait(_ACCEPT_PAUSE_S)
                continue
            logged_errno = None
            self._start_thread(connection)

    def _start_thread(self, connection: socket.socket) -> None:
        """Start the thread of a connection. Close the connection if too many are open, or if the listener closes."""
        thread = threading.Thread(target=self._serve_connection, args=(connection,), name="agent-client", daemon=True)
        _process_id, uid, _gid = _read_peer_credentials(connection)
        with self._lock:
            user_connection_count = sum(other_uid == uid for other_uid in self._uid_by_connection.values())
            is_accepted = (
                not self._is_closing
                and len(self._thread_by_connection) < _CONNECTIONS_MAX
                and (not self._mount.is_shared or user_connection_count < _USER_CONNECTIONS_MAX)
            )
            if is_accepted:
                self._thread_by_connection[connection] = thread
                self._uid_by_connection[connection] = uid
        if is_accepted:
            thread.start()
        else:
            connection.close()

    def _serve_connection(self, connection: socket.socket) -> None:
        try:
            process = _identify_peer(connection, is_shared=self._mount.is_shared)
            if self._mount.is_shared or process.uid == os.geteuid():
                self._serve_client(connection, self._service.open_client(process))
            else:
                _refuse_other_user(connection, process)
        except (GdrkitError, OSError) as error:
            _LOG.warning("a connection to %s failed: %s", self._mount.socket_path, error)
        finally:
            with self._lock:
                self._thread_by_connection.pop(connection, None)
                self._uid_by_connection.pop(connection, None)
            connection.close()

    def _serve_client(self, connection: socket.socket, client: Client) -> None:
        """Serve the requests of a connection until it ends, then remove the connection from its client."""
        try:
            while _serve_request(connection, client):
                pass
        finally:
            self._service.release(client)


def _serve_request(connection: socket.socket, client: Client) -> bool:
    """Receive a request and send the reply. Return False if the connection ended, or the message was malformed."""
    try:
        packed_message, descriptors = _receive_message(connection)
    except OSError as error:
        if error.errno in {errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE}:
            return False
        raise
    except UsageError:
        # The message has too many descriptors or bytes. Its sender does not use the protocol and gets no reply.
        return False
    if not packed_message:
        _close_all(descriptors)
        return False
    try:
        message = protocol.parse(packed_message, descriptor_count=len(descriptors))
    except UsageError:
        # A peer that does not use the protocol gets no reply, because it could not parse the reply.
        _close_all(descriptors)
        return False
    try:
        reply = _execute(client, message, descriptors)
    except (GdrkitError, OSError) as error:
        reply = _make_error_reply(message, as_agent_error(error))
    try:
        connection.send(protocol.pack(reply), socket.MSG_NOSIGNAL)
    except OSError as error:
        if error.errno in {errno.EPIPE, errno.ECONNRESET}:
            return False
        raise
    return True


def _execute(client: Client, message: AgentMessage, descriptors: list[int]) -> AgentMessage:
    """Execute a request and return its reply. This function owns the descriptors."""
    handler = _HANDLERS[message.request_type]
    unused_descriptors = list(descriptors)
    try:
        payload = handler(client, message.payload, unused_descriptors)
    finally:
        # Each handler has removed from this list the descriptors that it keeps. Close the others.
        _close_all(unused_descriptors)
    return AgentMessage(message.request_type, message.sequence, payload)


def _make_error_reply(message: AgentMessage, error: AgentError) -> AgentMessage:
    # If the limit splits a character of several bytes, decode() drops the incomplete character.
    encoded_text = str(error).encode()[:_ERROR_TEXT_BYTES_MAX].decode(errors="ignore").encode()
    return AgentMessage(message.request_type, message.sequence, encoded_text, status=error.errno)


def _hello(_client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    protocol.parse_hello(payload)
    import gdrkit

    return protocol.pack_hello(protocol.AgentHello(protocol.FEATURE_KEEP, os.getpid(), f"gdrkit {gdrkit.__version__}"))


def _publish(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    """Publish an iov or a ring. For device memory, the request contains the packed share handle."""
    request = protocol.parse_publish(payload)
    client.publish(request.name, request.target, share_handle=request.share_handle, descriptors=_take_all(descriptors))
    return b""


def _unpublish(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    """End the publication of an iov or a ring, and deregister its memory."""
    client.unpublish(protocol.parse_name(payload))
    return b""


def _unpublish_and_keep_registration(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    return protocol.pack_number(client.unpublish(protocol.parse_name(payload), keep=True))


def _drop_kept_registration(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    flags = protocol.parse_number(payload)
    if flags:
        raise AgentError(errno.EINVAL, f"flags must be 0, not {flags}")
    client.drop_kept_registration(descriptors[0])
    return b""


def _borrow(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    """Allow operations of the client on an iov that another client of the same user has published."""
    request = protocol.parse_publish(payload)
    if request.share_handle:
        raise AgentError(errno.EINVAL, "BORROW must not have a share handle: the owner of the iov has already sent it")
    client.borrow(request.name, request.target)
    return b""


def _return_borrowed(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    """End the permission that :func:`_borrow` gave."""
    client.return_borrowed(protocol.parse_name(payload))
    return b""


def _register_file(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    flags = protocol.parse_number(payload)
    if flags:
        raise AgentError(errno.EINVAL, f"flags must be 0, not {flags}")
    return protocol.pack_number(client.register_file(_take_all(descriptors)[0]))


def _deregister_file(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    client.deregister_file(protocol.parse_number(payload))
    return b""


def _punch_hole(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    flags, ranges = protocol.parse_punch(payload)
    client.punch_hole(_take_all(descriptors)[0], flags, ranges)
    return b""


def _hard_link(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    name = protocol.parse_name(payload)
    file_fd, folder_fd = _take_all(descriptors)
    client.hard_link(file_fd, folder_fd, name)
    return b""


_HANDLERS: dict[AgentRequest, Callable[[Client, bytes, list[int]], bytes]] = {
    AgentRequest.HELLO: _hello,
    AgentRequest.PUBLISH: _publish,
    AgentRequest.UNPUBLISH: _unpublish,
    AgentRequest.REGISTER_FILE: _register_file,
    AgentRequest.DEREGISTER_FILE: _deregister_file,
    AgentRequest.PUNCH_HOLE: _punch_hole,
    AgentRequest.HARD_LINK: _hard_link,
    AgentRequest.BORROW: _borrow,
    AgentRequest.RETURN_BORROWED: _return_borrowed,
    AgentRequest.UNPUBLISH_AND_KEEP: _unpublish_and_keep_registration,
    AgentRequest.DROP_KEPT: _drop_kept_registration,
}


def _take_all(descriptors: list[int]) -> list[int]:
    """Remove all descriptors from a list and return them. The caller owns them."""
    all_descriptors = list(descriptors)
    descriptors.clear()
    return all_descriptors


def _read_peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process id, the user and the group of the process that has connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, uid, gid = _CREDENTIALS.unpack(credentials)
    return process_id, uid, gid


def _identify_peer(connection: socket.socket, *, is_shared: bool) -> PeerProcess:
    process_id, uid, gid = _read_peer_credentials(connection)
    user = None
    if is_shared:
        packed_groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
        # SetUser is the message with which the agent requests the rights of this user from the storage server.
        user = SetUser(uid, gid, tuple(group for (group,) in struct.iter_unpack("I", packed_groups)))
    return PeerProcess(uid, process_id, process_identity(process_id) if process_id > 0 else None, user)


def _refuse_other_user(connection: socket.socket, process: PeerProcess) -> None:
    """Reply to the first message of a process of another user with EACCES."""
    packed_message, descriptors = _receive_message(connection)
    descriptor_count = len(descriptors)
    _close_all(descriptors)
    if packed_message:
        message = protocol.parse(packed_message, descriptor_count=descriptor_count)
        error = AgentError(errno.EACCES, f"this agent serves user {os.geteuid()}, not user {process.uid}")
        connection.send(protocol.pack(_make_error_reply(message, error)), socket.MSG_NOSIGNAL)


def _receive_message(connection: socket.socket) -> tuple[bytes, list[int]]:
    return scm_rights.receive(
        connection, length_bytes=protocol.MESSAGE_BYTES_MAX, descriptors_max=protocol.DESCRIPTORS_MAX
    )


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _stop_receiving(connection: socket.socket) -> None:
    # Only the receiving side is shut down, so that the agent receives no further request. The client must not see the
    # end of its connection before its operations in flight have ended, because it may then use its memory for something
    # else.
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError as error:
        if error.errno not in {errno.ENOTCONN, errno.EBADF}:
            raise
