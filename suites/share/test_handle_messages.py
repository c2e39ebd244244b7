"""Errors of handle messages that are malformed, incomplete, late, or sent to a closed socket."""

from __future__ import annotations

import array
import socket
import tempfile

from support.sharing import make_handle, require_error

from gdrkit.errors import BrokenResource, Reason
from gdrkit.registration.handle import SHARE_HANDLE_BYTES
from gdrkit.registration.handle_message import HandleMessage, receive


def make_socket_with_message(data: bytes, descriptor_count: int) -> socket.socket:
    """Return a socket from which `data` and descriptors can be received. The sender has closed its socket."""
    receiver, sender = socket.socketpair()
    with sender, tempfile.TemporaryFile() as file:
        if data:
            socket.send_fds(sender, [data], [file.fileno()] * descriptor_count)
    return receiver


def test_malformed_message_is_refused_and_descriptors_are_closed() -> None:
    valid_data = make_handle().pack()
    # The received bytes, the number of received descriptors, and the reason of the error.
    invalid_messages = [
        (b"", 0, Reason.PEER_GONE),
        (valid_data[:100], 0, Reason.PEER_GONE),
        (valid_data[:100], 3, Reason.PEER_GONE),
        (b"x" * SHARE_HANDLE_BYTES, 253, Reason.MALFORMED),
        (valid_data, 1, Reason.MALFORMED),
    ]
    for data, descriptor_count, expected_reason in invalid_messages:
        with make_socket_with_message(data, descriptor_count) as connection:
            assert require_error(receive, connection).reason is expected_reason


def test_descriptors_of_two_parts_are_counted_together() -> None:
    valid_data = make_handle().pack()
    receiver, sender = socket.socketpair()
    with receiver, sender, tempfile.TemporaryFile() as file:
        # Each part has 200 descriptors, fewer than the limit of 253 (SCM_MAX_FD). Both parts together exceed the limit.
        for data in (valid_data[:10], valid_data[10:]):
            sender.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 200))])
        assert require_error(receive, receiver).reason is Reason.MALFORMED


def test_receive_from_a_silent_sender_times_out() -> None:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        error = require_error(receive, receiver, timeout_ms=10)
        assert (type(error), error.reason) == (BrokenResource, Reason.TIMEOUT)


def test_send_to_a_closed_peer_raises_peer_gone() -> None:
    sender, receiver = socket.socketpair()
    receiver.close()
    with sender:
        error = require_error(HandleMessage(make_handle().pack()).send, sender)
        assert (type(error), error.reason) == (BrokenResource, Reason.PEER_GONE)
