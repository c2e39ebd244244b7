"""Registration of the ranks at rank 0, and rejection of all other connections.

Port scanners also find an open port. A connection that does not send the token of the job within seconds is closed, and
does not delay the others until then.
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
from gdrkit.qualify.ranks.lines import Gone, Lines
from gdrkit.qualify.ranks.member import Member
from gdrkit.qualify.ranks.pairs import RankFacts

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["HELLO_BYTES_MAX", "Arrived", "Hello", "receive_ranks"]

HELLO_BYTES_MAX = 4096
_HELLO_S, _SEND_S = 10.0, 10.0
_STRANGERS_MAX = 64
_LOOK_S, _PAUSE_S = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank. Every version understands it; later messages may differ between versions."""

    token: str
    rank: int
    host: str
    version: str


@dataclass(frozen=True, slots=True)
class _Report:
    """The message of a rank after it was accepted."""

    facts: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """The ranks that have connected.

    Attributes
    ----------
    members : mapping
        The ranks that take part.
    refused : mapping
        The reasons why other ranks do not take part.
    lines : list of Lines
        The connections to all of them.
    """

    members: dict[int, Member] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    lines: list[Lines] = field(default_factory=list)

    def end(self, code: int) -> None:
        """Send all ranks the exit code with which they end."""
        for lines in self.lines:
            with contextlib.suppress(Gone, TimeoutError):  # A rank that is gone needs no code.
                lines.send({"exit_code": code}, limit_s=_SEND_S)


@dataclass(eq=False, slots=True)
class _Guest:
    lines: Lines
    until: float
    hello: Hello | None = None


def receive_ranks(
    listener: socket.socket, *, count: int, token: str, limit_s: float, is_hopeless: Callable[[], bool]
) -> Arrived:
    """Wait for the ranks of a job.

    Parameters
    ----------
    listener : socket
        The socket to which they connect.
    count : int
        Number of ranks.
    token : str
        Secret that only the ranks know.
    limit_s : float
        Longest wait for the ranks.
    is_hopeless : callable
        Returns whether to stop waiting.
    """
    listener.setblocking(False)  # noqa: FBT003 - the signature of the standard library.
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        reception = _Reception(selector, count, token, time.monotonic() + limit_s)
        try:
            while reception.is_open and not is_hopeless():
                for key, _ in selector.select(_LOOK_S):
                    if key.data is None:
                        reception.let_in(listener)
                    elif key.data in reception.guests:
                        reception.hear(key.data)
                reception.let_go_late()
        except BaseException:
            for lines in reception.arrived.lines:
                lines.close()
            raise
        finally:
            for guest in list(reception.guests):
                reception.let_go(guest)
    arrived = reception.arrived
    return replace(arrived, members=dict(sorted(arrived.members.items())))


class _Reception:
    def __init__(self, selector: selectors.BaseSelector, count: int, token: str, end: float) -> None:
        self._selector = selector
        self._count = count
        self._token = token.encode()
        self._end = end
        self.arrived = Arrived()
        self.guests: set[_Guest] = set()

    @property
    def is_open(self) -> bool:
        """Whether a further rank may still connect."""
        known = len(self.arrived.members) + len(self.arrived.refused)
        return known < self._count and time.monotonic() < self._end

    def let_in(self, listener: socket.socket) -> None:
        """Accept a connection."""
        try:
            end, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_PAUSE_S)  # The connection was reset, or no descriptor is free until another one is closed.
            return
        guest = _Guest(Lines(end), min(self._end, time.monotonic() + _HELLO_S))
        self.guests.add(guest)
        self._selector.register(guest.lines, selectors.EVENT_READ, guest)
        strangers = [each for each in self.guests if each.hello is None]
        if len(strangers) > _STRANGERS_MAX:
            self.let_go(min(strangers, key=lambda each: each.until))  # A rank sends its token at once.

    def hear(self, guest: _Guest) -> None:
        """Process the messages of a connection."""
        try:
            while guest in self.guests:
                if guest.hello is None:
                    message = guest.lines.receive(limit_s=0, length_bytes_max=HELLO_BYTES_MAX)
                    self._welcome(guest, message)
                else:
                    self._take(guest, guest.hello, guest.lines.receive(limit_s=0))
        except TimeoutError:
            return  # The rest of the message has not arrived yet.
        except Gone:
            self.let_go(guest)
        except UsageError as error:
            if guest.hello is None:
                self.let_go(guest)
            else:
                self._refuse(guest, guest.hello, f"what it says is not understood: {error.message}")

    def let_go_late(self) -> None:
        """Close the connections whose time is over."""
        for guest in [each for each in self.guests if each.until < time.monotonic()]:
            self.let_go(guest)

    def let_go(self, guest: _Guest) -> None:
        """Close a connection."""
        self._leave(guest)
        guest.lines.close()

    def _welcome(self, guest: _Guest, message: dict[str, Any]) -> None:
        hello = serialization.from_json_data(Hello, message, where="a hello")
        is_known = hmac.compare_digest(hello.token.encode("utf-8", "surrogatepass"), self._token)
        taken = self.arrived.members.keys() | self.arrived.refused.keys()
        if not is_known or hello.rank not in range(self._count) or hello.rank in taken:
            text = "it is no rank of this job"
            raise UsageError(text, reason=Reason.MALFORMED)
        guest.hello, guest.until = hello, self._end
        guest.lines.send({"welcome": hello.rank}, limit_s=_SEND_S)
        if hello.version != gdrkit.__version__:
            why = (
                f"it has gdrkit {hello.version}, and rank 0 has {gdrkit.__version__}: install one version on all hosts"
            )
            self._refuse(guest, hello, why)

    def _take(self, guest: _Guest, hello: Hello, message: dict[str, Any]) -> None:
        facts = Facts.from_json(serialization.from_json_data(_Report, message, where="a report").facts)
        self._leave(guest)
        self.arrived.lines.append(guest.lines)
        self.arrived.members[hello.rank] = Member(RankFacts(hello.rank, hello.host, facts), guest.lines)

    def _refuse(self, guest: _Guest, hello: Hello, why: str) -> None:
        self._leave(guest)
        self.arrived.lines.append(guest.lines)
        self.arrived.refused[hello.rank] = f"rank {hello.rank} ({hello.host.partition(' ')[0]}): {why}"

    def _leave(self, guest: _Guest) -> None:
        self._selector.unregister(guest.lines)
        self.guests.discard(guest)
