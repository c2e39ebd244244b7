"""Admission of ranks at the port of rank 0. Untrusted peers that connect to the port must not delay or end the job."""

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
from gdrkit.qualify.ranks.rank import connect_to_rank0, serve_requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.inventory import Facts

# The admission and each wait in a case have this timeout.
STEP_TIMEOUT_S = 20.0
# Rank 0 disconnects a silent peer after 10 s. A step that takes less than 5 s did not wait for this timeout.
DURATION_WITHOUT_TIMEOUT_MAX_S = 5.0
TOKEN = "token of the job"  # noqa: S105 - the token protects nothing here.


def make_rank_hello(rank: int, *, version: str = gdrkit.__version__) -> RankHello:
    """Return the hello of a rank, the first message that it sends to rank 0.

    The hello names the host of the rank by host name (``near``), boot id and network namespace.
    """
    return RankHello(TOKEN, rank, "near 01234567 1", version)


class Admission:
    """Rank 0 of a job, which admits the ranks in another thread."""

    def __init__(self, rank_count: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self.listener.getsockname()[1]
        self.endpoint: dict[str, object] = {"addresses": ["127.0.0.1"], "port": self.port}
        self._should_stop = False
        self._executor = ThreadPoolExecutor()
        self._admission_future = self._executor.submit(
            admit_ranks,
            self.listener,
            rank_count=rank_count,
            token=TOKEN,
            timeout_s=STEP_TIMEOUT_S,
            should_stop=lambda: self._should_stop,
        )

    def connect(self, data: bytes = b"") -> socket.socket:
        """Connect as an untrusted peer, and send `data`."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=STEP_TIMEOUT_S)
        connection.sendall(data)
        return connection

    def start_rank(self, hello: RankHello, facts: Facts) -> None:
        """Start a rank in another thread. The rank serves until the connection is closed."""
        self._executor.submit(lambda: serve_requests(connect_to_rank0(self.endpoint, hello), facts, {}))

    def wait_for_ranks(self) -> AdmittedRanks:
        """Wait for the end of the admission, and return the ranks that were admitted."""
        return self._admission_future.result(STEP_TIMEOUT_S)

    def close(self) -> None:
        self._should_stop = True
        for connection in self.wait_for_ranks().connections:
            connection.close()
        self._executor.shutdown()
        self.listener.close()


@pytest.fixture
def admission() -> Iterator[Admission]:
    """Yield an admission of two ranks."""
    new_admission = Admission(2)
    yield new_admission
    new_admission.close()


def pack_rank_hello(**changed_fields: object) -> bytes:
    """Return the bytes of the hello of rank 1, with these fields changed."""
    return json.dumps({**dataclasses.asdict(make_rank_hello(1)), **changed_fields}).encode() + b"\n"


WRONG_TOKEN_FIELD, SURROGATE_TOKEN_FIELD = {"token": "guessed"}, {"token": "\ud800"}
# A hello has at most 4096 bytes.
INVALID_HELLOS = {
    "HTTP request": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "not UTF-8": b"\xff\xfe\x00\n",
    "too long without an end": b"x" * 5000,
    "too long": pack_rank_hello(host="x" * 5000),
    "nested too deep": b"[" * 4000 + b"\n",
    "list": b"[]\n",
    "empty object": b"{}\n",
    "wrong token": pack_rank_hello(**WRONG_TOKEN_FIELD),
    "surrogate in the token": pack_rank_hello(**SURROGATE_TOKEN_FIELD),
    "token in a list": pack_rank_hello(token=[TOKEN]),
    "rank too large": pack_rank_hello(rank=2),
    "rank below 0": pack_rank_hello(rank=-1),
    "rank as a text": pack_rank_hello(rank="1"),
    "unknown field": pack_rank_hello(facts="{}"),
}


def test_untrusted_peers_do_not_delay_the_ranks(admission: Admission, facts: Facts) -> None:
    silent_peers = [admission.connect() for _ in range(100)]
    invalid_peers = [admission.connect(hello_bytes) for hello_bytes in INVALID_HELLOS.values()]
    peer_with_incomplete_hello = admission.connect(pack_rank_hello()[:-1])
    start_s = time.monotonic()
    for rank in (1, 0):
        admission.start_rank(make_rank_hello(rank), facts)
    admitted_ranks = admission.wait_for_ranks()
    assert time.monotonic() - start_s < DURATION_WITHOUT_TIMEOUT_MAX_S
    assert (list(admitted_ranks.ranks), admitted_ranks.rejected) == ([0, 1], {})
    assert {admitted_rank.rank_facts.facts.digest for admitted_rank in admitted_ranks.ranks.values()} == {facts.digest}
    for peer in (*silent_peers, *invalid_peers, peer_with_incomplete_hello):
        with peer:
            wait_for_close(peer)


def test_peer_with_an_invalid_hello_is_disconnected_at_once(admission: Admission) -> None:
    for defect, hello_bytes in INVALID_HELLOS.items():
        start_s = time.monotonic()
        with admission.connect(hello_bytes) as peer:
            wait_for_close(peer)
        assert time.monotonic() - start_s < DURATION_WITHOUT_TIMEOUT_MAX_S, defect


def test_silent_peer_is_disconnected_within_seconds(admission: Admission) -> None:
    with admission.connect() as silent_peer, admission.connect(b'{"token') as slow_peer:
        start_s = time.monotonic()
        wait_for_close(silent_peer)
        wait_for_close(slow_peer)
        assert 5 < time.monotonic() - start_s < 20


def wait_for_close(connection: socket.socket) -> None:
    """Wait until the other side closes the connection."""
    # The kernel reports this error if the other side has not read all data.
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def test_second_connection_of_a_rank_is_closed(admission: Admission, facts: Facts) -> None:
    admission.start_rank(make_rank_hello(1), facts)
    is_admitted = False
    # Before rank 1 is admitted, rank 0 replies to another connection of rank 1. Later, rank 0 closes such a connection.
    while not is_admitted:
        with admission.connect(pack_rank_hello()) as second_connection:
            is_admitted = second_connection.recv(100) == b""
    admission.start_rank(make_rank_hello(0), facts)
    assert list(admission.wait_for_ranks().ranks) == [0, 1]


def test_rank_of_another_version_is_rejected(admission: Admission, facts: Facts) -> None:
    admission.start_rank(make_rank_hello(0), facts)
    rejected_connection = connect_to_rank0(admission.endpoint, make_rank_hello(1, version="0.0.9"))
    admitted_ranks = admission.wait_for_ranks()
    assert list(admitted_ranks.ranks) == [0]
    expected_reason = (
        f"rank 1 (near): it has gdrkit 0.0.9, and rank 0 has {gdrkit.__version__}: install one version on all hosts"
    )
    assert admitted_ranks.rejected == {1: expected_reason}
    admitted_ranks.send_exit_code(1)
    assert rejected_connection.receive(timeout_s=STEP_TIMEOUT_S) == {"exit_code": 1}
    rejected_connection.close()


@pytest.mark.parametrize("message", [{"facts": "{}"}, {"facts": 7}, {}, {"exit_code": 0}])
def test_rank_with_malformed_facts_is_rejected(admission: Admission, facts: Facts, message: dict[str, object]) -> None:
    admission.start_rank(make_rank_hello(0), facts)
    rejected_connection = connect_to_rank0(admission.endpoint, make_rank_hello(1))
    rejected_connection.send(message, timeout_s=STEP_TIMEOUT_S)
    admitted_ranks = admission.wait_for_ranks()
    assert (list(admitted_ranks.ranks), list(admitted_ranks.rejected)) == ([0], [1])
    assert admitted_ranks.rejected[1].startswith("rank 1 (near): its message is malformed: ")
    rejected_connection.close()


def test_rank_that_disconnects_before_its_facts_may_reconnect(admission: Admission, facts: Facts) -> None:
    connect_to_rank0(admission.endpoint, make_rank_hello(1)).close()
    for rank in (0, 1):
        admission.start_rank(make_rank_hello(rank), facts)
    assert list(admission.wait_for_ranks().ranks) == [0, 1]


def test_rank_skips_an_address_where_another_program_answers(admission: Admission, facts: Facts) -> None:
    """Several hosts can have the same address, such as the address of a container bridge.

    Any program may listen there.
    """
    with socket.create_server(("127.0.0.2", admission.port)) as echo_listener:
        # At 127.0.0.3, nothing listens. At 127.0.0.2, a program returns the hello. At 127.0.0.1, rank 0 listens.
        admission.endpoint["addresses"] = ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
        admission.start_rank(make_rank_hello(1), facts)
        with contextlib.closing(MessageSocket(echo_listener.accept()[0])) as echo_socket:
            echo_socket.send(echo_socket.receive(timeout_s=STEP_TIMEOUT_S), timeout_s=STEP_TIMEOUT_S)
            admission.endpoint["addresses"] = ["127.0.0.1"]
            admission.start_rank(make_rank_hello(0), facts)
            assert list(admission.wait_for_ranks().ranks) == [0, 1]


def test_rank_that_cannot_connect_reports_all_addresses() -> None:
    # The listener is closed again, so that a connection to its port is refused.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(GdrkitError, match=rf"port {port} of 127\.0\.0\.1 \(.*refused\), 127\.0\.0\.2 \(.*refused\)"):
        connect_to_rank0({"addresses": ["127.0.0.1", "127.0.0.2"], "port": port}, make_rank_hello(1))
