"""The listener of the storage server: it accepts connections and waits for the first request of each.

A connection is *waiting* until its first request has arrived. A waiting connection costs the server one descriptor and
no thread. All bytes of the first request must arrive before one deadline. If one address, or all addresses together,
have too many waiting connections, the listener closes an old one when a new connection arrives.

Attackers can fill the list of waiting connections, but this does not stop honest clients. accept() returns a TCP
connection when its first bytes have arrived (TCP_DEFER_ACCEPT), and the listener reads them at once. The client of
gdrkit sends its whole first request at once, so its connection leaves the list in the same step.
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
_CREDENTIALS_STRUCT = struct.Struct("3i")  # struct ucred: process, user, group.
# Time from accept() until all bytes of the first request have arrived.
_REQUEST_TIMEOUT_S = 10.0
# Largest numbers of waiting connections of one address, and of all addresses. The first is the largest number of
# sessions, so that one host can start clients for all sessions at the same time.
_WAITING_PER_ADDRESS_MAX = 64
_WAITING_MAX = 128
# Largest number of connections to accept before the listener reads from the waiting connections again. With a larger
# number, new connections could evict a waiting connection whose request has arrived but was not read.
_ACCEPTS_MAX = 16
# Shortest time between two log lines about refused connections.
_LOG_PERIOD_S = 10.0
# Time before the next accept() after a failed one.
_RETRY_PAUSE_S = 0.1


class ConnectionRefused(Exception):
    """The server refused a connection. The message is for the log, and has no text that the client sent."""


class _WaitingConnection:
    """A connection whose first request has not arrived."""

    def __init__(self, connection: ControlConnection, address: str) -> None:
        self.connection = connection
        self.address = address
        self.deadline_s = time.monotonic() + _REQUEST_TIMEOUT_S


class _RefusalLog:
    """The counts of refused connections by reason, which are logged in at most one line per period."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last_address = ""
        self._next_line_at_s = 0.0

    def add(self, reason: str, address: str) -> None:
        """Count a refused connection. `address` is for the log."""
        self._counts[reason] += 1
        self._last_address = address

    def next_line_at_s(self) -> float | None:
        """Return the time of the next line, or None while there is nothing to log."""
        return self._next_line_at_s if self._counts else None

    def write(self, *, is_last: bool = False) -> None:
        """Log and clear the counts, if the period is over or `is_last` is set."""
        now_s = time.monotonic()
        if self._counts and (is_last or now_s >= self._next_line_at_s):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._counts.most_common())
            _LOG.warning(
                "connections refused: %d (%s); the last from %s", self._counts.total(), reasons, self._last_address
            )
            self._counts.clear()
            self._next_line_at_s = now_s + _LOG_PERIOD_S


