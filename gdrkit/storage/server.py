"""The storage service: accepts clients, keeps their sessions, answers control requests.

Level 4. A thread for each control connection waits for what happens once per file or connection; the bytes of files go
through the native thread of each session.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Self

import gdrkit
from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.storage import messages as ask
from gdrkit.storage._native import engine
from gdrkit.storage.connection import ControlConnection, Place
from gdrkit.storage.control import Request, pack_error, pack_reply, parse_request
from gdrkit.storage.requests import Requests
from gdrkit.storage.wire import FrameType
from gdrkit.verbs import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.storage.store import FileStore

__all__ = ["StorageServer"]

_LOG = logging.getLogger("gdrkit.storage")
_CREDENTIALS = struct.Struct("3i")
# A connection that says nothing sensible for so long is closed; one with a session may be silent for ever.
_GREETING_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 30.0
CONNECTIONS_MAX = 256
SESSIONS_MAX = 64
OUTSTANDING_MAX = 1024
LENGTH_BYTES_MAX = 1 << 30
HANDLES_MAX = 4096


class _Refused(Exception):
    """A greeting that was answered with an error; the connection ends."""


class StorageServer:
    """Serves a store until :meth:`close`; use it as a context manager.

    Parameters
    ----------
    store : FileStore
        What to serve; closed by its owner, after the server.
    place : Place
        Where to listen. Over TCP a client must know the store's token; a unix socket has mode 0600, and who connects
        must be this user or root.
    nic_names : sequence of str
        The server's NICs, which sessions use in turn; empty: all with an active port.
    """

    def __init__(self, store: FileStore, place: Place, *, nic_names: Sequence[str] = ()) -> None:
        self._store = store
        self._fabric = engine().Fabric(list(nic_names))
        self._lock = threading.Lock()
        self._sessions: dict[str, Requests] = {}
        self._threads: dict[threading.Thread, ControlConnection] = {}
        self._closing = False
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._listener = place.listen()
        except BaseException:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            raise
        self._listener.settimeout(0)
        self.place = place
        if place.path is None:
            host, port = self._listener.getsockname()[:2]
            self.place = Place(host=host, port=port)
        self._handle = Handle("storage.server")
        self._acceptor = threading.Thread(target=self._accept, name="gdrkit-serve", daemon=True)
        self._acceptor.start()

    @property
    def nics(self) -> tuple[str, ...]:
        """The NICs that it uses."""
        return tuple(self._fabric.names)

    def close(self) -> None:
        """End all sessions and stop listening; a second close does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.write(self._wake_writer, b"x")
        self._acceptor.join()
        with self._lock:
            threads = dict(self._threads)
        for thread, connection in threads.items():
            connection.hang_up()
            thread.join()
        self._listener.close()
        if self.place.path is not None:
            self.place.path.unlink(missing_ok=True)
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._handle.release()

    def _accept(self) -> None:
        while True:
            readable, _, _ = select.select([self._listener.fileno(), self._wake_reader], [], [])
            if self._wake_reader in readable:
                return
            try:
                end, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                # Out of descriptors: whoever waits is served when one is free again.
                _LOG.error("accept: %s", error)
                select.select([self._wake_reader], (), (), 0.1)
                continue
            self._begin(end)

    def _begin(self, end: socket.socket) -> None:
        end.settimeout(None)
        if end.family == socket.AF_UNIX:
            credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _process, user, _group = _CREDENTIALS.unpack(credentials)
            if user not in {0, os.geteuid()}:
                _LOG.warning("user %d may not connect", user)
                end.close()
                return
        else:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = ControlConnection(end)
        with self._lock:
            if len(self._threads) >= CONNECTIONS_MAX:
                connection.close()
                return
            is_unix = end.family == socket.AF_UNIX
            thread = threading.Thread(target=self._run, args=(connection, is_unix), name="gdrkit-session", daemon=True)
            self._threads[thread] = connection
        thread.start()

    def _run(self, connection: ControlConnection, is_unix: bool) -> None:  # noqa: FBT001 - of a thread.
        try:
            self._serve(connection, is_unix=is_unix)
        except _Refused as error:
            _LOG.warning("a client is refused: %s", error)
        except (GdrkitError, OSError) as error:
            _LOG.warning("a connection ends: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._threads.pop(threading.current_thread(), None)

    def _serve(self, connection: ControlConnection, *, is_unix: bool) -> None:
        connection.set_timeout(_GREETING_TIMEOUT_S)
        received = connection.receive(FrameType.CONTROL_REQUEST)
        if received is None:
            return
        payload, sequence = received
        request = parse_request(payload)
        if isinstance(request, ask.Attach):
            self._attach(connection, request, sequence)
            return
        if not isinstance(request, ask.Hello):
            self._refuse(connection, sequence, ask.ErrorReply(errno.EPROTO, "the first request is hello or attach"))
            return
        self._check_greeting(connection, sequence, request, is_unix=is_unix)
        self._session(connection, request, sequence)

    def _check_greeting(self, connection: ControlConnection, sequence: int, hello: ask.Hello, *, is_unix: bool) -> None:
        if hello.version != ask.PROTOCOL_VERSION:
            text = f"this server speaks version {ask.PROTOCOL_VERSION}, not {hello.version}"
            self._refuse(connection, sequence, ask.ErrorReply(errno.EPROTONOSUPPORT, text))
        # Compared in constant time: how long a wrong one takes says nothing about the right one.
        given = (hello.token or "").encode("utf-8", "surrogateescape")
        if not is_unix and not hmac.compare_digest(given, self._store.token.encode()):
            self._refuse(connection, sequence, ask.ErrorReply(errno.EACCES, "the token is not that of this store"))

    def _refuse(self, connection: ControlConnection, sequence: int, reply: ask.ErrorReply) -> None:
        connection.send(FrameType.CONTROL_REPLY, pack_error(reply), sequence=sequence)
        raise _Refused(reply.message)

    def _attach(self, connection: ControlConnection, request: ask.Attach, sequence: int) -> None:
        with self._lock:
            # 256 random bits: nothing can be learnt from how long the search takes.
            session = self._sessions.get(request.session)
            is_first = session is not None and not session.is_attached
            if session is not None and is_first:
                session.is_attached = True
        if session is None or not is_first:
            self._refuse(connection, sequence, ask.ErrorReply(errno.ESTALE, "there is no such session to attach to"))
            return
        connection.send(FrameType.CONTROL_REPLY, pack_reply(ask.Done()), sequence=sequence)
        connection.set_timeout(None)
        session.start(connection.detach())

    def _session(self, connection: ControlConnection, hello: ask.Hello, sequence: int) -> None:
        secret = secrets.token_hex(32)
        self._end_replaced(hello.replaces)
        try:
            lanes = [Endpoint.from_dict(each) for each in hello.lanes]
            self._check_room()
            native = engine().Session(
                self._store.native,
                self._fabric,
                [lane.to_dict() for lane in lanes],
                outstanding_max=OUTSTANDING_MAX,
                length_bytes_max=LENGTH_BYTES_MAX,
            )
        except OSError as error:
            self._refuse(connection, sequence, ask.ErrorReply(error.errno or errno.EIO, str(error.strerror or error)))
            return
        requests = Requests(self._store, native, handles_max=HANDLES_MAX)
        try:
            with self._lock:
                self._sessions[secret] = requests
            reply = ask.HelloReply(
                version=ask.PROTOCOL_VERSION,
                server=f"gdrkit {gdrkit.__version__}",
                session=secret,
                lanes=tuple(native.lanes),
                limits=ask.Limits(
                    outstanding_max=OUTSTANDING_MAX,
                    length_bytes_max=LENGTH_BYTES_MAX,
                    checksum_given_bytes_max=engine().CHECKSUM_GIVEN_BYTES_MAX,
                    handles_max=HANDLES_MAX,
                    reads_max=native.reads_max,
                ),
                chunk_bytes=self._store.chunk_bytes,
            )
            connection.set_timeout(_SEND_TIMEOUT_S)
            connection.send(FrameType.CONTROL_REPLY, pack_reply(reply), sequence=sequence)
            self._answer(connection, requests)
        finally:
            with self._lock:
                del self._sessions[secret]
            requests.close()

    def _end_replaced(self, secret: str | None) -> None:
        """End the session that a client gave up, which may only have been slow; its own thread takes it away."""
        with self._lock:
            replaced = self._sessions.get(secret or "")
        if replaced is not None:
            replaced.end()

    def _check_room(self) -> None:
        with self._lock:
            if len(self._sessions) >= SESSIONS_MAX:
                raise OSError(errno.ENOBUFS, f"there are {SESSIONS_MAX} sessions already")

    def _answer(self, connection: ControlConnection, requests: Requests) -> None:
        watched = select.poll()
        watched.register(connection.fileno(), select.POLLIN)
        watched.register(requests.ended_fd, select.POLLIN)
        while True:
            if any(number == requests.ended_fd for number, _events in watched.poll()):
                return
            received = connection.receive(FrameType.CONTROL_REQUEST)
            if received is None:
                return
            payload, sequence = received
            request: Request = parse_request(payload)
            try:
                reply = pack_reply(requests.answer(request, connection.descriptors))
            except OSError as error:
                reply = pack_error(ask.ErrorReply(error.errno or errno.EIO, str(error.strerror or error)[:1000]))
            except UsageError as error:
                if error.reason is not Reason.BAD_ARGUMENT:
                    raise
                reply = pack_error(ask.ErrorReply(errno.EINVAL, error.message[:1000]))
            connection.send(FrameType.CONTROL_REPLY, reply, sequence=sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
