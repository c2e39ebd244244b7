"""Queries in child processes, so that a damaged library ends the child and not the caller."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any

from gdrkit import host, serialization
from gdrkit.children import kill_child
from gdrkit.errors import Reason
from gdrkit.inventory.facts import ApiFailure

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Question"]

_SHOWN_CHARACTERS = 400
_STARVED_MAX_S = 100.0


class Question:
    """A child process that writes its result to a descriptor: ``python -m MODULE NAME ... DESCRIPTOR``."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._api = command[-1]
        # Files and not pipes: a file takes a result of any length without a reader, and its end does not depend on the
        # processes that the child starts, which inherit it. The output of libraries goes to another file than the
        # result.
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close().
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close().
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", *command, str(self._answer.fileno())],
                env=dict(environment),
                pass_fds=[self._answer.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                # A group of its own, so that the processes that the child starts are killed with it.
                process_group=0,
            )
        except BaseException:
            self._answer.close()
            self._output.close()
            raise

    def answer(self, timeout_s: float) -> tuple[Any, ApiFailure | None]:
        """Wait for the child, kill its process group, and return the facts as plain data, or the failure.

        Parameters
        ----------
        timeout_s : float
            Time limit of the child, in seconds. Up to 100 s in which it was runnable and had no processor do not count:
            on a busy machine the start of an interpreter alone was seen to take half a minute, and no API hung.
        """
        try:
            is_over = self._wait(timeout_s)
            left = kill_child(self._child)
            printed = _contents(self._output)
            text = _contents(self._answer)
        finally:
            self.close()
        if not is_over:
            message = f"no answer within {timeout_s:g} s" + (f"; {left}" if left else "")
            return None, self._failure(Reason.TIMEOUT, message, printed)
        if not text:
            return None, self._failure(Reason.OTHER, _how_it_ended(self._child.returncode), printed)
        data = json.loads(text)
        if "failure" in data:
            return None, serialization.from_json_data(ApiFailure, data["failure"])
        return data["facts"], None

    def _wait(self, timeout_s: float) -> bool:
        """Wait until the child has ended, and return True; return False at the time limit."""
        began, left_s = time.monotonic(), timeout_s
        while left_s > 0:
            try:
                self._child.wait(left_s)
            except subprocess.TimeoutExpired:
                allowed_s = timeout_s + min(host.starved_s(self._child.pid), _STARVED_MAX_S)
                left_s = allowed_s - (time.monotonic() - began)
            else:
                return True
        return False

    def close(self) -> None:
        """Kill the child if the caller has not waited for its result, and close the files."""
        if not self._answer.closed:
            kill_child(self._child)
            self._answer.close()
            self._output.close()

    def _failure(self, reason: Reason, message: str, printed: bytes) -> ApiFailure:
        last = printed.decode("utf-8", "backslashreplace").strip()[-_SHOWN_CHARACTERS:]
        return ApiFailure(
            api=self._api,
            operation="ask in a child process",
            status=self._child.returncode,
            status_name="",
            errno=None,
            reason=reason,
            message=f"{self._api}: {message}" + (f"; it printed: {last}" if last else ""),
            what_to_do=f"run it alone to see why: {sys.executable} -m {' '.join(self._command)} 1",
        )


def _contents(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the child was ended by {signal.Signals(-code).name}"
    return f"the child ended with {code}"
