"""Admission of the ranks of a job by rank 0, which closes the connections of all other peers.

Each rank connects to the TCP port of rank 0, and sends a hello with the token of the job. After the reply of rank 0, it
sends the facts about its machine. Other programs, such as port scanners, may connect to the port as well. Rank 0
disconnects a peer that does not send the token within 10 seconds, and meanwhile continues to admit ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import gdrkit
from gdrkit import serialization
from gdrkit.errors import Reason, UsageError
from gdrkit.inventory import Facts
from gdrkit.qualify.ranks.messages import MessageSocket, PeerGone
from gdrkit.qualify.ranks.pairs import RankFacts
from gdrkit.qualify.ranks.proxy import RankProxy

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["HELLO_BYTES_MAX", "AdmittedRanks", "RankHello", "admit_ranks"]

# Longest accepted message of a peer that has not sent the token yet.
HELLO_BYTES_MAX = 4096
_HELLO_TIMEOUT_S, _SEND_TIMEOUT_S = 10.0, 10.0
# Largest number of connections whose peer has not sent the token yet.
_UNVERIFIED_PEERS_MAX = 64
_POLL_INTERVAL_S, _ACCEPT_RETRY_INTERVAL_S = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class RankHello:
    """The first message of a rank. Every version of gdrkit has the same hello, so that rank 0 can read `version`.

    `host` is the identity of the machine of the rank; see :class:`~gdrkit.qualify.ranks.pairs.RankFacts`.
    """

    token: str
    rank: int
    host: str
    version: str


@dataclass(frozen=True, slots=True)
class _FactsMessage:
    """The second message of a rank, after rank 0 has accepted the hello. `facts` is the JSON of the rank's facts."""

    facts: str


@dataclass(frozen=True, slots=True)
class AdmittedRanks:
    """The ranks that rank 0 has admitted or rejected, and the connections to them.

    Attributes
    ----------
    ranks : mapping
        The ranks that take part in the job, by rank number.
    rejected : mapping
        The reason for each rejected rank, by rank number.
    connections : list of MessageSocket
        The connections to all these ranks. Rejected ranks also stay connected until they receive the exit code.
    """

    ranks: dict[int, RankProxy] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    connections: list[MessageSocket] = field(default_factory=list)

    def send_exit_code(self, code: int) -> None:
        """Send the exit code of the job to all ranks, which then exit with this code."""
        for connection in self.connections:
            with contextlib.suppress(PeerGone, TimeoutError):  # The rank has died or hangs, and needs no exit code.
                connection.send({"exit_code": code}, timeout_s=_SEND_TIMEOUT_S)


@dataclass(eq=False, slots=True)
class _Candidate:
    """A connected peer that may be a rank. `hello` is None until the peer has sent the token."""

    connection: MessageSocket
    deadline_s: float  # Time of time.monotonic() at which rank 0 disconnects the peer.
    hello: RankHello | None = None


def admit_ranks(
    listener: socket.socket, *, rank_count: int, token: str, timeout_s: float, should_stop: Callable[[], bool]
) -> AdmittedRanks:
    """Admit the ranks that connect to `listener`, until all ranks of the job are admitted or rejected.

    Parameters
    ----------
    listener : socket
        The socket to which the ranks connect.
    rank_count : int
        Number of ranks of the job.
    token : str
        Secret that only the ranks know.
    timeout_s : float
        Longest duration of the admission, in seconds. A rank that has not sent its facts by then does not take part.
    should_stop : callable
        A function that returns True if the admission must end early.
    """
    listener.setblocking(False)  # noqa: FBT003 - the signature of the standard library.
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        admission = _Admission(selector, rank_count, token, time.monotonic() + timeout_s)
        try:
            while admission.is_open and not should_stop():
                for selector_key, _ in selector.select(_POLL_INTERVAL_S):
                    if selector_key.data is None:
                        admission.accept(listener)
                    elif selector_key.data in admission.candidates:
                        admission.receive(selector_key.data)
                admission.disconnect_late_candidates()
        except BaseException:
            for connection in admission.admitted.connections:
                connection.close()
            raise
        finally:
            for candidate in list(admission.candidates):
                admission.disconnect(candidate)
    admitted = admission.admitted
    return replace(admitted, ranks=dict(sorted(admitted.ranks.items())))


