"""A program that connects to a listener from many addresses: ``python -m storage.listened_addresses ACTION``.

The program needs a network namespace in which it may add addresses to the loopback device. It prints its results as
JSON. ACTION is ``refuse`` or ``fill``: see :func:`log_refused_addresses` and :func:`find_closed_connections`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import select
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from gdrkit.storage.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.storage.connection import ControlConnection

__all__ = ["main"]

_TIMEOUT_S = 10.0
# Addresses with prefix lengths that the program adds to the loopback device. Each stands for a client host.
_LOOPBACK_ADDRESSES = (
    *("192.0.2.1/32", "192.0.2.2/32", "192.0.2.3/32"),
    *("2001:db8::1/128", "2001:db8:0:0:ffff::1/128", "2001:db8:0:1::1/128"),
)
# Addresses of the clients of `refuse`. An IPv6 socket reports the IPv4 address 192.0.2.1 as
# ::ffff:192.0.2.1.
_CLIENT_HOSTS = (
    *("127.0.0.1", "::1", "192.0.2.1", "::ffff:192.0.2.1"),
    *("2001:db8::1", "2001:db8:0:0:ffff::1", "2001:db8:0:1::1"),
)
# Number of silent connections that `fill` opens from each host. The sum is 128, the limit of the listener.
_SILENT_CONNECTION_COUNT_BY_HOST = {"192.0.2.1": 40, "192.0.2.2": 50, "192.0.2.3": 38}


def _fail_on_complete_request(_connection: ControlConnection, _payload: bytes, _sequence: int) -> None:
    message = "the program sends no complete request"
    raise AssertionError(message)


@contextlib.contextmanager
def _run_listener(address: str) -> Iterator[int]:
    """Run a listener on an IPv4 address, or on all addresses of both families for ``::``. Yield its port."""
    if address == "::":
        listening_socket = socket.create_server((address, 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listening_socket = socket.create_server((address, 0))
    port = listening_socket.getsockname()[1]
    listener = Listener(listening_socket, _fail_on_complete_request)
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        yield port
    finally:
        listener.stop()
        thread.join()
        listener.close()


def log_refused_addresses() -> dict[str, str]:
    """Connect from each host, and return the address that the listener logs for the refused connection, by host."""
    log_stream = io.StringIO()
    logging.getLogger("gdrkit.storage").addHandler(logging.StreamHandler(log_stream))
    for host in _CLIENT_HOSTS:
        with (
            _run_listener("::" if ":" in host else "0.0.0.0") as port,  # noqa: S104 - in a network namespace.
            socket.create_connection((host, port), _TIMEOUT_S, source_address=(host, 0)) as connection,
        ):
            # 64 zero bytes are not a valid request, so the listener refuses the connection.
            connection.sendall(bytes(64))
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1)
    logged_addresses = [line.partition("; the last from ")[2] for line in log_stream.getvalue().splitlines()]
    return dict(zip(_CLIENT_HOSTS, logged_addresses, strict=True))


def find_closed_connections() -> dict[str, list[int]]:
    """Open 128 silent connections and one more, and return the indices of the connections that were closed, by host."""
    with _run_listener("0.0.0.0") as port, contextlib.ExitStack() as stack:  # noqa: S104 - in a network namespace.
        connections = {
            host: [
                stack.enter_context(socket.create_connection(("192.0.2.1", port), _TIMEOUT_S, source_address=(host, 0)))
                for _ in range(connection_count)
            ]
            for host, connection_count in _SILENT_CONNECTION_COUNT_BY_HOST.items()
        }
        # The listener refuses this last connection after it has accepted all other connections and closed one of them.
        with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as last_connection:
            last_connection.sendall(bytes(64))
            with contextlib.suppress(ConnectionResetError):
                last_connection.recv(1)
        return {
            host: [
                index for index, connection in enumerate(host_connections) if select.select([connection], (), (), 0)[0]
            ]
            for host, host_connections in connections.items()
        }


def main(action: str) -> None:
    """Add the addresses, run the action, and print its result."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # With nodad, an IPv6 address can be used at once, without duplicate address detection.
    for address in _LOOPBACK_ADDRESSES:
        subprocess.run(["ip", "address", "add", address, "dev", "lo", *(["nodad"] * (":" in address))], check=True)
    print(json.dumps({"refuse": log_refused_addresses, "fill": find_closed_connections}[action]()))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