class Listener:
    """A listener that accepts connections in the thread that calls :meth:`run`, until :meth:`stop`.

    Parameters
    ----------
    listening_socket : socket.socket
        The socket, which this object owns. The peer of a unix socket must be this user or root.
    admit : callable
        Called with a connection, its first request and the sequence of that request. The function then owns the
        connection, unless it raises ConnectionRefused or a GdrkitError.
    """

    def __init__(self, listening_socket: socket.socket, admit: Callable[[ControlConnection, bytes, int], None]) -> None:
        self._socket = listening_socket
        self._socket.settimeout(0)
        self._admit = admit
        # These dictionaries are used as ordered sets: the oldest connection is the first key.
        self._waiting_connections: dict[_WaitingConnection, None] = {}
        self._connections_by_address: dict[str, dict[_WaitingConnection, None]] = {}
        self._refusal_log = _RefusalLog()
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ)

    def stop(self) -> None:
        """Make :meth:`run` return. Any thread may call this method."""
        os.write(self._wake_write_fd, b"x")

    def close(self) -> None:
        """Close the listening socket and all waiting connections. Call it after :meth:`run` has returned."""
        for waiting_connection in tuple(self._waiting_connections):
            self._remove(waiting_connection)
            waiting_connection.connection.close()
        self._refusal_log.write(is_last=True)
        self._selector.close()
        self._socket.close()
        os.close(self._wake_read_fd)
        os.close(self._wake_write_fd)

    def run(self) -> None:
        """Accept connections, and call `admit` for each when its first request has arrived."""
        while True:
            # The data of a selector key is its waiting connection, or None for the listening socket and the wake pipe.
            ready = {key.fileobj: key.data for key, _ in self._selector.select(self._compute_timeout_s())}
            if self._wake_read_fd in ready:
                return
            for waiting_connection in filter(None, ready.values()):
                self._read_request(waiting_connection)
            self._refuse_expired()
            if self._socket in ready:
                self._accept()
            self._refusal_log.write()

    def _compute_timeout_s(self) -> float | None:
        """Return the time until the next deadline or log line, or None if there is neither."""
        oldest_connection = next(iter(self._waiting_connections), None)
        times_s = [
            oldest_connection.deadline_s if oldest_connection is not None else None,
            self._refusal_log.next_line_at_s(),
        ]
        next_time_s = min((time_s for time_s in times_s if time_s is not None), default=None)
        return None if next_time_s is None else max(0.0, next_time_s - time.monotonic())

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_MAX):
            try:
                connected_socket, address = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # For example, the process is out of descriptors. The client then waits in the backlog of the socket.
                self._refusal_log.add(f"accept: {error.strerror}", "this host")
                select.select([self._wake_read_fd], (), (), _RETRY_PAUSE_S)
                return
            self._add_waiting(connected_socket, address)

    def _add_waiting(self, connected_socket: socket.socket, address: object) -> None:
        """Add a new connection to the waiting connections, unless it comes from another user through a unix socket."""
        if connected_socket.family == socket.AF_UNIX:
            credentials = connected_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS_STRUCT.size)
            _process, user, _group = _CREDENTIALS_STRUCT.unpack(credentials)
            if user not in {0, os.geteuid()}:
                self._refusal_log.add("from another user", f"user {user}")
                connected_socket.close()
                return
        else:
            connected_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected_socket.settimeout(0)
        waiting_connection = _WaitingConnection(
            ControlConnection(connected_socket), _find_count_key(connected_socket, address)
        )
        self._evict_if_full(waiting_connection.address)
        self._waiting_connections[waiting_connection] = None
        self._connections_by_address.setdefault(waiting_connection.address, {})[waiting_connection] = None
        self._selector.register(waiting_connection.connection, selectors.EVENT_READ, waiting_connection)
        # Most clients have sent their whole request by now.
        self._read_request(waiting_connection)

    def _evict_if_full(self, address: str) -> None:
        """Close a waiting connection if `address`, or all addresses together, have too many.

        If `address` has too many, its oldest connection is closed. Otherwise the oldest connection of the address with
        the most connections is closed.
        """
        candidates = self._connections_by_address.get(address, {})
        if len(candidates) < _WAITING_PER_ADDRESS_MAX:
            if len(self._waiting_connections) < _WAITING_MAX:
                return
            candidates = max(self._connections_by_address.values(), key=len)
        self._refuse(next(iter(candidates)), "replaced by a newer connection before their first request arrived")

    def _refuse_expired(self) -> None:
        """Refuse the waiting connections whose deadline has passed."""
        now_s = time.monotonic()
        while (
            oldest_connection := next(iter(self._waiting_connections), None)
        ) is not None and oldest_connection.deadline_s <= now_s:
            self._refuse(oldest_connection, f"without a complete first request in {_REQUEST_TIMEOUT_S:g} s")

    def _read_request(self, waiting_connection: _WaitingConnection) -> None:
        """Read the bytes that have arrived. If the first request is complete, call `admit`."""
        try:
            frame = waiting_connection.connection.receive_ready(FrameType.CONTROL_REQUEST)
            if frame is None:
                return
            self._remove(waiting_connection)
            self._admit(waiting_connection.connection, *frame)
        except ConnectionRefused as refusal:
            self._refuse(waiting_connection, f"because {refusal}")
        except BrokenResource:
            self._refuse(waiting_connection, "ended by their client before the first request was complete")
        except (GdrkitError, OSError):
            self._refuse(waiting_connection, "whose first bytes are not a request of this protocol")

    def _refuse(self, waiting_connection: _WaitingConnection, reason: str) -> None:
        """Close a connection and count it as refused."""
        self._remove(waiting_connection)
        waiting_connection.connection.close()
        self._refusal_log.add(reason, waiting_connection.address)

    def _remove(self, waiting_connection: _WaitingConnection) -> None:
        """Remove a connection from the waiting connections, if it is one of them."""
        if waiting_connection in self._waiting_connections:
            self._selector.unregister(waiting_connection.connection)
            del self._waiting_connections[waiting_connection]
            connections = self._connections_by_address[waiting_connection.address]
            del connections[waiting_connection]
            if not connections:
                del self._connections_by_address[waiting_connection.address]


def _find_count_key(connected_socket: socket.socket, address: object) -> str:
    """Return the key that connections are counted by: this host, an IPv4 address, or the /64 of an IPv6 address."""
    if connected_socket.family == socket.AF_UNIX or not isinstance(address, tuple):
        return "this host"
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return "this host"
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(ip), 64), strict=False))
    return str(ip)
