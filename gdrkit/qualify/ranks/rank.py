"""The work of a rank: connect to rank 0, send the facts about the machine, and forward requests to a measuring child.

If the child ends or hangs, the rank says so in its reply to rank 0, and starts another child for the next request.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from gdrkit.children import kill_child
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.qualify.ranks.admission import HELLO_BYTES_MAX
from gdrkit.qualify.ranks.messages import MessageSocket, PeerGone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.inventory import Facts
    from gdrkit.qualify.ranks.admission import RankHello

__all__ = ["MeasuringChild", "connect_to_rank0", "serve_requests"]

_CONNECT_TIMEOUT_S, _WELCOME_TIMEOUT_S, _SEND_TIMEOUT_S = 5.0, 20.0, 30.0
# The time that a child has to exit after its connection is closed. A child that takes longer is killed.
_EXIT_TIMEOUT_S = 5.0
# Smallest timeout of a send or receive, even if less time remains for the request.
_REMAINING_TIME_MIN_S = 0.1


class MeasuringChild:
    """The measuring child process of a rank. A request starts the child if there is none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: MessageSocket | None = None

    def request(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Forward a request to the child and return the reply.

        Returns
        -------
        mapping
            The reply, with one key: ``result``, ``error``, or ``lost`` with a text that says how the child ended.
        """
        if self._connection is None and request["do"] == "close":
            return {"result": None}  # Without a child there are no objects to close.
        deadline_s = time.monotonic() + timeout_s  # The timeout includes the start of the child.
        try:
            connection = self._connection or self._start_child(timeout_s)
            message = {"do": request["do"], "with": request["with"]}
            connection.send(message, timeout_s=max(_REMAINING_TIME_MIN_S, deadline_s - time.monotonic()))
            return connection.receive(timeout_s=max(_REMAINING_TIME_MIN_S, deadline_s - time.monotonic()))
        except PeerGone:
            return {"lost": self._wait_for_exit()}
        except TimeoutError:
            kill_failure = self._kill_child()
            return {"lost": f"it did not reply within {timeout_s:g} s and was killed{kill_failure}"}
        except UsageError as error:
            kill_failure = self._kill_child()
            return {"lost": f"it sent an invalid reply and was killed: {error.message}{kill_failure}"}
        except OSError as error:
            return {"lost": f"it cannot be started: {error}"}

    def close(self) -> None:
        """Kill the child if it runs."""
        self._kill_child()

    def _kill_child(self) -> str:
        """Kill the child if it runs. Return a text for the error if it did not end, else an empty string."""
        child, self._child = self._child, None
        kill_failure = "" if child is None else kill_child(child, leads_group=False)
        self._wait_for_exit()
        return f"; {kill_failure}" if kill_failure else ""

    def _start_child(self, timeout_s: float) -> MessageSocket:
        """Start a child, wait for its first message, and return the connection to it."""
        parent_end, child_end = socket.socketpair()
        self._connection = MessageSocket(parent_end)
        try:
            with child_end:
                descriptor = child_end.fileno()
                command = [sys.executable, "-m", "gdrkit.qualify.ranks.measure", str(descriptor), str(os.getpid())]
                self._child = subprocess.Popen(
                    command, env=self._environment, stdin=subprocess.DEVNULL, pass_fds=[descriptor]
                )
        except OSError:
            self._wait_for_exit()
            raise
        self._connection.receive(timeout_s=timeout_s)
        return self._connection

    def _wait_for_exit(self) -> str:
        """Close the connection, wait for the end of the child, and return a text that says how it ended."""
        if self._connection is not None:
            self._connection.close()
        child, self._child, self._connection = self._child, None, None
        if child is None:
            return "it could not be started"
        try:
            exit_code = child.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            if kill_failure := kill_child(child, leads_group=False):
                return kill_failure
            exit_code = child.returncode
        return (
            f"it was ended by {signal.Signals(-exit_code).name}"
            if exit_code < 0
            else f"it exited with code {exit_code}"
        )


def connect_to_rank0(rank0_contact: Mapping[str, Any], hello: RankHello) -> MessageSocket:
    """Connect to rank 0 at the first of its addresses at which rank 0 answers, and return the connection.

    Another host may have the same address, such as the address of a container bridge. If another program answers there,
    this function tries the next address.

    Parameters
    ----------
    rank0_contact : mapping
        The ``addresses`` and the ``port`` at which rank 0 listens.
    hello : RankHello
        The first message of this rank.

    Raises
    ------
    GdrkitError
        Rank 0 cannot be reached at any address.
    """
    failures = []
    for address in rank0_contact["addresses"]:
        try:
            return _connect(address, rank0_contact["port"], hello)
        except (OSError, PeerGone, UsageError) as error:
            failures.append(f"{address} ({str(error) or type(error).__name__})")
    message = f"rank 0 does not answer at port {rank0_contact['port']} of {', '.join(failures)}"
    raise GdrkitError(message, what_to_do="allow TCP connections between the hosts of the job")


def serve_requests(connection: MessageSocket, facts: Facts, environment: Mapping[str, str]) -> int:
    """Send the facts, and execute the requests of rank 0 until it sends the exit code of the job. Return this code.

    If rank 0 disconnects without an exit code, return 1.
    """
    measuring_child = MeasuringChild(environment)
    try:
        connection.send({"facts": facts.to_json()}, timeout_s=_SEND_TIMEOUT_S)
        while "exit_code" not in (request := connection.receive(timeout_s=None)):
            reply = measuring_child.request(request, timeout_s=float(request["limit_s"]))
            connection.send({"answer": request["request"], **reply}, timeout_s=_SEND_TIMEOUT_S)
        return int(request["exit_code"])
    except (PeerGone, TimeoutError):
        return 1
    finally:
        measuring_child.close()
        connection.close()


def _connect(address: str, port: int, hello: RankHello) -> MessageSocket:
    connected_socket = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S)
    connected_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection = MessageSocket(connected_socket)
    try:
        _exchange_hello(connection, hello)
    except BaseException:
        connection.close()
        raise
    return connection


def _exchange_hello(connection: MessageSocket, hello: RankHello) -> None:
    connection.send(dataclasses.asdict(hello), timeout_s=_SEND_TIMEOUT_S)
    reply = connection.receive(timeout_s=_WELCOME_TIMEOUT_S, length_bytes_max=HELLO_BYTES_MAX)
    if reply.get("welcome") != hello.rank:
        message = "another program answered"
        raise UsageError(message)
