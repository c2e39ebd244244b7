"""The tasks of a rank: it sends the facts of its machine, and forwards requests of rank 0 to its child.

The child may die and may hang. The rank then reports that, and starts another child at the next request.
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
from gdrkit.qualify.ranks.arrivals import HELLO_BYTES_MAX
from gdrkit.qualify.ranks.lines import Gone, Lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.inventory import Facts
    from gdrkit.qualify.ranks.arrivals import Hello

__all__ = ["Supervised", "join", "serve"]

_CONNECT_S, _WELCOME_S, _SEND_S, _END_S, _LEAST_S = 5.0, 20.0, 30.0, 5.0, 0.1


class Supervised:
    """The measuring child process of a rank."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._child: subprocess.Popen[bytes] | None = None
        self._lines: Lines | None = None

    def ask(self, request: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Forward a request to the child.

        Returns
        -------
        mapping
            ``result``, ``error``, or ``lost``: how the child ended instead of replying.
        """
        if self._lines is None and request["do"] == "drop":
            return {"result": None}  # A child that was not started holds nothing.
        end = time.monotonic() + limit_s  # The limit includes the start of the child, like every step.
        try:
            lines = self._lines or self._begin(limit_s)
            lines.send({"do": request["do"], "with": request["with"]}, limit_s=max(_LEAST_S, end - time.monotonic()))
            return lines.receive(limit_s=max(_LEAST_S, end - time.monotonic()))
        except Gone:
            return {"lost": self._end()}
        except TimeoutError:
            left = self._kill()
            return {"lost": f"it did not answer within {limit_s:g} s and was killed{left}"}
        except UsageError as error:
            left = self._kill()
            return {"lost": f"it was killed, as it does not answer as it must: {error.message}{left}"}
        except OSError as error:
            return {"lost": f"it cannot be started: {error}"}

    def close(self) -> None:
        """End the child, if there is one."""
        self._kill()

    def _kill(self) -> str:
        """Kill the child, if there is one, and return what an error says in addition: that it was left behind."""
        child, self._child = self._child, None
        left = "" if child is None else kill_child(child, leads_group=False)
        self._end()
        return f"; {left}" if left else ""

    def _begin(self, limit_s: float) -> Lines:
        ours, theirs = socket.socketpair()
        self._lines = Lines(ours)
        try:
            with theirs:
                number = theirs.fileno()
                command = [sys.executable, "-m", "gdrkit.qualify.ranks.measure", str(number), str(os.getpid())]
                self._child = subprocess.Popen(
                    command, env=self._environment, stdin=subprocess.DEVNULL, pass_fds=[number]
                )
        except OSError:
            self._end()
            raise
        self._lines.receive(limit_s=limit_s)
        return self._lines

    def _end(self) -> str:
        if self._lines is not None:
            self._lines.close()
        child, self._child, self._lines = self._child, None, None
        if child is None:
            return "it could not be started"
        try:
            code = child.wait(_END_S)
        except subprocess.TimeoutExpired:
            if left := kill_child(child, leads_group=False):
                return left
            code = child.returncode
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"


def join(place: Mapping[str, Any], hello: Hello) -> Lines:
    """Connect to rank 0 at the first of its addresses that works. Another host may have the same address.

    Raises
    ------
    GdrkitError
        Rank 0 cannot be reached at any address.
    """
    tried = []
    for address in place["addresses"]:
        try:
            return _welcomed(address, place["port"], hello)
        except (OSError, Gone, UsageError) as error:
            tried.append(f"{address} ({str(error) or type(error).__name__})")
    message = f"rank 0 does not answer at port {place['port']} of {', '.join(tried)}"
    raise GdrkitError(message, what_to_do="let TCP through between the hosts of the job")


def serve(lines: Lines, facts: Facts, environment: Mapping[str, str]) -> int:
    """Execute the requests of rank 0 until it sends the exit code of the job. Return 1 if it is gone before."""
    child = Supervised(environment)
    try:
        lines.send({"facts": facts.to_json()}, limit_s=_SEND_S)
        while "exit_code" not in (request := lines.receive(limit_s=None)):
            answer = child.ask(request, limit_s=float(request["limit_s"]))
            lines.send({"answer": request["request"], **answer}, limit_s=_SEND_S)
        return int(request["exit_code"])
    except (Gone, TimeoutError):
        return 1
    finally:
        child.close()
        lines.close()


def _welcomed(address: str, port: int, hello: Hello) -> Lines:
    end = socket.create_connection((address, port), timeout=_CONNECT_S)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    lines = Lines(end)
    try:
        _greet(lines, hello)
    except BaseException:
        lines.close()
        raise
    return lines


def _greet(lines: Lines, hello: Hello) -> None:
    lines.send(dataclasses.asdict(hello), limit_s=_SEND_S)
    answer = lines.receive(limit_s=_WELCOME_S, length_bytes_max=HELLO_BYTES_MAX)
    if answer.get("welcome") != hello.rank:
        message = "somebody else is there"
        raise UsageError(message)
