"""Addresses of storage servers. The text of an address is ``HOST:PORT``, ``[V6]:PORT`` or ``unix:PATH``."""

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

_BACKLOG = 512
_DEFER_ACCEPT_S = 10
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server: a path, or a host and a port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address for ``unix:PATH``, ``HOST:PORT`` or ``[V6]:PORT``."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=Path(text.removeprefix("unix:")))
        match = _HOST_AND_PORT.fullmatch(text)
        if match is None or int(match["port"]) > 65535:  # noqa: PLR2004 - a port has 16 bits.
            message = f"the address must be HOST:PORT or unix:PATH, not {text!r}"
            raise UsageError(message, reason=Reason.MALFORMED)
        return cls(host=match["v6"] or match["host"], port=int(match["port"]))

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self) -> socket.socket:
        """Return a listening socket. The socket of a path has mode 0600."""
        if self.path is None:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
            # accept() then returns connections whose first bytes have arrived, or that have sent none during this time.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_ACCEPT_S)
            return listener
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_name(self.path) as name:
                self._remove_stale_socket(name)
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
            connected = socket.create_connection((self.host, self.port), timeout=timeout_s)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(timeout_s)
        try:
            with _short_name(self.path) as name:
                connected.connect(name)
        except BaseException:
            connected.close()
            raise
        return connected

    @staticmethod
    def _remove_stale_socket(name: str) -> None:
        """Remove the socket file of a dead server. If a server listens on it, the file stays, and bind fails."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(FileNotFoundError):
            try:
                probe.connect(name)
            except ConnectionRefusedError:
                Path(name).unlink()


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """Yield a name of the socket that fits into the 108 bytes of a socket address, however long its path is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
