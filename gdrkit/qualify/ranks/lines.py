"""Messages between rank 0, the ranks and their children: one JSON object a line, each with a deadline.

Level 6.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    import socket

__all__ = ["Gone", "Lines"]

_PART_BYTES = 1 << 16
# Facts of a large machine are some hundred KiB.
_LINE_BYTES_MAX = 1 << 26


class Gone(Exception):
    """The other side has closed, or has died."""


class Lines:
    """One end of a stream socket, which it owns."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = b""

    def send(self, message: dict[str, Any], *, limit_s: float) -> None:
        """Send one message.

        Raises
        ------
        Gone
            Nobody is there any more.
        TimeoutError
            The other side takes nothing.
        """
        self._socket.settimeout(limit_s)
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionError) as error:
            raise Gone from error

    def receive(self, *, limit_s: float | None) -> dict[str, Any]:
        """The next message.

        Raises
        ------
        Gone
            There will be none.
        TimeoutError
            There was none in time, or a part of one.
        UsageError
            ``MALFORMED``: it is no message.
        """
        end = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._received:
            remaining = None if end is None else end - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            try:
                part = self._socket.recv(_PART_BYTES)
            except ConnectionError as error:
                raise Gone from error
            if not part:
                raise Gone
            self._received += part
            if len(self._received) > _LINE_BYTES_MAX:
                message = f"a message is longer than {_LINE_BYTES_MAX} bytes"
                raise UsageError(message, reason=Reason.MALFORMED)
        line, _, self._received = self._received.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError as error:
            message = f"no message: {error}"
            raise UsageError(message, reason=Reason.MALFORMED) from error
        if not isinstance(found, dict):
            message = f"no message: {found!r}"
            raise UsageError(message, reason=Reason.MALFORMED)
        return found

    def close(self) -> None:
        """Close it."""
        self._socket.close()
