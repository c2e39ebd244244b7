"""Messages between rank 0, the ranks and their children: one JSON object per line, each with a deadline.

An untrusted peer can also send data over TCP. Therefore a message is read up to a limit, and is a JSON object or an
error.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    import socket

__all__ = ["Gone", "Lines"]

_PART_BYTES = 1 << 16
# The facts of a large machine have some hundred KiB.
_LINE_BYTES_MAX = 1 << 26


class Gone(Exception):
    """The other side has closed the connection, has died, or cannot be reached any more."""


class Lines:
    """One end of a stream socket. It owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._searched_bytes = 0

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], *, limit_s: float) -> None:
        """Send one message.

        Raises
        ------
        Gone
            The other side is gone.
        TimeoutError
            The other side does not read. A part of the message may have been sent, so the connection is closed: the
            next message would be read as the rest.
        """
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            self.close()
            raise
        except OSError as error:
            raise Gone from error

    def receive(self, *, limit_s: float | None, length_bytes_max: int = _LINE_BYTES_MAX) -> dict[str, Any]:
        """Return the next message.

        Parameters
        ----------
        limit_s : float or None
            Longest wait; 0 reads only what has arrived.
        length_bytes_max : int
            Longest accepted message.

        Raises
        ------
        Gone
            The other side is gone.
        TimeoutError
            No complete message arrived in time. The received part is kept.
        UsageError
            ``MALFORMED``: the data is not a message.
        """
        end = None if limit_s is None else time.monotonic() + limit_s
        while (length_bytes := self._received.find(b"\n", self._searched_bytes)) < 0:
            self._searched_bytes = len(self._received)
            if self._searched_bytes > length_bytes_max:
                break
            self._received += self._part(None if end is None else max(0.0, end - time.monotonic()))
        if not 0 <= length_bytes <= length_bytes_max:
            message = f"a message is longer than {length_bytes_max} bytes"
            raise UsageError(message, reason=Reason.MALFORMED)
        line = bytes(self._received[:length_bytes])
        del self._received[: length_bytes + 1]
        self._searched_bytes = 0
        found = serialization.parse_json(line, where="a message")
        if not isinstance(found, dict):
            message = f"a message: expected an object, found {type(found).__name__}"
            raise UsageError(message, reason=Reason.MALFORMED)
        return found

    def close(self) -> None:
        """Close the connection. Later calls that send or receive raise :class:`Gone`."""
        self._socket.close()

    def _part(self, limit_s: float | None) -> bytes:
        try:
            self._socket.settimeout(limit_s)
            part = self._socket.recv(_PART_BYTES)
        except BlockingIOError as error:
            raise TimeoutError from error
        except TimeoutError:
            raise
        except OSError as error:
            raise Gone from error
        if not part:
            raise Gone
        return part
