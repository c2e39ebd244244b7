"""A question that is asked in a child process, so that a damaged library ends the child and not who asked.

Level 4.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from gdrkit import host, plain
from gdrkit.errors import Reason
from gdrkit.inventory.facts import ApiFailure

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Question"]

_SHOWN_CHARACTERS = 400
_STARVED_MAX_S = 100.0


class Question:
    """A child that answers on a descriptor: ``python -m MODULE NAME ... DESCRIPTOR``."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._api = command[-1]
        # A file and no pipe: it holds an answer of any length while nobody reads. What libraries print goes elsewhere.
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by answer().
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", *command, str(self._answer.fileno())],
                env=dict(environment),
                pass_fds=[self._answer.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except BaseException:
            self._answer.close()
            raise

    def answer(self, timeout_s: float) -> tuple[Any, ApiFailure | None]:
        """The facts as plain data, or the failure.

        Parameters
        ----------
        timeout_s : float
            How long the child may take. Time for which it wanted a processor and had none does not count, up to 100 s:
            on a busy machine the start of an interpreter alone was seen to take half a minute, and no API hung.
        """
        with self._answer as file:
            printed = self._printed(timeout_s)
            if printed is None:
                self._child.kill()
                printed, _ = self._child.communicate()
                return None, self._failure(Reason.TIMEOUT, f"no answer within {timeout_s:g} s", printed)
            file.seek(0)
            text = file.read()
        if not text:
            return None, self._failure(Reason.OTHER, _how_it_ended(self._child.returncode), printed)
        data = json.loads(text)
        if "failure" in data:
            return None, plain.from_plain(ApiFailure, data["failure"])
        return data["facts"], None

    def _printed(self, timeout_s: float) -> bytes | None:
        """What it printed until it ended; None when its time is over."""
        began, left_s = time.monotonic(), timeout_s
        while left_s > 0:
            try:
                return self._child.communicate(timeout=left_s)[0]
            except subprocess.TimeoutExpired:
                allowed_s = timeout_s + min(host.starved_s(self._child.pid), _STARVED_MAX_S)
                left_s = allowed_s - (time.monotonic() - began)
        return None

    def close(self) -> None:
        """End the child, where nobody has waited for its answer."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.communicate()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._answer.close()

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


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the child was ended by {signal.Signals(-code).name}"
    return f"the child ended with {code}"
