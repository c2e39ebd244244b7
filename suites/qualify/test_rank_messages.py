"""Messages between the ranks of a job, and the errors that rank 0 reports for late, invalid and missing replies."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any, cast

import pytest

from gdrkit.errors import Reason, UsageError
from gdrkit.qualify.ranks.messages import MessageSocket, PeerGone
from gdrkit.qualify.ranks.pairs import RankFacts
from gdrkit.qualify.ranks.proxy import RankProxy, StepFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_TIMEOUT_S = 10.0
SHORT_TIMEOUT_S = 0.05


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the socket of rank 0, and the socket of the rank at the other end of the connection."""
    rank_0_socket, rank_socket = socket.socketpair()
    with rank_0_socket, rank_socket:
        yield rank_0_socket, rank_socket


def make_proxy(connected_socket: socket.socket, *, step_timeout_s: float = SHORT_TIMEOUT_S) -> RankProxy:
    """Return the object with which rank 0 sends requests to rank 7."""
    # The machine is identified by host name, boot id and network namespace. These cases need no facts about it.
    rank_facts = RankFacts(7, "far 01234567 1", cast("Any", None))
    return RankProxy(
        rank_facts, MessageSocket(connected_socket), step_timeout_s=step_timeout_s, transit_timeout_s=SHORT_TIMEOUT_S
    )


def test_late_reply_is_not_taken_for_that_of_the_next_step(sockets: tuple[socket.socket, socket.socket]) -> None:
    rank_0_socket, rank_socket = sockets
    proxy, rank_connection = make_proxy(rank_0_socket), MessageSocket(rank_socket)
    with pytest.raises(StepFailed, match=r"^open_target on rank 7 \(far\): the rank did not reply in time$"):
        proxy.request("open_target", {})
    assert rank_connection.receive(timeout_s=LONG_TIMEOUT_S)["request"] == 1
    # A reply names the number of its request. The first reply is too late, so the proxy must drop it.
    rank_connection.send({"answer": 1, "result": "late"}, timeout_s=LONG_TIMEOUT_S)
    rank_connection.send({"answer": 2, "result": "in time"}, timeout_s=LONG_TIMEOUT_S)
    assert proxy.request("check", {}) == "in time"


def test_rank_with_an_outstanding_reply_gets_no_request(sockets: tuple[socket.socket, socket.socket]) -> None:
    rank_0_socket, rank_socket = sockets
    proxy, rank_connection = make_proxy(rank_0_socket), MessageSocket(rank_socket)
    with pytest.raises(StepFailed, match="did not reply in time"):
        proxy.request("open_target", {})
    for _ in range(2):
        with pytest.raises(StepFailed, match=r"^close on rank 7 \(far\): the rank has not replied to open_target yet$"):
            proxy.request("close", {})
    assert rank_connection.receive(timeout_s=LONG_TIMEOUT_S)["do"] == "open_target"
    with pytest.raises(TimeoutError):
        rank_connection.receive(timeout_s=0)


@pytest.mark.parametrize(
    "reply",
    [
        *({"answer": answer, "result": None} for answer in (0, 2, -1, 1.0, True, "1", None)),
        {"result": None},
        {"answer": 1},
        {"answer": 1, "result": None, "error": "both"},
        [1],
        None,
    ],
)
def test_invalid_reply_is_an_error_that_names_the_rank(
    sockets: tuple[socket.socket, socket.socket], reply: object
) -> None:
    rank_0_socket, rank_socket = sockets
    proxy = make_proxy(rank_0_socket, step_timeout_s=LONG_TIMEOUT_S)
    rank_socket.sendall(json.dumps(reply).encode() + b"\n" + b'{"answer": 1, "result": null}\n')
    with pytest.raises(StepFailed, match=r"^run on rank 7 \(far\): the rank sent an invalid reply: "):
        proxy.request("run", {})
    # After an invalid reply, valid replies are refused too.
    with pytest.raises(StepFailed, match=r"^close on rank 7 \(far\): the rank sent an invalid reply: "):
        proxy.request("close", {})
    # The rank reads its request, and then the end of the connection, which the proxy has closed.
    rank_socket.recv(1 << 16)
    assert rank_socket.recv(1) == b""


def test_rank_that_has_ended_is_an_error(sockets: tuple[socket.socket, socket.socket]) -> None:
    rank_0_socket, rank_socket = sockets
    proxy = make_proxy(rank_0_socket)
    rank_socket.close()
    with pytest.raises(StepFailed, match=r"^run on rank 7 \(far\): the rank has closed its connection$"):
        proxy.request("run", {})


@pytest.mark.parametrize(
    "message_bytes", [b"not JSON", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"7", b"", b'{"a": 1} {"b": 2}']
)
def test_malformed_message_is_refused(sockets: tuple[socket.socket, socket.socket], message_bytes: bytes) -> None:
    rank_0_socket, rank_socket = sockets
    rank_socket.sendall(message_bytes + b"\n")
    with pytest.raises(UsageError, match=r"^a message: ") as error_info:
        MessageSocket(rank_0_socket).receive(timeout_s=LONG_TIMEOUT_S)
    assert error_info.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_message_above_the_length_limit_is_refused(
    sockets: tuple[socket.socket, socket.socket], line_end: bytes
) -> None:
    rank_0_socket, rank_socket = sockets
    rank_socket.sendall(b'"' + b"x" * 1000 + b'"' + line_end)
    with pytest.raises(UsageError, match="longer than 1000 bytes"):
        MessageSocket(rank_0_socket).receive(timeout_s=LONG_TIMEOUT_S, length_bytes_max=1000)


def test_message_may_arrive_in_parts(sockets: tuple[socket.socket, socket.socket]) -> None:
    rank_0_socket, rank_socket = sockets
    receiver = MessageSocket(rank_0_socket)
    for message_part in (b'{"a"', b": 1", b'}\n{"b": 2}\n{'):
        with pytest.raises(TimeoutError):
            receiver.receive(timeout_s=0)
        rank_socket.sendall(message_part)
    assert [receiver.receive(timeout_s=0) for _ in range(2)] == [{"a": 1}, {"b": 2}]
    with pytest.raises(TimeoutError):
        receiver.receive(timeout_s=SHORT_TIMEOUT_S)
    rank_socket.close()
    with pytest.raises(PeerGone):
        receiver.receive(timeout_s=LONG_TIMEOUT_S)


def test_connection_is_closed_after_a_message_was_cut_off(sockets: tuple[socket.socket, socket.socket]) -> None:
    """After a timeout cut off a message, the peer would read the next message as the missing part of the first one."""
    rank_0_socket, _ = sockets
    sender = MessageSocket(rank_0_socket)
    with pytest.raises(TimeoutError):
        sender.send({"long": "x" * (1 << 24)}, timeout_s=SHORT_TIMEOUT_S)
    with pytest.raises(PeerGone):
        sender.send({"short": 1}, timeout_s=LONG_TIMEOUT_S)
    with pytest.raises(PeerGone):
        sender.receive(timeout_s=LONG_TIMEOUT_S)
