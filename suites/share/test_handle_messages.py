"""Malformed, incomplete and undeliverable handle messages on a socket."""

from __future__ import annotations

import array
import socket
import tempfile

from support.sharing import refusal, sample

from gdrkit.errors import BrokenResource, Reason
from gdrkit.registration.handle import SHARE_HANDLE_BYTES
from gdrkit.registration.handle_message import HandleMessage, receive


def send_raw(data: bytes, count: int) -> socket.socket:
    """Return a socket with `data` and `count` descriptors to receive, whose other end is closed."""
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as file:
        if data:
            socket.send_fds(theirs, [data], [file.fileno()] * count)
    return ours


def test_malformed_message_is_refused_and_descriptors_are_closed() -> None:
    valid = sample().pack()
    messages = [
        (b"", 0, Reason.PEER_GONE),
        (valid[:100], 0, Reason.PEER_GONE),
        (valid[:100], 3, Reason.PEER_GONE),
        (b"x" * SHARE_HANDLE_BYTES, 253, Reason.MALFORMED),
        (valid, 1, Reason.MALFORMED),
    ]
    for data, count, reason in messages:
        with send_raw(data, count) as connection:
            assert refusal(receive, connection).reason is reason


def test_descriptors_of_two_parts_are_counted_together() -> None:
    valid = sample().pack()
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        for part in (valid[:10], valid[10:]):
            theirs.sendmsg([part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 200))])
        assert refusal(receive, ours).reason is Reason.MALFORMED


def test_receive_from_a_silent_sender_times_out() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        error = refusal(receive, ours, timeout_ms=10)
        assert (type(error), error.reason) == (BrokenResource, Reason.TIMEOUT)


def test_send_to_a_closed_peer_raises_peer_gone() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        error = refusal(HandleMessage(sample().pack()).send, ours)
        assert (type(error), error.reason) == (BrokenResource, Reason.PEER_GONE)
