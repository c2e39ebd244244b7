"""Socket for the messages between rank 0, the ranks and their measuring children. A message is one line of JSON.

Untrusted peers can connect to the port of rank 0. Therefore a call can have a timeout, the length of a message is
limited, and a line that is not a JSON object is an error.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    import socket

__all__ = ["MessageSocket", "PeerGone"]

_RECEIVE_BYTES = 1 << 16
# Largest length of a message, 64 MiB. The longest message contains the facts of a machine: several hundred KiB for a
# large machine.
_MESSAGE_BYTES_MAX = 1 << 26


class PeerGone(Exception):
    """The peer has closed the connection, has died, or is no longer reachable."""


class MessageSocket:
    """A connection that sends and receives messages over a stream socket. :meth:`close` also closes the socket."""

    def __init__(self, connected_socket: socket.socket) -> None:
        self._socket = connected_socket
        self._receive_buffer = bytearray()
        # Number of bytes at the start of `_receive_buffer` that are known to contain no end of a line.
        self._searched_bytes = 0

    def fileno(self) -> int:
        """Return the descriptor, so that a selector can wait for this socket."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], *, timeout_s: float) -> None:
        """Send one message.

        Raises
        ------
        PeerGone
            The peer has closed the connection.
        TimeoutError
            The peer did not read the message in time. This method then closes the connection, because a part of the
            message may have been sent, and the peer would take the next message for the remaining part.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            self.close()
            raise
        except OSError as error:
            raise PeerGone from error

    def receive(self, *, timeout_s: float | None, length_bytes_max: int = _MESSAGE_BYTES_MAX) -> dict[str, Any]:
        """Return the next message.

        Parameters
        ----------
        timeout_s : float or None
            Longest wait. None waits without a limit, and 0 reads only data that has already arrived.
        length_bytes_max : int
            Length of the longest accepted message.

        Raises
        ------
        PeerGone
            The peer has closed the connection.
        TimeoutError
            No complete message arrived in time. The next call continues with the received part.
        UsageError
            ``MALFORMED``: the data is not a message.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (length_bytes := self._receive_buffer.find(b"\n", self._searched_bytes)) < 0:
            self._searched_bytes = len(self._receive_buffer)
            if self._searched_bytes > length_bytes_max:
                break
            self._receive_buffer += self._receive_part(
                None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            )
        if not 0 <= length_bytes <= length_bytes_max:
            message = f"a message is longer than {length_bytes_max} bytes"
            raise UsageError(message, reason=Reason.MALFORMED)
        line = bytes(self._receive_buffer[:length_bytes])
        del self._receive_buffer[: length_bytes + 1]
        self._searched_bytes = 0
        data = serialization.parse_json(line, where="a message")
        if not isinstance(data, dict):
            message = f"a message: expected a JSON object, not {type(data).__name__}"
            raise UsageError(message, reason=Reason.MALFORMED)
        return data

    def close(self) -> None:
        """Close the connection. Later calls that send or receive raise :class:`PeerGone`."""
        self._socket.close()

    def _receive_part(self, timeout_s: float | None) -> bytes:
        try:
            self._socket.settimeout(timeout_s)
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError as error:
            raise TimeoutError from error
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone from error
        if not data:
            raise PeerGone
        return data
