"""The agent's socket: who comes, what they say, and what they are answered.

Level 5. One thread for each connection, since registering memory takes its time and must not hold up anybody else. The
end of a connection is the end of all that came over it. Only processes of the agent's own user are let in, by the
kernel's word (SO_PEERCRED).
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
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.client import Peer
from gdrkit.usrbio.agent.protocol import Message, Request
from gdrkit.usrbio.agent.refusal import Refused, refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.usrbio.agent.client import Client
    from gdrkit.usrbio.agent.mount import Mount
    from gdrkit.usrbio.agent.service import Service

__all__ = ["AgentListener", "answer"]

_CONNECTIONS_MAX = 1024
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.05
# A request to the storage server has a limit of 30 s.
_END_TIMEOUT_S = 60.0
_SENTENCE_BYTES_MAX = 2048
_CREDENTIALS = struct.Struct("iII")
_LOG = logging.getLogger(__name__)


class AgentListener:
    """Listens until :meth:`close`.

    Parameters
    ----------
    mount : Mount
        In whose folder the socket is made.
    service : Service
        What clients reach.
    """

    def __init__(self, mount: Mount, service: Service) -> None:
        self._mount = mount
        self._service = service
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._stopping = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # By the folder's descriptor: a path of any length fits into an address.
            address = f"/proc/self/fd/{mount.folder}/{mount.socket.name}"
            self._socket.bind(address)
            # Nobody can connect before listen(). The umask is no way: it is that of all threads.
            os.chmod(address, 0o600)  # noqa: PTH101 - an address, and no path that anybody sees.
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="agent-doorway", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more, end all connections, and wait until what they had is taken back.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: a thread still releases what a client had; closing again waits again.
        """
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        self._stopping.set()
        if self._socket.fileno() >= 0:
            self._socket.shutdown(socket.SHUT_RDWR)
            join_threads([self._thread], timeout_s=_END_TIMEOUT_S)
            self._socket.close()
        self._mount.socket.unlink(missing_ok=True)
        for connection in connections:
            _end(connection)
        join_threads(connections.values(), timeout_s=_END_TIMEOUT_S)

    def _accept(self) -> None:
        logged: int | None = None
        while True:
            try:
                connection, _address = self._socket.accept()
            except OSError as error:
                if self._closing:
                    return
                # An error that stays is logged once, and not twenty times a second.
                if error.errno != logged:
                    logged = error.errno
                    _LOG.warning("accept on %s failed: %s; the agent tries again", self._mount.socket, error)
                # A waiting client is accepted when a descriptor is free again. Until then accept() would fail at once.
                self._stopping.wait(_ACCEPT_PAUSE_S)
                continue
            logged = None
            self._let_in(connection)

    def _let_in(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="agent-client", daemon=True)
        with self._lock:
            is_welcome = not self._closing and len(self._connections) < _CONNECTIONS_MAX
            if is_welcome:
                self._connections[connection] = thread
        if is_welcome:
            thread.start()
        else:
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            peer = _peer_of(connection)
            if peer.uid == os.geteuid():
                self._serve_client(connection, self._service.open_client(peer))
            else:
                _refuse_stranger(connection, peer)
        except (GdrkitError, OSError) as error:
            _LOG.warning("a connection to %s failed: %s", self._mount.socket, error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _serve_client(self, connection: socket.socket, client: Client) -> None:
        try:
            while serve_one(connection, client):
                pass
        finally:
            client.release()


def serve_one(connection: socket.socket, client: Client) -> bool:
    """Answer the next request; False: the connection is over, by its end or by what is no message."""
    try:
        data, descriptors = _receive(connection)
    except OSError as error:
        if error.errno in {errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE}:
            return False
        raise
    except UsageError:
        # More descriptors or bytes than a message may have.
        return False
    if not data:
        _close_all(descriptors)
        return False
    try:
        message = protocol.parse(data, descriptors=len(descriptors))
    except UsageError:
        # Who does not speak the protocol gets no answer that it could read.
        _close_all(descriptors)
        return False
    try:
        reply = answer(client, message, descriptors)
    except (GdrkitError, OSError) as error:
        refused = refusal_of(error)
        sentence = str(refused).encode()[:_SENTENCE_BYTES_MAX].decode(errors="ignore").encode()
        reply = Message(message.request, message.sequence, sentence, status=refused.errno)
    try:
        connection.send(protocol.pack(reply), socket.MSG_NOSIGNAL)
    except OSError as error:
        if error.errno in {errno.EPIPE, errno.ECONNRESET}:
            return False
        raise
    return True


def answer(client: Client, message: Message, descriptors: list[int]) -> Message:
    """Carry a request out; the descriptors are owned from now on.

    Raises
    ------
    GdrkitError, OSError
        It was not carried out.
    """
    action = _ACTIONS[message.request]
    owned = list(descriptors)
    try:
        payload = action(client, message.payload, owned)
    finally:
        # What the action took it has taken out of the list.
        _close_all(owned)
    return Message(message.request, message.sequence, payload)


def _hello(_client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    protocol.parse_hello(payload)
    import gdrkit

    return protocol.pack_hello(protocol.Hello(0, os.getpid(), f"gdrkit {gdrkit.__version__}"))


def _publish(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    asked = protocol.parse_publish(payload)
    client.publish(asked.name, asked.target, handle=asked.share_handle, descriptors=_taken(descriptors))
    return b""


def _unpublish(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    client.unpublish(protocol.parse_name(payload))
    return b""


def _borrow(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    asked = protocol.parse_publish(payload)
    if asked.share_handle:
        raise Refused(errno.EINVAL, "what another process published is borrowed without a handle")
    client.borrow(asked.name, asked.target)
    return b""


def _give_back(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    client.give_back(protocol.parse_name(payload))
    return b""


def _register_file(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    if protocol.parse_number(payload):
        raise Refused(errno.EINVAL, "no flags are defined")
    return protocol.pack_number(client.register_file(_taken(descriptors)[0]))


def _deregister_file(client: Client, payload: bytes, _descriptors: list[int]) -> bytes:
    client.deregister_file(protocol.parse_number(payload))
    return b""


def _punch_hole(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    flags, ranges = protocol.parse_punch(payload)
    client.punch_hole(_taken(descriptors)[0], flags, ranges)
    return b""


def _hard_link(client: Client, payload: bytes, descriptors: list[int]) -> bytes:
    name = protocol.parse_name(payload)
    file, folder = _taken(descriptors)
    client.hard_link(file, folder, name)
    return b""


_ACTIONS: dict[Request, Callable[[Client, bytes, list[int]], bytes]] = {
    Request.HELLO: _hello,
    Request.PUBLISH: _publish,
    Request.UNPUBLISH: _unpublish,
    Request.REGISTER_FILE: _register_file,
    Request.DEREGISTER_FILE: _deregister_file,
    Request.PUNCH_HOLE: _punch_hole,
    Request.HARD_LINK: _hard_link,
    Request.BORROW: _borrow,
    Request.GIVE_BACK: _give_back,
}


def _taken(descriptors: list[int]) -> list[int]:
    taken = list(descriptors)
    descriptors.clear()
    return taken


def _peer_of(connection: socket.socket) -> Peer:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, uid, _gid = _CREDENTIALS.unpack(credentials)
    return Peer(uid, process_id, process_identity(process_id) if process_id > 0 else None)


def _refuse_stranger(connection: socket.socket, peer: Peer) -> None:
    """Answer the first message of another user with EACCES, and no other."""
    data, descriptors = _receive(connection)
    count = len(descriptors)
    _close_all(descriptors)
    if data:
        message = protocol.parse(data, descriptors=count)
        sentence = f"this agent serves user {os.geteuid()}, not {peer.uid}".encode()
        reply = Message(message.request, message.sequence, sentence, status=errno.EACCES)
        connection.send(protocol.pack(reply), socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    return scm_rights.receive(
        connection, length_bytes=protocol.MESSAGE_BYTES_MAX, descriptors_max=protocol.DESCRIPTORS_MAX
    )


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _end(connection: socket.socket) -> None:
    # The client takes the end of its connection for the word that nothing of it is in flight any more, so it sees that
    # only when everything was taken back. Until then no further request comes in.
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError as error:
        if error.errno not in {errno.ENOTCONN, errno.EBADF}:
            raise
