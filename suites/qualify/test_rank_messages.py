"""What ranks of a job say to each other: by lines of JSON, each with a deadline, and who does not keep to that."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any, cast

import pytest

from gdrkit.errors import Reason, UsageError
from gdrkit.qualify.ranks.lines import Gone, Lines
from gdrkit.qualify.ranks.member import Member, StepFailed
from gdrkit.qualify.ranks.pairs import RankFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_S = 10.0
SHORT_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def member(end: socket.socket, *, step_s: float = SHORT_S) -> Member:
    """Rank 7, as rank 0 has it."""
    return Member(RankFacts(7, "far 01234567 1", cast("Any", None)), Lines(end), step_s=step_s, answer_s=SHORT_S)


def test_a_late_answer_is_not_taken_for_that_of_the_next_step(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    asking, rank = member(ours), Lines(theirs)
    with pytest.raises(StepFailed, match=r"^initiate on rank 7 \(far\): the rank does not answer$"):
        asking.ask("initiate", {})
    assert rank.receive(limit_s=LONG_S)["request"] == 1
    rank.send({"answer": 1, "result": "late"}, limit_s=LONG_S)
    rank.send({"answer": 2, "result": "in time"}, limit_s=LONG_S)
    assert asking.ask("check", {}) == "in time"


def test_a_rank_that_owes_an_answer_is_asked_nothing_else(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    asking, rank = member(ours), Lines(theirs)
    with pytest.raises(StepFailed, match="does not answer"):
        asking.ask("initiate", {})
    for _ in range(2):
        with pytest.raises(StepFailed, match=r"^drop on rank 7 \(far\): the rank has not answered initiate yet$"):
            asking.ask("drop", {})
    assert rank.receive(limit_s=LONG_S)["do"] == "initiate"
    with pytest.raises(TimeoutError):
        rank.receive(limit_s=0)


@pytest.mark.parametrize(
    "answer",
    [
        *({"answer": number, "result": None} for number in (0, 2, -1, 1.0, True, "1", None)),
        {"result": None},
        {"answer": 1},
        {"answer": 1, "result": None, "error": "both"},
        [1],
        None,
    ],
)
def test_an_answer_to_what_was_never_asked_is_an_error_that_names_the_rank(
    ends: tuple[socket.socket, socket.socket], answer: object
) -> None:
    ours, theirs = ends
    asking = member(ours, step_s=LONG_S)
    theirs.sendall(json.dumps(answer).encode() + b"\n" + b'{"answer": 1, "result": null}\n')
    with pytest.raises(StepFailed, match=r"^hold on rank 7 \(far\): the rank does not answer as it must: "):
        asking.ask("hold", {})
    # Nothing that it says is believed any more, right as it may look.
    with pytest.raises(StepFailed, match=r"^drop on rank 7 \(far\): the rank does not answer as it must: "):
        asking.ask("drop", {})
    theirs.recv(1 << 16)
    assert theirs.recv(1) == b""


def test_a_rank_that_has_ended_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    asking = member(ours)
    theirs.close()
    with pytest.raises(StepFailed, match=r"^hold on rank 7 \(far\): the rank is gone$"):
        asking.ask("hold", {})


@pytest.mark.parametrize(
    "text", [b"rubbish", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"7", b"", b'{"a": 1} {"b": 2}']
)
def test_what_is_no_message_is_refused(ends: tuple[socket.socket, socket.socket], text: bytes) -> None:
    ours, theirs = ends
    theirs.sendall(text + b"\n")
    with pytest.raises(UsageError, match=r"^a message: ") as caught:
        Lines(ours).receive(limit_s=LONG_S)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_message_is_read_up_to_a_limit(ends: tuple[socket.socket, socket.socket], end: bytes) -> None:
    ours, theirs = ends
    theirs.sendall(b'"' + b"x" * 1000 + b'"' + end)
    with pytest.raises(UsageError, match="longer than 1000 bytes"):
        Lines(ours).receive(limit_s=LONG_S, length_bytes_max=1000)


def test_a_message_may_come_in_parts(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    lines = Lines(ours)
    for part in (b'{"a"', b": 1", b'}\n{"b": 2}\n{'):
        with pytest.raises(TimeoutError):
            lines.receive(limit_s=0)
        theirs.sendall(part)
    assert [lines.receive(limit_s=0) for _ in range(2)] == [{"a": 1}, {"b": 2}]
    with pytest.raises(TimeoutError):
        lines.receive(limit_s=SHORT_S)
    theirs.close()
    with pytest.raises(Gone):
        lines.receive(limit_s=LONG_S)


def test_half_a_message_is_never_followed_by_another(ends: tuple[socket.socket, socket.socket]) -> None:
    """What was sent before the deadline cannot be taken back: the rest would be read as a part of the next message."""
    ours, _ = ends
    lines = Lines(ours)
    with pytest.raises(TimeoutError):
        lines.send({"long": "x" * (1 << 24)}, limit_s=SHORT_S)
    with pytest.raises(Gone):
        lines.send({"short": 1}, limit_s=LONG_S)
    with pytest.raises(Gone):
        lines.receive(limit_s=LONG_S)
