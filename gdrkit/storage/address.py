"""Addresses of storage servers, written as ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ServerAddress"]

# Largest number of connections that the kernel completes before the server calls accept() for them.
_BACKLOG = 512
_DEFER_ACCEPT_S = 10
_HOST_AND_PORT_PATTERN = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server: a path, or a host and a port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address for ``unix:PATH``, ``HOST:PORT`` or ``[IPV6]:PORT``.

        Raises
        ------
        UsageError
            MALFORMED: the text has another form.
        """
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=Path(text.removeprefix("unix:")))
        address_match = _HOST_AND_PORT_PATTERN.fullmatch(text)
        if address_match is None or int(address_match["port"]) > 65535:  # noqa: PLR2004 - a port has 16 bits.
            message = f"the address must be HOST:PORT or unix:PATH, not {text!r}"
            raise UsageError(message, reason=Reason.MALFORMED)
        return cls(host=address_match["ipv6"] or address_match["host"], port=int(address_match["port"]))

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self) -> socket.socket:
        """Return a listening socket. A unix socket has mode 0600."""
        if self.path is None:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            listening_socket = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
            # accept() returns a TCP connection when its first bytes have arrived, or after _DEFER_ACCEPT_S without
            # bytes.
            listening_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_ACCEPT_S)
            return listening_socket
        listening_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _make_short_path(self.path) as short_path:
                self._remove_stale_socket(short_path)
                # bind() gives the socket file the mode of the socket's descriptor, so no other user can ever connect.
                # A umask would have the same effect, but it applies to all threads of the process.
                os.fchmod(listening_socket.fileno(), 0o600)
                listening_socket.bind(short_path)
            listening_socket.listen(_BACKLOG)
        except BaseException:
            listening_socket.close()
            raise
        return listening_socket

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a socket that is connected to the server. It keeps the timeout `timeout_s`."""
        if self.path is None:
            connected_socket = socket.create_connection((self.host, self.port), timeout=timeout_s)
            connected_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected_socket
        connected_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected_socket.settimeout(timeout_s)
        try:
            with _make_short_path(self.path) as short_path:
                connected_socket.connect(short_path)
        except BaseException:
            connected_socket.close()
            raise
        return connected_socket

    @staticmethod
    def _remove_stale_socket(path: str) -> None:
        """Remove the socket file of a dead server. If a server listens there, the file stays, and bind() fails."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe_socket, contextlib.suppress(FileNotFoundError):
            try:
                probe_socket.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()


@contextlib.contextmanager
def _make_short_path(path: Path) -> Iterator[str]:
    """Yield a path of the same file through /proc, which fits into the 108 bytes of a unix socket address."""
    folder_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder_fd}/{path.name}"
    finally:
        os.close(folder_fd)
