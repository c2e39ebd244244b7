"""A session with a storage server: its two connections, and one queue pair for each lane.

Level 5. The agent is the target of all transfers, so nothing is ever posted here: the queue pairs exist to be reached.
Closing a session puts them into the error state first, so that afterwards the server can reach no memory.
"""

from __future__ import annotations

import errno
import socket
import threading
from typing import TYPE_CHECKING, Self, TypeVar

from gdrkit.errors import Reason, UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.storage import messages
from gdrkit.storage.control import Request, pack_request, parse_reply
from gdrkit.storage.wire import HEADER_BYTES, FrameType, check_payload, pack_control, parse_header
from gdrkit.usrbio.refusal import Refused
from gdrkit.verbs import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.usrbio.memory import Nics
    from gdrkit.verbs import QueuePair

__all__ = ["Session"]

_R = TypeVar("_R")
_CLIENT = "gdrkit agent"


class Session:
    """Two connections and the lanes; for use by any number of threads.

    Parameters
    ----------
    connect : callable
        Gives a new socket that is connected to the server.
    nics : Nics
        A lane is made for each of them.
    token : str or None
        What the server wants over TCP.
    timeout_ms : float
        How long a reply of the server may take.
    replaces : str or None
        The `secret` of the session before, which the server ends first if it still has it.

    Attributes
    ----------
    secret : str
        What the server knows this session by.
    lanes : tuple of int
        The number of the NIC of each lane.
    limits : Limits
        What the server takes.
    was_ended_by_memory : bool
        Whether it has ended because a NIC refused the memory of one operation; set by its owner.
    data : socket
        The data connection; :meth:`close` ends it, also for a duplicate of its descriptor.
    """

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        nics: Nics,
        *,
        token: str | None,
        timeout_ms: float,
        replaces: str | None = None,
    ) -> None:
        self.was_ended_by_memory = False
        self._lock = threading.Lock()
        self._sequence = 0
        self._parts = ReleaseStack()
        self._pairs: list[QueuePair] = []
        try:
            self._control = self._connected(connect, timeout_ms)
            self._make_lanes(nics)
            reply = self._hello(token, replaces)
            self.limits, self.secret = reply.limits, reply.session
            self.data = self._connected(connect, timeout_ms)
            self._exchange(self.data, messages.Attach(session=reply.session), messages.Done)
            self.data.settimeout(None)
        except BaseException as error:
            self._parts.run_after(error)
            raise

    def ask(self, request: Request, reply: type[_R], *, descriptors: Sequence[int] = ()) -> _R:
        """One request on the control connection.

        Raises
        ------
        Refused
            The server's errno; EREMOTEIO: the connection is over.
        """
        with self._lock:
            try:
                return self._exchange(self._control, request, reply, descriptors)
            except (OSError, EOFError, UsageError) as error:
                # Nobody knows where the next reply begins; what is in flight ends with the session.
                self.interrupt()
                message = f"the storage server did not answer {type(request).__name__.lower()}: {error}"
                raise Refused(errno.EREMOTEIO, message) from error

    def interrupt(self) -> None:
        """End both connections; who reads them sees the end."""
        for end in (self._control, self.data):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                if error.errno not in {errno.ENOTCONN, errno.EBADF}:
                    raise

    def close(self) -> None:
        """Fail and destroy the queue pairs, end the connections; a second close does nothing."""
        self._parts.run()

    def _make_lanes(self, nics: Nics) -> None:
        self.lanes = tuple(range(min(len(nics.all), messages.LANES_MAX)))
        for number in self.lanes:
            nic = nics.all[number]
            queue = nic.completion_queue(depth=16)
            self._parts.push(queue.close)
            pair = nic.queue_pair(queue, sends_max=1, receives_max=1)
            self._parts.push(pair.close)
            self._pairs.append(pair)

    def _hello(self, token: str | None, replaces: str | None) -> messages.HelloReply:
        endpoints = tuple(pair.endpoint().to_dict() for pair in self._pairs)
        hello = messages.Hello(messages.PROTOCOL_VERSION, _CLIENT, endpoints, token, replaces)
        reply = self._exchange(self._control, hello, messages.HelloReply)
        if len(reply.lanes) != len(self._pairs):
            message = f"the server answered {len(self._pairs)} lanes with {len(reply.lanes)}"
            raise UsageError(message, reason=Reason.MALFORMED)
        for pair, theirs in zip(self._pairs, reply.lanes, strict=True):
            pair.connect(Endpoint.from_dict(theirs), reads_max=reply.limits.reads_max)
            self._parts.push(pair.fail)
        return reply

    def _connected(self, connect: Callable[[], socket.socket], timeout_ms: float) -> socket.socket:
        made = connect()
        self._parts.push(made.close)
        made.settimeout(timeout_ms / 1000)
        return made

    def _exchange(
        self, connection: socket.socket, request: Request, kind: type[_R], descriptors: Sequence[int] = ()
    ) -> _R:
        self._sequence += 1
        frame = pack_control(FrameType.CONTROL_REQUEST, pack_request(request), sequence=self._sequence)
        sent = socket.send_fds(connection, [frame], list(descriptors)) if descriptors else 0
        connection.sendall(frame[sent:])
        header = parse_header(_read(connection, HEADER_BYTES))
        if header.type is not FrameType.CONTROL_REPLY or header.sequence != self._sequence:
            message = f"the server answered with {header.type.name} {header.sequence}"
            raise UsageError(message, reason=Reason.MALFORMED)
        payload = _read(connection, header.length)
        check_payload(header, payload)
        reply = parse_reply(payload, kind)
        if isinstance(reply, messages.ErrorReply):
            raise Refused(reply.errno, reply.message)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            message = "it closed the connection"
            raise EOFError(message)
        data += part
    return bytes(data)
