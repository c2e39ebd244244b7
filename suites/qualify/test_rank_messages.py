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

LONG_S = 10.0
SHORT_S = 0.05


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The socket of rank 0 and the socket of the rank that is connected to it."""
    local, remote = socket.socketpair()
    with local, remote:
        yield local, remote


def make_proxy(connected: socket.socket, *, step_timeout_s: float = SHORT_S) -> RankProxy:
    """Return the proxy of rank 7."""
    rank_facts = RankFacts(7, "far 01234567 1", cast("Any", None))
    return RankProxy(rank_facts, MessageSocket(connected), step_timeout_s=step_timeout_s, transit_timeout_s=SHORT_S)


def test_late_reply_is_not_taken_for_that_of_the_next_step(sockets: tuple[socket.socket, socket.socket]) -> None:
    local, remote = sockets
    proxy, rank = make_proxy(local), MessageSocket(remote)
    with pytest.raises(StepFailed, match=r"^open_target on rank 7 \(far\): the rank did not reply in time$"):
        proxy.request("open_target", {})
    assert rank.receive(timeout_s=LONG_S)["request"] == 1
    rank.send({"answer": 1, "result": "late"}, timeout_s=LONG_S)
    rank.send({"answer": 2, "result": "in time"}, timeout_s=LONG_S)
    assert proxy.request("check", {}) == "in time"


def test_rank_with_an_outstanding_reply_gets_no_request(sockets: tuple[socket.socket, socket.socket]) -> None:
    local, remote = sockets
    proxy, rank = make_proxy(local), MessageSocket(remote)
    with pytest.raises(StepFailed, match="did not reply in time"):
        proxy.request("open_target", {})
    for _ in range(2):
        with pytest.raises(StepFailed, match=r"^close on rank 7 \(far\): the rank has not replied to open_target yet$"):
            proxy.request("close", {})
    assert rank.receive(timeout_s=LONG_S)["do"] == "open_target"
    with pytest.raises(TimeoutError):
        rank.receive(timeout_s=0)


@pytest.mark.parametrize(
    "reply",
    [
        *({"answer": number, "result": None} for number in (0, 2, -1, 1.0, True, "1", None)),
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
    local, remote = sockets
    proxy = make_proxy(local, step_timeout_s=LONG_S)
    remote.sendall(json.dumps(reply).encode() + b"\n" + b'{"answer": 1, "result": null}\n')
    with pytest.raises(StepFailed, match=r"^run on rank 7 \(far\): the rank sent an invalid reply: "):
        proxy.request("run", {})
    # After an invalid reply, valid replies are refused too.
    with pytest.raises(StepFailed, match=r"^close on rank 7 \(far\): the rank sent an invalid reply: "):
        proxy.request("close", {})
    remote.recv(1 << 16)
    assert remote.recv(1) == b""


def test_rank_that_has_ended_is_an_error(sockets: tuple[socket.socket, socket.socket]) -> None:
    local, remote = sockets
    proxy = make_proxy(local)
    remote.close()
    with pytest.raises(StepFailed, match=r"^run on rank 7 \(far\): the rank has closed its connection$"):
        proxy.request("run", {})


@pytest.mark.parametrize(
    "text", [b"not JSON", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"7", b"", b'{"a": 1} {"b": 2}']
)
def test_malformed_message_is_refused(sockets: tuple[socket.socket, socket.socket], text: bytes) -> None:
    local, remote = sockets
    remote.sendall(text + b"\n")
    with pytest.raises(UsageError, match=r"^a message: ") as error_info:
        MessageSocket(local).receive(timeout_s=LONG_S)
    assert error_info.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_message_above_the_length_limit_is_refused(sockets: tuple[socket.socket, socket.socket], end: bytes) -> None:
    local, remote = sockets
    remote.sendall(b'"' + b"x" * 1000 + b'"' + end)
    with pytest.raises(UsageError, match="longer than 1000 bytes"):
        MessageSocket(local).receive(timeout_s=LONG_S, length_bytes_max=1000)


def test_message_may_arrive_in_parts(sockets: tuple[socket.socket, socket.socket]) -> None:
    local, remote = sockets
    receiver = MessageSocket(local)
    for part in (b'{"a"', b": 1", b'}\n{"b": 2}\n{'):
        with pytest.raises(TimeoutError):
            receiver.receive(timeout_s=0)
        remote.sendall(part)
    assert [receiver.receive(timeout_s=0) for _ in range(2)] == [{"a": 1}, {"b": 2}]
    with pytest.raises(TimeoutError):
        receiver.receive(timeout_s=SHORT_S)
    remote.close()
    with pytest.raises(PeerGone):
        receiver.receive(timeout_s=LONG_S)


def test_connection_is_closed_after_a_message_was_cut_off(sockets: tuple[socket.socket, socket.socket]) -> None:
    """The timeout cut off a message. The peer would read a further message as the missing part of the first one."""
    local, _ = sockets
    sender = MessageSocket(local)
    with pytest.raises(TimeoutError):
        sender.send({"long": "x" * (1 << 24)}, timeout_s=SHORT_S)
    with pytest.raises(PeerGone):
        sender.send({"short": 1}, timeout_s=LONG_S)
    with pytest.raises(PeerGone):
        sender.receive(timeout_s=LONG_S)
