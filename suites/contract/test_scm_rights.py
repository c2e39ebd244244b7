"""File descriptors received by SCM_RIGHTS are close-on-exec, too many are refused, and an error leaves none open."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import limit_open_files
from support.sharing import list_open_descriptors, make_handle

from gdrkit import scm_rights
from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.harness.wire import Channel
from gdrkit.registration import handle_message
from gdrkit.registration.handle import ShareKind
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.wire import FrameType, pack_control

EXAMPLE_COUNT = int(os.environ.get("GDRKIT_EXAMPLES", "300"))


@contextlib.contextmanager
def receive_directly(connection: socket.socket) -> Iterator[Sequence[int]]:
    _data, descriptors = scm_rights.receive(connection, length_bytes=4096, descriptors_max=4)
    yield descriptors
    scm_rights.close_all(descriptors)


@contextlib.contextmanager
def receive_by_control_connection(connection: socket.socket) -> Iterator[Sequence[int]]:
    control = ControlConnection(connection)
    assert control.receive(FrameType.CONTROL_REQUEST) is not None
    yield control.descriptors
    control.close()


@contextlib.contextmanager
def receive_by_channel(connection: socket.socket) -> Iterator[Sequence[int]]:
    channel = Channel(connection)
    message = channel.receive(timeout_s=5)
    assert message is not None
    descriptors = channel.take_descriptors(message["descriptors"])
    yield descriptors
    scm_rights.close_all(descriptors)


@contextlib.contextmanager
def receive_by_handle_message(connection: socket.socket) -> Iterator[Sequence[int]]:
    with handle_message.receive(connection, timeout_ms=5000) as message:
        yield message.descriptors


CONTROL_FRAME = pack_control(FrameType.CONTROL_REQUEST, b"{}", sequence=1)
HANDLE_MESSAGE = make_handle(kind=ShareKind.DMABUF, ipc=bytes(64), address=4096, descriptor_count=1).pack()
# Each entry has a receiver, a message that is valid with one descriptor, and the smallest number of descriptors that
# the receiver refuses.
RECEIVERS: list[Any] = [
    pytest.param(receive_directly, b"text", 5, id="module"),
    pytest.param(receive_by_control_connection, CONTROL_FRAME, 5, id="storage"),
    pytest.param(receive_by_channel, json.dumps({"descriptors": 1}).encode() + b"\n", 17, id="peer"),
    pytest.param(receive_by_handle_message, HANDLE_MESSAGE, 2, id="handle_message"),
]
Receiver = Callable[[socket.socket], AbstractContextManager[Sequence[int]]]


@contextlib.contextmanager
def make_socket_with_message(message_bytes: bytes, descriptor_count: int) -> Iterator[socket.socket]:
    """Yield a socket that can receive one message with `descriptor_count` descriptors. The sender is closed."""
    receiving_socket, sending_socket = socket.socketpair()
    with receiving_socket:
        with sending_socket, tempfile.TemporaryFile() as file:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * descriptor_count))]
            sending_socket.sendmsg([message_bytes], ancillary if descriptor_count else [])
        yield receiving_socket


def assert_refused(receive: Receiver, connection: socket.socket) -> UsageError:
    """Check that the receiver raises UsageError(MALFORMED) and leaves no descriptor open. Return the error."""
    descriptors_before = list_open_descriptors()
    with pytest.raises(UsageError) as error_info, receive(connection):
        pass
    assert error_info.value.reason is Reason.MALFORMED
    assert list_open_descriptors() == descriptors_before
    return error_info.value


@pytest.mark.parametrize(("receive", "message_bytes", "refused_count"), RECEIVERS)
def test_received_descriptor_is_close_on_exec(receive: Receiver, message_bytes: bytes, refused_count: int) -> None:
    # A program that this process starts must not inherit descriptors from the storage service or from peers.
    assert refused_count > 1  # The receiver accepts the one descriptor of the message.
    with make_socket_with_message(message_bytes, 1) as connection, receive(connection) as descriptors:
        assert [os.get_inheritable(descriptor) for descriptor in descriptors] == [False]


@pytest.mark.parametrize(("receive", "message_bytes", "refused_count"), RECEIVERS)
def test_too_many_descriptors_are_refused_and_closed(
    receive: Receiver, message_bytes: bytes, refused_count: int
) -> None:
    # SCM_MAX_FD is 253: Linux sends no message with more descriptors.
    for descriptor_count in (refused_count, refused_count + 1, 253):
        with make_socket_with_message(message_bytes, descriptor_count) as connection:
            assert_refused(receive, connection)


@pytest.mark.parametrize(("receive", "message_bytes", "refused_count"), RECEIVERS)
def test_dropped_descriptors_are_refused_and_the_rest_closed(
    receive: Receiver, message_bytes: bytes, refused_count: int
) -> None:
    assert refused_count > 1  # The receiver accepts the one descriptor that the kernel does not drop.
    with make_socket_with_message(message_bytes, 2) as connection:
        lowest_free_fd = os.dup(0)
        os.close(lowest_free_fd)
        # The limit of open files allows one of the two descriptors. The kernel drops the second and sets MSG_CTRUNC.
        with limit_open_files(lowest_free_fd + 1), pytest.raises(UsageError) as error_info, receive(connection):
            pass
        assert error_info.value.reason is Reason.MALFORMED
        assert "RLIMIT_NOFILE" in error_info.value.what_to_do
        # No descriptor stays open, so the next new descriptor gets the same number.
        next_fd = os.dup(0)
        os.close(next_fd)
        assert next_fd == lowest_free_fd


def test_message_without_descriptors_has_none() -> None:
    with make_socket_with_message(b"text", 0) as connection, receive_directly(connection) as descriptors:
        assert not descriptors
    with (
        make_socket_with_message(CONTROL_FRAME, 0) as connection,
        receive_by_control_connection(connection) as descriptors,
    ):
        assert not descriptors
    # The messages for these receivers announce one descriptor, so the receivers refuse a message without descriptors.
    for receive in (receive_by_channel, receive_by_handle_message):
        with make_socket_with_message(
            HANDLE_MESSAGE if receive is receive_by_handle_message else b'{"descriptors": 1}\n', 0
        ) as connection:
            assert_refused(receive, connection)


def test_frame_that_ends_early_closes_its_descriptors() -> None:
    for message_bytes in (CONTROL_FRAME[:10], CONTROL_FRAME[:-1], b"x" * len(CONTROL_FRAME)):
        with make_socket_with_message(message_bytes, 2) as connection:
            control = ControlConnection(connection)
            descriptors_before = list_open_descriptors()
            with pytest.raises(GdrkitError):
                control.receive(FrameType.CONTROL_REQUEST)
            assert list_open_descriptors() == descriptors_before
            assert not control.descriptors


def test_message_that_is_too_long_is_refused() -> None:
    receiving_socket, sending_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with receiving_socket, sending_socket, tempfile.TemporaryFile() as file:
        socket.send_fds(sending_socket, [b"x" * 11], [file.fileno()])
        descriptors_before = list_open_descriptors()
        with pytest.raises(UsageError) as error_info:
            scm_rights.receive(receiving_socket, length_bytes=10, descriptors_max=1)
        assert error_info.value.reason is Reason.MALFORMED
        assert list_open_descriptors() == descriptors_before


@settings(max_examples=EXAMPLE_COUNT, deadline=None)
@given(
    messages=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(0, 8)), max_size=6),
    length_bytes=st.integers(1, 50),
    descriptors_max=st.integers(0, 6),
)
def test_random_messages_are_received_or_refused(
    messages: list[tuple[bytes, int]], length_bytes: int, descriptors_max: int
) -> None:
    descriptors_before = list_open_descriptors()
    receiving_socket, sending_socket = socket.socketpair()
    with receiving_socket:
        with sending_socket, tempfile.TemporaryFile() as file:
            for data, count in messages:
                socket.send_fds(sending_socket, [data], [file.fileno()] * count)
        received_bytes, received_descriptor_count, reasons = b"", 0, set[Reason]()
        has_ended = False
        while not has_ended and not reasons:
            try:
                data, descriptors = scm_rights.receive(
                    receiving_socket, length_bytes=length_bytes, descriptors_max=descriptors_max
                )
            except UsageError as error:
                reasons.add(error.reason)
            else:
                received_bytes += data
                received_descriptor_count += len(descriptors)
                scm_rights.close_all(descriptors)
                has_ended = not data
        if any(count > descriptors_max for _data, count in messages):
            assert reasons == {Reason.MALFORMED}
        else:
            assert received_bytes == b"".join(data for data, _count in messages)
            assert received_descriptor_count == sum(count for _data, count in messages)
    assert list_open_descriptors() == descriptors_before
