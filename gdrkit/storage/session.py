"""A session with a storage server: a control connection, a data connection and one queue pair per NIC.

:class:`~gdrkit.storage.client.StorageClient` and the agent of :mod:`gdrkit.usrbio` use :class:`StorageSession`.

The server is the initiator of all transfers. The client posts no work requests. Its queue pairs only execute the RDMA
WRITEs and RDMA READs of the server.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Self, TypeVar

from gdrkit.errors import BrokenResource, Reason, UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.storage import messages
from gdrkit.storage.connection import ControlConnection, shut_down
from gdrkit.storage.control import Request, operation_of, pack_request, parse_reply, storage_error
from gdrkit.storage.wire import FrameType
from gdrkit.verbs import Endpoint

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.verbs import Nic, QueuePair

__all__ = ["StorageSession"]

_Reply = TypeVar("_Reply")


class StorageSession:
    """A session with a storage server. It is thread-safe, except that only one thread may use the data connection.

    Parameters
    ----------
    connect : callable
        Returns a new socket that is connected to the server.
    nics : sequence of Nic
        NICs of the client. The session has one queue pair for each of the first ``messages.LANES_MAX`` NICs, and does
        not use the others.
    client : str
        Name of the client program, for the server's log.
    token : str or None
        Token of the store, which is needed over TCP.
    timeout_ms : float
        Longest time without a reply of the server, in milliseconds.
    replaces : str or None
        The `secret` of the previous session. The server first ends that session if it still exists.

    Attributes
    ----------
    data_socket : socket.socket
        The socket of the data connection, without a timeout. :meth:`close` closes it.
    limits : SessionLimits
        The limits of the server.
    secret : str
        The secret that identifies the session at the server.
    chunk_bytes : int
        Number of bytes of a file that one checksum covers.
    server_program : str
        Name and version of the server program.
    queue_pairs : tuple of QueuePair
        The queue pairs, in the order of `nics`.

    Raises
    ------
    ApiError
        The server refused the session: EACCES (wrong token) or EPROTONOSUPPORT (other version).
    OSError
        The connection failed. TimeoutError: no reply in time.
    BrokenResource, UsageError
        The server ended the connection, or sent an invalid reply.
    """

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        nics: Sequence[Nic],
        *,
        client: str,
        token: str | None,
        timeout_ms: float,
        replaces: str | None = None,
    ) -> None:
        self._connect = connect
        self._timeout_s = timeout_ms / 1000
        self._lock = threading.Lock()
        self._last_sequence = 0  # The sequence number of the newest request.
        self._failure_text = ""  # Why the session has failed; empty while it works.
        self._close_actions = ReleaseStack()
        try:
            self._control = self._open_connection()
            self.queue_pairs = tuple(self._create_queue_pair(nic) for nic in nics[: messages.LANES_MAX])
            reply = self._begin_session(client, token, replaces)
            self.limits, self.secret = reply.limits, reply.session
            self.chunk_bytes, self.server_program = reply.chunk_bytes, reply.server
            data_connection = self._open_connection()
            self._exchange(data_connection, messages.Attach(reply.session), messages.Done)
            self.data_socket = data_connection.detach_socket()
            self._close_actions.push(self.data_socket.close)
        except BaseException as error:
            self._close_actions.run_after(error)
            raise

    def request(self, request: Request, reply_type: type[_Reply], *, descriptors: Sequence[int] = ()) -> _Reply:
        """Send a request of :mod:`gdrkit.storage.messages` and return its reply, which is a `reply_type`.

        `descriptors` are sent with the request. The caller still owns them.

        Raises
        ------
        ApiError
            The error has the errno of the server's reply. EREMOTEIO: the connection failed, and the session has ended.
        """
        operation = operation_of(request)
        with self._lock:
            if self._failure_text:
                raise storage_error(operation, errno.EREMOTEIO, detail=self._failure_text)
            try:
                return self._exchange(self._control, request, reply_type, descriptors)
            except (OSError, UsageError, BrokenResource) as error:
                # Later replies can no longer be matched to requests, so no further request is sent.
                self._failure_text = str(error)
                self.interrupt()
                raise storage_error(operation, errno.EREMOTEIO, detail=self._failure_text) from error

    def interrupt(self) -> None:
        """Shut both connections down, which ends the session and wakes every thread that waits for the server."""
        self._control.shut_down()
        shut_down(self.data_socket)

    def fail_queue_pairs(self) -> None:
        """Put the queue pairs into the error state. Afterwards no transfer of the server can arrive."""
        for queue_pair in self.queue_pairs:
            queue_pair.fail()

    def close(self) -> None:
        """End the session: destroy the queue pairs and close both connections. A second close does nothing."""
        self._close_actions.run()

    def _open_connection(self) -> ControlConnection:
        connection = ControlConnection(self._connect())
        self._close_actions.push(connection.close)
        connection.set_timeout(self._timeout_s)
        return connection

    def _create_queue_pair(self, nic: Nic) -> QueuePair:
        # The client posts no work requests, so the smallest queues are enough.
        completion_queue = nic.completion_queue(depth=1)
        self._close_actions.push(completion_queue.close)
        queue_pair = nic.queue_pair(completion_queue, sends_max=1, receives_max=1)
        self._close_actions.push(queue_pair.close)
        return queue_pair

    def _begin_session(self, client: str, token: str | None, replaces: str | None) -> messages.HelloReply:
        """Send hello with the endpoints of the queue pairs. Connect the queue pairs to the endpoints in the reply."""
        own_endpoints = tuple(queue_pair.endpoint().to_dict() for queue_pair in self.queue_pairs)
        hello = messages.StorageHello(messages.PROTOCOL_VERSION, client, own_endpoints, token, replaces)
        reply = self._exchange(self._control, hello, messages.HelloReply)
        if len(reply.lanes) != len(own_endpoints):
            message = f"hello: the server has {len(reply.lanes)} queue pairs for the {len(own_endpoints)} of the client"
            raise UsageError(message, reason=Reason.MALFORMED)
        for queue_pair, endpoint in zip(self.queue_pairs, reply.lanes, strict=True):
            queue_pair.connect(Endpoint.from_dict(endpoint), reads_max=reply.limits.reads_max)
            self._close_actions.push(queue_pair.fail)
        return reply

    def _exchange(
        self, connection: ControlConnection, request: Request, reply_type: type[_Reply], descriptors: Sequence[int] = ()
    ) -> _Reply:
        """Send a request and return its reply. Raise ApiError if the server replied with an error."""
        self._last_sequence += 1
        payload = pack_request(request)
        connection.send(FrameType.CONTROL_REQUEST, payload, sequence=self._last_sequence, descriptors=descriptors)
        frame = connection.receive(FrameType.CONTROL_REPLY)
        if frame is None:
            message = "the server ended the connection"
            raise BrokenResource(message, reason=Reason.PEER_GONE)
        reply_payload, sequence = frame
        if sequence != self._last_sequence:
            message = f"reply: sequence {sequence} does not match request {self._last_sequence}"
            raise UsageError(message, reason=Reason.MALFORMED)
        reply = parse_reply(reply_payload, reply_type)
        if isinstance(reply, messages.ErrorReply):
            raise storage_error(operation_of(request), reply.errno, detail=reply.message)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
