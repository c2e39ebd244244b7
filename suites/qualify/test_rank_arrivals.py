"""The port of rank 0 is open to anybody: who is no rank holds up nobody, and ends nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import gdrkit
from gdrkit.errors import GdrkitError
from gdrkit.qualify.ranks.arrivals import Arrived, Hello, receive_ranks
from gdrkit.qualify.ranks.lines import Lines
from gdrkit.qualify.ranks.rank import join, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.inventory import Facts

LONG_S = 20.0
# What a silent one is given is more than that.
SOON_S = 5.0
WORD = "word of the job"


def hello(rank: int, *, version: str = gdrkit.__version__) -> Hello:
    return Hello(WORD, rank, "near 01234567 1", version)


class Reception:
    """Rank 0 that waits for its ranks."""

    def __init__(self, count: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self.listener.getsockname()[1]
        self.place: dict[str, object] = {"addresses": ["127.0.0.1"], "port": self.port}
        self._is_over = False
        self._threads = ThreadPoolExecutor()
        self._arrived = self._threads.submit(
            receive_ranks, self.listener, count=count, token=WORD, limit_s=LONG_S, is_hopeless=lambda: self._is_over
        )

    def stranger(self, data: bytes = b"") -> socket.socket:
        """Somebody who connects and says that."""
        end = socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S)
        end.sendall(data)
        return end

    def rank(self, said: Hello, facts: Facts) -> None:
        """A rank that joins, and serves until it is ended."""
        self._threads.submit(lambda: serve(join(self.place, said), facts, {}))

    def arrived(self) -> Arrived:
        """What came of it."""
        return self._arrived.result(LONG_S)

    def close(self) -> None:
        self._is_over = True
        for lines in self.arrived().lines:
            lines.close()
        self._threads.shutdown()
        self.listener.close()


@pytest.fixture
def pair() -> Iterator[Reception]:
    """Of two ranks."""
    reception = Reception(2)
    yield reception
    reception.close()


def line(**said: object) -> bytes:
    return json.dumps({**dataclasses.asdict(hello(1)), **said}).encode() + b"\n"


GUESSED, NO_TEXT = {"token": "guessed"}, {"token": "\ud800"}
STRANGERS = {
    "a request of HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no text": b"\xff\xfe\x00\n",
    "no end": b"x" * 5000,
    "too long": line(host="x" * 5000),
    "too deep": b"[" * 4000 + b"\n",
    "a list": b"[]\n",
    "nothing": b"{}\n",
    "another word": line(**GUESSED),
    "no character": line(**NO_TEXT),
    "the word as a list": line(token=[WORD]),
    "a rank that there is not": line(rank=2),
    "a rank below 0": line(rank=-1),
    "a rank by name": line(rank="1"),
    "one field more": line(facts="{}"),
}


def test_strangers_hold_up_no_rank(pair: Reception, facts: Facts) -> None:
    silent = [pair.stranger() for _ in range(100)]
    loud = {name: pair.stranger(data) for name, data in STRANGERS.items()}
    half = pair.stranger(line()[:-1])
    began = time.monotonic()
    for number in (1, 0):
        pair.rank(hello(number), facts)
    arrived = pair.arrived()
    assert time.monotonic() - began < SOON_S
    assert (list(arrived.members), arrived.refused) == ([0, 1], {})
    assert {each.about.facts.digest for each in arrived.members.values()} == {facts.digest}
    for stranger in (*silent, *loud.values(), half):
        with stranger:
            hung_up(stranger)


def test_who_says_something_else_is_let_go_at_once(pair: Reception) -> None:
    for name, data in STRANGERS.items():
        began = time.monotonic()
        with pair.stranger(data) as stranger:
            hung_up(stranger)
        assert time.monotonic() - began < SOON_S, name


def test_who_says_nothing_is_let_go_within_seconds(pair: Reception) -> None:
    with pair.stranger() as silent, pair.stranger(b'{"token') as slow:
        began = time.monotonic()
        hung_up(silent)
        hung_up(slow)
        assert 5 < time.monotonic() - began < 20


def hung_up(end: socket.socket) -> None:
    """See that the other side hangs up."""
    with contextlib.suppress(ConnectionResetError):  # It did so before it had read everything.
        assert end.recv(1) == b""


def test_a_rank_reports_once(pair: Reception, facts: Facts) -> None:
    pair.rank(hello(1), facts)
    is_known = False
    while not is_known:
        with pair.stranger(line()) as again:
            is_known = again.recv(100) == b""
    pair.rank(hello(0), facts)
    assert list(pair.arrived().members) == [0, 1]


def test_a_rank_of_another_version_is_named_and_told_how_it_ends(pair: Reception, facts: Facts) -> None:
    pair.rank(hello(0), facts)
    other = join(pair.place, hello(1, version="0.0.9"))
    arrived = pair.arrived()
    assert list(arrived.members) == [0]
    why = f"rank 1 (near): it has gdrkit 0.0.9, and rank 0 has {gdrkit.__version__}: install one version on all hosts"
    assert arrived.refused == {1: why}
    arrived.end(1)
    assert other.receive(limit_s=LONG_S) == {"exit_code": 1}
    other.close()


@pytest.mark.parametrize("report", [{"facts": "{}"}, {"facts": 7}, {}, {"exit_code": 0}])
def test_a_rank_whose_report_is_not_understood_is_named(
    pair: Reception, facts: Facts, report: dict[str, object]
) -> None:
    pair.rank(hello(0), facts)
    other = join(pair.place, hello(1))
    other.send(report, limit_s=LONG_S)
    arrived = pair.arrived()
    assert (list(arrived.members), list(arrived.refused)) == ([0], [1])
    assert arrived.refused[1].startswith("rank 1 (near): what it says is not understood: ")
    other.close()


def test_a_rank_that_ends_before_it_reports_may_come_again(pair: Reception, facts: Facts) -> None:
    join(pair.place, hello(1)).close()
    for number in (0, 1):
        pair.rank(hello(number), facts)
    assert list(pair.arrived().members) == [0, 1]


def test_a_rank_finds_rank_0_behind_an_address_where_somebody_else_is(pair: Reception, facts: Facts) -> None:
    """Hosts have addresses of the same name, of bridges to their containers: what answers there may be anything."""
    with socket.create_server(("127.0.0.2", pair.port)) as other:
        pair.place["addresses"] = ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
        pair.rank(hello(1), facts)
        with contextlib.closing(Lines(other.accept()[0])) as echo:
            echo.send(echo.receive(limit_s=LONG_S), limit_s=LONG_S)
            pair.place["addresses"] = ["127.0.0.1"]
            pair.rank(hello(0), facts)
            assert list(pair.arrived().members) == [0, 1]


def test_a_rank_that_finds_nobody_says_where_it_has_looked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(GdrkitError, match=rf"port {port} of 127\.0\.0\.1 \(.*refused\), 127\.0\.0\.2 \(.*refused\)"):
        join({"addresses": ["127.0.0.1", "127.0.0.2"], "port": port}, hello(1))
