"""Admission of ranks at the open port of rank 0: untrusted peers neither delay a rank nor end the job."""

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
from gdrkit.qualify.ranks.admission import AdmittedRanks, RankHello, admit_ranks
from gdrkit.qualify.ranks.messages import MessageSocket
from gdrkit.qualify.ranks.rank import join, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.inventory import Facts

LONG_S = 20.0
# Less than the time that rank 0 gives a silent peer.
SOON_S = 5.0
TOKEN = "token of the job"  # noqa: S105 - it protects nothing here.


def hello(rank: int, *, version: str = gdrkit.__version__) -> RankHello:
    return RankHello(TOKEN, rank, "near 01234567 1", version)


class Admission:
    """Rank 0, which admits ranks in another thread."""

    def __init__(self, count: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self.listener.getsockname()[1]
        self.address: dict[str, object] = {"addresses": ["127.0.0.1"], "port": self.port}
        self._is_over = False
        self._threads = ThreadPoolExecutor()
        self._admitted = self._threads.submit(
            admit_ranks,
            self.listener,
            count=count,
            token=TOKEN,
            timeout_s=LONG_S,
            should_stop=lambda: self._is_over,
        )

    def connect(self, data: bytes = b"") -> socket.socket:
        """Connect as an untrusted peer, and send `data`."""
        connected = socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S)
        connected.sendall(data)
        return connected

    def start_rank(self, first: RankHello, facts: Facts) -> None:
        """Start a rank in another thread. It serves until the connection is closed."""
        self._threads.submit(lambda: serve(join(self.address, first), facts, {}))

    def result(self) -> AdmittedRanks:
        """Wait for the end of the admission."""
        return self._admitted.result(LONG_S)

    def close(self) -> None:
        self._is_over = True
        for connection in self.result().connections:
            connection.close()
        self._threads.shutdown()
        self.listener.close()


@pytest.fixture
def admission() -> Iterator[Admission]:
    """An admission of two ranks."""
    two_ranks = Admission(2)
    yield two_ranks
    two_ranks.close()


def hello_line(**changed: object) -> bytes:
    return json.dumps({**dataclasses.asdict(hello(1)), **changed}).encode() + b"\n"


WRONG_TOKEN, SURROGATE = {"token": "guessed"}, {"token": "\ud800"}
INVALID_HELLOS = {
    "HTTP request": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "not UTF-8": b"\xff\xfe\x00\n",
    "too long without an end": b"x" * 5000,
    "too long": hello_line(host="x" * 5000),
    "nested too deep": b"[" * 4000 + b"\n",
    "list": b"[]\n",
    "empty object": b"{}\n",
    "wrong token": hello_line(**WRONG_TOKEN),
    "surrogate in the token": hello_line(**SURROGATE),
    "token in a list": hello_line(token=[TOKEN]),
    "rank too large": hello_line(rank=2),
    "rank below 0": hello_line(rank=-1),
    "rank as a text": hello_line(rank="1"),
    "unknown field": hello_line(facts="{}"),
}


def test_untrusted_peers_do_not_delay_the_ranks(admission: Admission, facts: Facts) -> None:
    silent = [admission.connect() for _ in range(100)]
    invalid = [admission.connect(data) for data in INVALID_HELLOS.values()]
    incomplete = admission.connect(hello_line()[:-1])
    start_s = time.monotonic()
    for number in (1, 0):
        admission.start_rank(hello(number), facts)
    admitted = admission.result()
    assert time.monotonic() - start_s < SOON_S
    assert (list(admitted.ranks), admitted.rejected) == ([0, 1], {})
    assert {each.rank_facts.facts.digest for each in admitted.ranks.values()} == {facts.digest}
    for peer in (*silent, *invalid, incomplete):
        with peer:
            wait_for_close(peer)


def test_peer_with_an_invalid_hello_is_disconnected_at_once(admission: Admission) -> None:
    for name, data in INVALID_HELLOS.items():
        start_s = time.monotonic()
        with admission.connect(data) as peer:
            wait_for_close(peer)
        assert time.monotonic() - start_s < SOON_S, name


def test_silent_peer_is_disconnected_within_seconds(admission: Admission) -> None:
    with admission.connect() as silent, admission.connect(b'{"token') as slow:
        start_s = time.monotonic()
        wait_for_close(silent)
        wait_for_close(slow)
        assert 5 < time.monotonic() - start_s < 20


def wait_for_close(connected: socket.socket) -> None:
    """Wait until the other side closes the connection."""
    with contextlib.suppress(ConnectionResetError):  # The other side had not read all data.
        assert connected.recv(1) == b""


def test_second_connection_of_a_rank_is_closed(admission: Admission, facts: Facts) -> None:
    admission.start_rank(hello(1), facts)
    is_admitted = False
    while not is_admitted:
        with admission.connect(hello_line()) as second:
            is_admitted = second.recv(100) == b""
    admission.start_rank(hello(0), facts)
    assert list(admission.result().ranks) == [0, 1]


def test_rank_of_another_version_is_rejected(admission: Admission, facts: Facts) -> None:
    admission.start_rank(hello(0), facts)
    other = join(admission.address, hello(1, version="0.0.9"))
    admitted = admission.result()
    assert list(admitted.ranks) == [0]
    text = f"rank 1 (near): it has gdrkit 0.0.9, and rank 0 has {gdrkit.__version__}: install one version on all hosts"
    assert admitted.rejected == {1: text}
    admitted.send_exit_code(1)
    assert other.receive(timeout_s=LONG_S) == {"exit_code": 1}
    other.close()


@pytest.mark.parametrize("message", [{"facts": "{}"}, {"facts": 7}, {}, {"exit_code": 0}])
def test_rank_with_malformed_facts_is_rejected(admission: Admission, facts: Facts, message: dict[str, object]) -> None:
    admission.start_rank(hello(0), facts)
    other = join(admission.address, hello(1))
    other.send(message, timeout_s=LONG_S)
    admitted = admission.result()
    assert (list(admitted.ranks), list(admitted.rejected)) == ([0], [1])
    assert admitted.rejected[1].startswith("rank 1 (near): its message is malformed: ")
    other.close()


def test_rank_that_disconnects_before_its_facts_may_reconnect(admission: Admission, facts: Facts) -> None:
    join(admission.address, hello(1)).close()
    for number in (0, 1):
        admission.start_rank(hello(number), facts)
    assert list(admission.result().ranks) == [0, 1]


def test_rank_skips_an_address_where_another_program_answers(admission: Admission, facts: Facts) -> None:
    """Several hosts can have the same address, such as that of a bridge of containers, where any program may answer."""
    with socket.create_server(("127.0.0.2", admission.port)) as other:
        admission.address["addresses"] = ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
        admission.start_rank(hello(1), facts)
        with contextlib.closing(MessageSocket(other.accept()[0])) as echo:
            echo.send(echo.receive(timeout_s=LONG_S), timeout_s=LONG_S)
            admission.address["addresses"] = ["127.0.0.1"]
            admission.start_rank(hello(0), facts)
            assert list(admission.result().ranks) == [0, 1]


def test_rank_that_cannot_connect_reports_all_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(GdrkitError, match=rf"port {port} of 127\.0\.0\.1 \(.*refused\), 127\.0\.0\.2 \(.*refused\)"):
        join({"addresses": ["127.0.0.1", "127.0.0.2"], "port": port}, hello(1))
