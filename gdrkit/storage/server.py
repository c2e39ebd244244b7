"""The storage server: it accepts clients, holds their sessions and executes control requests.

A Python thread per control connection executes the requests, such as open and stat. The native thread of each session
moves the bytes of files.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import select
import threading
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

import gdrkit
from gdrkit.children import join_threads
from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.storage import messages
from gdrkit.storage._native import engine
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.control import Request, pack_error, pack_reply, parse_request
from gdrkit.storage.listener import ConnectionRefused, Listener
from gdrkit.storage.requests import RequestHandler
from gdrkit.storage.wire import FrameType
from gdrkit.verbs import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.storage.connection import ControlConnection
    from gdrkit.storage.store import FileStore

__all__ = ["StorageServer"]

_LOG = logging.getLogger("gdrkit.storage")
# Longest time without progress in a frame that has begun.
_FRAME_TIMEOUT_S = 30.0
# Longest time for which close() waits for the threads, unless its caller passes another time.
_END_TIMEOUT_S = 60.0
# The limits of a server. The last three apply to each session, and the reply to hello reports them.
CONNECTIONS_MAX = 256
SESSIONS_MAX = 64
OUTSTANDING_MAX = 1024
LENGTH_BYTES_MAX = 1 << 30
HANDLES_MAX = 4096


class StorageServer:
    """A server of a store, which runs until :meth:`close`. Use it as a context manager.

    Parameters
    ----------
    store : FileStore
        The store. Its owner closes it after the server.
    address : ServerAddress
        Address to listen on. Over TCP, a client must know the store's token. A unix socket has mode 0600, and its peer
        must be this user or root.
    nic_names : sequence of str
        Names of the NICs of the server, which sessions use in turn. Empty: all NICs with an active port.

    Raises
    ------
    OSError
        A NIC cannot be opened, or the server cannot listen on `address`.
    SetupMissing
        libibverbs is not installed.
    """

    def __init__(self, store: FileStore, address: ServerAddress, *, nic_names: Sequence[str] = ()) -> None:
        self._store = store
        self._fabric = engine.Fabric(list(nic_names))
        self._lock = threading.Lock()
        self._session_by_secret: dict[str, RequestHandler] = {}
        self._connection_by_thread: dict[threading.Thread, ControlConnection] = {}
        self._is_closing = False
        listening_socket = address.listen()
        self.address = address
        if address.path is None:
            host, port = listening_socket.getsockname()[:2]
            self.address = ServerAddress(host=host, port=port)
        self._listener = Listener(listening_socket, self._admit)
        self._live_handle = Handle("storage.server")
        self._listener_thread = threading.Thread(target=self._listener.run, name="gdrkit-serve", daemon=True)
        self._listener_thread.start()

    @property
    def nics(self) -> tuple[str, ...]:
        """Names of the NICs that the server uses."""
        return tuple(self._fabric.names)

    def close(self, *, timeout_s: float = _END_TIMEOUT_S) -> None:
        """End all sessions and stop listening. A second close does nothing.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: a session still waits for the file system after `timeout_s`. The session still
            uses the store, so the store must stay open. A further call of this method waits again.
        """
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        try:
            self._end_threads(timeout_s)
        except BaseException:
            self._is_closing = False
            raise
        self._listener.close()
        if self.address.path is not None:
            self.address.path.unlink(missing_ok=True)
        self._live_handle.release()

    def _end_threads(self, timeout_s: float) -> None:
        """Stop accepting, shut all connections down, and wait for the threads."""
        self._listener.stop()
        join_threads([self._listener_thread], timeout_s=timeout_s)
        with self._lock:
            connection_by_thread = dict(self._connection_by_thread)
        for connection in connection_by_thread.values():
            connection.shut_down()
        join_threads(connection_by_thread, timeout_s=timeout_s)

    def _admit(self, connection: ControlConnection, payload: bytes, sequence: int) -> None:
        """Check the first request of a connection. If the request is valid, start a thread for the connection."""
        try:
            request = parse_request(payload)
        except UsageError as error:
            if error.reason is Reason.BAD_ARGUMENT:
                self._refuse(
                    connection, sequence, errno.EINVAL, error.message, log_text="the request has an invalid file name"
                )
            raise
        run_connection: Callable[[], None]
        match request:
            case messages.StorageHello():
                self._check_hello(connection, sequence, request)
                run_connection = partial(self._serve_session, connection, request, sequence)
            case messages.Attach():
                session = self._find_session(connection, sequence, request)
                run_connection = partial(self._attach, connection, session, sequence)
            case _:
                self._refuse(connection, sequence, errno.EPROTO, "the first request must be hello or attach")
        thread = threading.Thread(
            target=self._run_thread, args=(connection, run_connection), name="gdrkit-session", daemon=True
        )
        with self._lock:
            if len(self._connection_by_thread) >= CONNECTIONS_MAX:
                message = f"the server already has {CONNECTIONS_MAX} connections, its limit"
                raise ConnectionRefused(message)
            self._connection_by_thread[thread] = connection
        connection.set_timeout(_FRAME_TIMEOUT_S)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                del self._connection_by_thread[thread]
            message = "the server cannot start a thread"
            raise ConnectionRefused(message) from error

    def _run_thread(self, connection: ControlConnection, run_connection: Callable[[], None]) -> None:
        """Serve a connection by `run_connection`, and close it at the end."""
        try:
            run_connection()
        except (GdrkitError, OSError) as error:
            _LOG.warning("a connection failed: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._connection_by_thread.pop(threading.current_thread(), None)

    def _check_hello(self, connection: ControlConnection, sequence: int, hello: messages.StorageHello) -> None:
        """Refuse a hello with another protocol version or a wrong token."""
        if hello.version != messages.PROTOCOL_VERSION:
            message = f"the protocol version must be {messages.PROTOCOL_VERSION}, not {hello.version}"
            self._refuse(connection, sequence, errno.EPROTONOSUPPORT, message)
        # The comparison takes constant time, so that its duration reveals nothing about the token.
        token = (hello.token or "").encode("utf-8", "surrogatepass")
        if not connection.is_unix and not hmac.compare_digest(token, self._store.token.encode()):
            self._refuse(connection, sequence, errno.EACCES, "the token is not the token of this store")

    def _find_session(self, connection: ControlConnection, sequence: int, request: messages.Attach) -> RequestHandler:
        """Return the session that a data connection belongs to, and mark it as attached. Refuse an unknown secret."""
        with self._lock:
            # The secret has 256 random bits, so the duration of the search reveals nothing useful.
            session = self._session_by_secret.get(request.session)
            if session is not None and not session.is_attached:
                session.is_attached = True
                return session
        return self._refuse(
            connection, sequence, errno.ESTALE, "no session with this secret waits for its data connection"
        )

    @staticmethod
    def _refuse(
        connection: ControlConnection, sequence: int, error_number: int, message: str, *, log_text: str = ""
    ) -> NoReturn:
        """Reply with `message`, and raise ConnectionRefused with `log_text`, or if that is empty, with `message`."""
        connection.send(
            FrameType.CONTROL_REPLY, pack_error(messages.ErrorReply(error_number, message)), sequence=sequence
        )
        raise ConnectionRefused(log_text or message)

    @staticmethod
    def _attach(connection: ControlConnection, session: RequestHandler, sequence: int) -> None:
        """Start the transfers of a session on its data connection."""
        connection.send(FrameType.CONTROL_REPLY, pack_reply(messages.Done()), sequence=sequence)
        connection.set_timeout(None)
        session.start(connection.detach_descriptor())

    def _serve_session(self, connection: ControlConnection, hello: messages.StorageHello, sequence: int) -> None:
        """Create a session, and execute its requests until one of its connections ends."""
        secret = secrets.token_hex(32)
        self._end_replaced_session(hello.replaces)
        try:
            endpoints = [Endpoint.from_dict(endpoint_fields) for endpoint_fields in hello.lanes]
            self._check_session_limit()
            native_session = engine.Session(
                self._store.native,
                self._fabric,
                [endpoint.to_dict() for endpoint in endpoints],
                outstanding_max=OUTSTANDING_MAX,
                length_bytes_max=LENGTH_BYTES_MAX,
            )
        except OSError as error:
            reply = messages.ErrorReply(error.errno or errno.EIO, str(error.strerror or error))
            connection.send(FrameType.CONTROL_REPLY, pack_error(reply), sequence=sequence)
            _LOG.warning("a session was refused: %s", reply.message)
            return
        handler = RequestHandler(self._store, native_session, handles_max=HANDLES_MAX)
        try:
            with self._lock:
                self._session_by_secret[secret] = handler
            hello_reply = messages.HelloReply(
                version=messages.PROTOCOL_VERSION,
                server=f"gdrkit {gdrkit.__version__}",
                session=secret,
                lanes=tuple(native_session.endpoints),
                limits=messages.SessionLimits(
                    outstanding_max=OUTSTANDING_MAX,
                    length_bytes_max=LENGTH_BYTES_MAX,
                    checksum_given_bytes_max=engine.CHECKSUM_GIVEN_BYTES_MAX,
                    handles_max=HANDLES_MAX,
                    reads_max=native_session.reads_max,
                ),
                chunk_bytes=self._store.chunk_bytes,
            )
            connection.send(FrameType.CONTROL_REPLY, pack_reply(hello_reply), sequence=sequence)
            self._serve_requests(connection, handler)
        finally:
            with self._lock:
                del self._session_by_secret[secret]
            handler.close()

    def _end_replaced_session(self, secret: str | None) -> None:
        """End the session that a client gave up. The thread of that session removes it from `_session_by_secret`.

        The old session may only have been slow. It must not execute a request after the new session has begun.
        """
        with self._lock:
            replaced_session = self._session_by_secret.get(secret or "")
        if replaced_session is not None:
            replaced_session.end()

    def _check_session_limit(self) -> None:
        with self._lock:
            if len(self._session_by_secret) >= SESSIONS_MAX:
                raise OSError(errno.ENOBUFS, f"the server already has {SESSIONS_MAX} sessions, its limit")

    def _serve_requests(self, connection: ControlConnection, handler: RequestHandler) -> None:
        """Execute requests until the client or the native session ends."""
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(handler.ended_fd, select.POLLIN)
        while True:
            if any(descriptor == handler.ended_fd for descriptor, _events in poll.poll()):
                return
            frame = connection.receive(FrameType.CONTROL_REQUEST)
            if frame is None:
                return
            payload, sequence = frame
            try:
                request: Request = parse_request(payload)
                reply = pack_reply(handler.execute(request, connection.descriptors))
            except OSError as error:
                reply = pack_error(messages.ErrorReply(error.errno or errno.EIO, str(error.strerror or error)[:1000]))
            except UsageError as error:
                if error.reason is not Reason.BAD_ARGUMENT:
                    raise
                reply = pack_error(messages.ErrorReply(errno.EINVAL, error.message[:1000]))
            connection.send(FrameType.CONTROL_REPLY, reply, sequence=sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