class _Admission:
    """The candidates, which are connected peers that may be ranks, and the ranks admitted so far."""

    def __init__(self, selector: selectors.BaseSelector, rank_count: int, token: str, deadline_s: float) -> None:
        self._selector = selector
        self._rank_count = rank_count
        self._token = token.encode()
        self._deadline_s = deadline_s
        self.admitted = AdmittedRanks()
        self.candidates: set[_Candidate] = set()

    @property
    def is_open(self) -> bool:
        """Whether rank 0 still waits for ranks: not all have been admitted or rejected, and time is left."""
        decided_count = len(self.admitted.ranks) + len(self.admitted.rejected)
        return decided_count < self._rank_count and time.monotonic() < self._deadline_s

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection, and add its peer to the candidates."""
        try:
            connected_socket, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Either the peer has reset the connection, or this process has reached its limit of open descriptors. In
            # the second case, accept() works again when another connection is closed.
            time.sleep(_ACCEPT_RETRY_INTERVAL_S)
            return
        deadline_s = min(self._deadline_s, time.monotonic() + _HELLO_TIMEOUT_S)
        candidate = _Candidate(MessageSocket(connected_socket), deadline_s)
        self.candidates.add(candidate)
        self._selector.register(candidate.connection, selectors.EVENT_READ, candidate)
        unverified_candidates = [peer for peer in self.candidates if peer.hello is None]
        if len(unverified_candidates) > _UNVERIFIED_PEERS_MAX:
            # A rank sends its token at once, so the peer that has been connected longest without a token is not a rank.
            self.disconnect(min(unverified_candidates, key=lambda peer: peer.deadline_s))

    def receive(self, candidate: _Candidate) -> None:
        """Receive and process the messages of a candidate that have arrived, without waiting for more."""
        try:
            while candidate in self.candidates:
                if candidate.hello is None:
                    message = candidate.connection.receive(timeout_s=0, length_bytes_max=HELLO_BYTES_MAX)
                    self._receive_hello(candidate, message)
                else:
                    self._receive_facts(candidate, candidate.hello, candidate.connection.receive(timeout_s=0))
        except TimeoutError:
            return  # The rest of the message has not arrived yet.
        except PeerGone:
            self.disconnect(candidate)
        except UsageError as error:
            if candidate.hello is None:
                self.disconnect(candidate)
            else:
                self._reject(candidate, candidate.hello, f"its message is malformed: {error.message}")

    def disconnect_late_candidates(self) -> None:
        """Close the connections of the candidates whose deadline has passed."""
        for candidate in [peer for peer in self.candidates if peer.deadline_s < time.monotonic()]:
            self.disconnect(candidate)

    def disconnect(self, candidate: _Candidate) -> None:
        """Close the connection of a candidate."""
        self._remove(candidate)
        candidate.connection.close()

    def _receive_hello(self, candidate: _Candidate, message: dict[str, Any]) -> None:
        hello = serialization.from_json_data(RankHello, message, where="a hello")
        is_verified = hmac.compare_digest(hello.token.encode("utf-8", "surrogatepass"), self._token)
        decided_ranks = self.admitted.ranks.keys() | self.admitted.rejected.keys()
        if not is_verified or hello.rank not in range(self._rank_count) or hello.rank in decided_ranks:
            error_text = "the peer is not an expected rank of this job"
            raise UsageError(error_text, reason=Reason.MALFORMED)
        candidate.hello, candidate.deadline_s = hello, self._deadline_s
        candidate.connection.send({"welcome": hello.rank}, timeout_s=_SEND_TIMEOUT_S)
        if hello.version != gdrkit.__version__:
            reason = (
                f"it has gdrkit {hello.version}, and rank 0 has {gdrkit.__version__}: install one version on all hosts"
            )
            self._reject(candidate, hello, reason)

    def _receive_facts(self, candidate: _Candidate, hello: RankHello, message: dict[str, Any]) -> None:
        facts = Facts.from_json(serialization.from_json_data(_FactsMessage, message, where="a facts message").facts)
        self._remove(candidate)
        self.admitted.connections.append(candidate.connection)
        self.admitted.ranks[hello.rank] = RankProxy(RankFacts(hello.rank, hello.host, facts), candidate.connection)

    def _reject(self, candidate: _Candidate, hello: RankHello, reason: str) -> None:
        self._remove(candidate)
        self.admitted.connections.append(candidate.connection)
        self.admitted.rejected[hello.rank] = f"rank {hello.rank} ({hello.host.partition(' ')[0]}): {reason}"

    def _remove(self, candidate: _Candidate) -> None:
        self._selector.unregister(candidate.connection)
        self.candidates.discard(candidate)
