"""The listener of the storage server: it accepts connections and waits for their first request.

A connection that has not shown its token costs the server one descriptor and no thread. The whole first request has one
deadline. If an address has too many such connections, the listener closes the oldest for the newest. The kernel returns
TCP connections only when their first bytes have arrived (TCP_DEFER_ACCEPT), and the listener reads them at once. So a
client that sends its whole request at once, as the client of gdrkit does, never waits in that list, however many others
do.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import select
import selectors
import socket
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING

from gdrkit.errors import BrokenResource, GdrkitError
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.wire import FrameType

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ConnectionRefused", "Listener"]

_LOG = logging.getLogger("gdrkit.storage")
_CREDENTIALS = struct.Struct("3i")
# Time for the whole first request since the accept, in seconds.
_REQUEST_TIMEOUT_S = 10.0
# Largest number of connections without a first request, for one address and for all. A burst of as many clients of one
# host as there can be sessions does not exceed the first limit.
_WAITING_PER_ADDRESS_MAX = 64
_WAITING_MAX = 128
# Accepts between two checks of the waiting connections, so that new connections cannot displace one whose request has
# arrived.
_ACCEPTS_MAX = 16
_LOG_PERIOD_S = 10.0
_PAUSE_S = 0.1


class ConnectionRefused(Exception):
    """The server replied to the first request with an error. The text is one of a few fixed ones, for the log."""


class _Waiting:
    """A connection whose first request has not arrived."""

    def __init__(self, connection: ControlConnection, address: str) -> None:
        self.connection = connection
        self.address = address
        self.deadline_s = time.monotonic() + _REQUEST_TIMEOUT_S


class _RefusalLog:
    """A counter of refused connections, which logs them in one line per period."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last = ""
        self._next_s = 0.0

    def add(self, reason: str, address: str) -> None:
        self._counts[reason] += 1
        self._last = address

    def next_line_s(self) -> float | None:
        """Return the time of the next line; None while there is nothing to log."""
        return self._next_s if self._counts else None

    def write(self, *, is_last: bool = False) -> None:
        """Log what was counted, if the period is over or `is_last`."""
        now_s = time.monotonic()
        if self._counts and (is_last or now_s >= self._next_s):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._counts.most_common())
            _LOG.warning("connections refused: %d (%s); the last from %s", self._counts.total(), reasons, self._last)
            self._counts.clear()
            self._next_s = now_s + _LOG_PERIOD_S


class Listener:
    """A listener that accepts connections in the thread that calls :meth:`run`, until :meth:`stop`.

    Parameters
    ----------
    listener : socket.socket
        A listening socket, which this object owns. The peer of a unix socket must be this user or root.
    admit : callable
        Called with a connection, its first request and the request's sequence. It takes over the connection, or raises
        ConnectionRefused or a GdrkitError.
    """

    def __init__(self, listener: socket.socket, admit: Callable[[ControlConnection, bytes, int], None]) -> None:
        self._socket = listener
        self._socket.settimeout(0)
        self._admit = admit
        self._waiting: dict[_Waiting, None] = {}
        self._addresses: dict[str, dict[_Waiting, None]] = {}
        self._refusals = _RefusalLog()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    def stop(self) -> None:
        """Make :meth:`run` return. It is thread-safe."""
        os.write(self._wake_writer, b"x")

    def close(self) -> None:
        """Close the listening socket and all waiting connections. Call it after :meth:`run` has returned."""
        for waiting in tuple(self._waiting):
            self._forget(waiting)
            waiting.connection.close()
        self._refusals.write(is_last=True)
        self._selector.close()
        self._socket.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def run(self) -> None:
        """Accept connections and pass each on when its first request has arrived."""
        while True:
            ready = {key.fileobj: key.data for key, _ in self._selector.select(self._timeout_s())}
            if self._wake_reader in ready:
                return
            for waiting in filter(None, ready.values()):
                self._read(waiting)
            self._refuse_late()
            if self._socket in ready:
                self._accept()
            self._refusals.write()

    def _timeout_s(self) -> float | None:
        first = next(iter(self._waiting), None)
        times = [first.deadline_s if first is not None else None, self._refusals.next_line_s()]
        pending = [each for each in times if each is not None]
        return max(0.0, min(pending) - time.monotonic()) if pending else None

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_MAX):
            try:
                end, address = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # The process is out of descriptors. A waiting client is accepted when a descriptor is free again.
                self._refusals.add(f"accept: {error.strerror}", "this host")
                select.select([self._wake_reader], (), (), _PAUSE_S)
                return
            self._begin(end, address)

    def _begin(self, end: socket.socket, address: object) -> None:
        if end.family == socket.AF_UNIX:
            credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _process, user, _group = _CREDENTIALS.unpack(credentials)
            if user not in {0, os.geteuid()}:
                self._refusals.add("from another user", f"user {user}")
                end.close()
                return
        else:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.settimeout(0)
        waiting = _Waiting(ControlConnection(end), _address_of(end, address))
        self._evict_if_full(waiting.address)
        self._waiting[waiting] = None
        self._addresses.setdefault(waiting.address, {})[waiting] = None
        self._selector.register(waiting.connection, selectors.EVENT_READ, waiting)
        # Most clients have sent their whole request by now.
        self._read(waiting)

    def _evict_if_full(self, address: str) -> None:
        """Close the oldest connection of this address if it has too many, or else that of the address with the most."""
        connections = self._addresses.get(address, {})
        if len(connections) < _WAITING_PER_ADDRESS_MAX:
            if len(self._waiting) < _WAITING_MAX:
                return
            connections = max(self._addresses.values(), key=len)
        self._refuse(next(iter(connections)), "replaced by a newer connection before their first request arrived")

    def _refuse_late(self) -> None:
        now_s = time.monotonic()
        while (first := next(iter(self._waiting), None)) is not None and first.deadline_s <= now_s:
            self._refuse(first, f"without a complete first request in {_REQUEST_TIMEOUT_S:g} s")

    def _read(self, waiting: _Waiting) -> None:
        try:
            frame = waiting.connection.receive_ready(FrameType.CONTROL_REQUEST)
            if frame is None:
                return
            self._forget(waiting)
            self._admit(waiting.connection, *frame)
        except ConnectionRefused as refused:
            self._refuse(waiting, f"because {refused}")
        except BrokenResource:
            self._refuse(waiting, "ended by their client before the first request was complete")
        except (GdrkitError, OSError):
            self._refuse(waiting, "whose first bytes are not a request of this protocol")

    def _refuse(self, waiting: _Waiting, reason: str) -> None:
        self._forget(waiting)
        waiting.connection.close()
        self._refusals.add(reason, waiting.address)

    def _forget(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._selector.unregister(waiting.connection)
            del self._waiting[waiting]
            connections = self._addresses[waiting.address]
            del connections[waiting]
            if not connections:
                del self._addresses[waiting.address]


def _address_of(end: socket.socket, address: object) -> str:
    """Return the key that connections are counted by: this host, an IPv4 address, or the /64 of an IPv6 address."""
    if end.family == socket.AF_UNIX or not isinstance(address, tuple):
        return "this host"
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return "this host"
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(ip), 64), strict=False))
    return str(ip)
