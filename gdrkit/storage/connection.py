"""Control connections: frames over a TCP or unix socket, and the addresses of servers.

The text of an address is ``HOST:PORT`` or ``unix:PATH``.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit import scm_rights
from gdrkit.errors import BrokenResource, Reason, UsageError
from gdrkit.storage.wire import HEADER_BYTES, FrameType, Header, check_payload, pack_control, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ControlConnection", "Place"]

_DESCRIPTORS_MAX = 4
_BACKLOG = 512
_DEFER_ACCEPT_S = 10
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a server: a path, or a host and a port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address for ``unix:PATH``, ``HOST:PORT`` or ``[V6]:PORT``."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=Path(text.removeprefix("unix:")))
        found = _HOST_AND_PORT.fullmatch(text)
        if found is None or int(found["port"]) > 65535:  # noqa: PLR2004 - a port has 16 bits.
            message = f"{text!r} is neither HOST:PORT nor unix:PATH"
            raise UsageError(message, reason=Reason.MALFORMED)
        return cls(host=found["v6"] or found["host"], port=int(found["port"]))

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self) -> socket.socket:
        """Return a listening socket. The socket of a path has mode 0600."""
        if self.path is None:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            made = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
            # accept() then returns connections whose first bytes have arrived, or that have sent none during this time.
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_ACCEPT_S)
            return made
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(self.path) as name:
                self._remove_left(name)
                # bind creates the file with the mode of the socket, so the mode is never wider. The umask would do the
                # same, but it belongs to all threads of the process.
                os.fchmod(listener.fileno(), 0o600)
                listener.bind(name)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a connected socket."""
        if self.path is None:
            made = socket.create_connection((self.host, self.port), timeout=timeout_s)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(timeout_s)
        try:
            with _short(self.path) as name:
                made.connect(name)
        except BaseException:
            made.close()
            raise
        return made

    @staticmethod
    def _remove_left(name: str) -> None:
        """Remove the socket of a server that has died. A socket of a running server is kept, and bind fails."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, contextlib.suppress(FileNotFoundError):
            try:
                asking.connect(name)
            except ConnectionRefusedError:
                Path(name).unlink()


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of the socket that fits into the 108 bytes of an address, for any length of its folder's path."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class ControlConnection:
    """A sender and receiver of control frames. It owns its socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._is_unix = end.family == socket.AF_UNIX
        # The part of the next frame that has arrived: its header, and bytes of the part that follows.
        self._header: Header | None = None
        self._arrived = bytearray()
        # Descriptors that arrived with the last frame (SCM_RIGHTS) and were not taken.
        self.descriptors: list[int] = []

    @property
    def is_unix(self) -> bool:
        """Whether it is a unix socket, for which the kernel reports the peer's credentials."""
        return self._is_unix

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the longest time to wait for a part of a frame."""
        self._socket.settimeout(timeout_s)

    def send(self, kind: FrameType, payload: bytes, *, sequence: int, descriptor: int | None = None) -> None:
        """Send one frame. Raises OSError if the peer is gone."""
        data = pack_control(kind, payload, sequence=sequence)
        sent = 0 if descriptor is None else socket.send_fds(self._socket, [data], [descriptor])
        self._socket.sendall(data[sent:])

    def receive(self, kind: FrameType) -> tuple[bytes, int] | None:
        """Return payload and sequence of the next frame, or None if the peer has ended the connection between frames.

        Raises
        ------
        UsageError
            MALFORMED: the frame is invalid, or has more descriptors than allowed.
        BrokenResource
            The peer ended the connection within a frame.
        TimeoutError
            Nothing arrived in time.
        """
        self.close_descriptors()
        try:
            return self._frame(kind)
        except BaseException:
            self.close_descriptors()
            raise

    def receive_ready(self, kind: FrameType) -> tuple[bytes, int] | None:
        """Read the next frame from a non-blocking socket. Return None while the frame is incomplete.

        Raises
        ------
        UsageError, BrokenResource
            See :meth:`receive`. BrokenResource also if the peer ended the connection before the frame.
        """
        try:
            frame = self._frame(kind)
        except BlockingIOError:
            return None
        except BaseException:
            self.close_descriptors()
            raise
        if frame is None:
            message = "the other side ended before a frame"
            raise BrokenResource(message, reason=Reason.PEER_GONE)
        return frame

    def take(self) -> socket.socket:
        """Return the socket, which the caller owns from now on. This connection is closed."""
        self.close_descriptors()
        taken = socket.socket(fileno=self._socket.detach())
        taken.settimeout(None)
        return taken

    def detach(self) -> int:
        """Return the descriptor of the socket, which the caller owns from now on."""
        self.close_descriptors()
        return self._socket.detach()

    def hang_up(self) -> None:
        """Shut the socket down, which wakes every thread that waits on it."""
        with contextlib.suppress(OSError):  # The connection may have ended already.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.close_descriptors()
        self._socket.close()

    def close_descriptors(self) -> None:
        """Close the descriptors that arrived and were not taken."""
        descriptors, self.descriptors = self.descriptors, []
        scm_rights.close_all(descriptors)

    def _frame(self, kind: FrameType) -> tuple[bytes, int] | None:
        """Continue the next frame where the last call stopped; return None at the end of the connection."""
        if self._header is None:
            if not self._fill(HEADER_BYTES):
                if not self._arrived:
                    return None
                raise _ended_within()
            header = parse_header(self._taken())
            if header.type is not kind:
                message = f"frame: {header.type.name} where {kind.name} was expected"
                raise UsageError(message, reason=Reason.MALFORMED)
            self._header = header
        header = self._header
        if not self._fill(header.length):
            raise _ended_within()
        self._header = None
        payload = self._taken()
        check_payload(header, payload)
        return payload, header.sequence

    def _fill(self, length_bytes: int) -> bool:
        """Receive until `length_bytes` have arrived. Return False if the peer has ended the connection before."""
        while len(self._arrived) < length_bytes:
            part = self._some(length_bytes - len(self._arrived))
            if not part:
                return False
            self._arrived += part
        return True

    def _taken(self) -> bytes:
        taken, self._arrived = bytes(self._arrived), bytearray()
        return taken

    def _some(self, length_bytes: int) -> bytes:
        if not self._is_unix:
            return self._socket.recv(length_bytes)
        left = _DESCRIPTORS_MAX - len(self.descriptors)
        data, descriptors = scm_rights.receive(self._socket, length_bytes=length_bytes, descriptors_max=left)
        self.descriptors += descriptors
        return data


def _ended_within() -> BrokenResource:
    return BrokenResource("the other side ended within a frame", reason=Reason.PEER_GONE)
