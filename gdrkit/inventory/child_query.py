"""Queries in child processes, so that a damaged library crashes the child and not the caller.

The children run :mod:`gdrkit.inventory.api_query` and :mod:`gdrkit.inventory.experiments`.
"""

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

__all__ = ["ChildQuery"]

_OUTPUT_CHARACTERS_MAX = 400
# The time in which a child was ready to run and had no processor is added to its time limit, up to this value.
_PROCESSOR_WAIT_MAX_S = 100.0


class ChildQuery:
    """A query by a child process ``python -m MODULE NAME DESCRIPTOR``.

    The child writes its result to the descriptor, as one JSON object with the field ``facts``, ``failure`` or both.

    Parameters
    ----------
    command : list of str
        The module, and the name of the API or of the experiment.
    environment : mapping
        Environment variables of the child.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._query_name = command[-1]
        # The child writes into files instead of pipes. It could block in a write to a pipe, because this process does
        # not read before the child ends, and processes that the child has started could keep a pipe open. The result
        # and the output have separate files, because libraries may print text.
        self._result_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close().
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close().
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", *command, str(self._result_file.fileno())],
                env=dict(environment),
                pass_fds=[self._result_file.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output_file,
                stderr=subprocess.STDOUT,
                # The child gets its own process group, so that the processes that it starts are killed with it.
                process_group=0,
            )
        except BaseException:
            self._result_file.close()
            self._output_file.close()
            raise

    def result(self, timeout_s: float) -> tuple[Any, ApiFailure | None]:
        """Wait for the child, kill its process group, and return its facts (parsed JSON) and its failure.

        The facts or the failure is None if the child did not report it. A query can return both: the facts that it
        found before it failed, and the failure.

        Parameters
        ----------
        timeout_s : float
            Time limit of the child, in seconds. Time in which the child was ready to run and had no processor does not
            count, up to 100 s. On a busy machine, the start of the interpreter alone has taken half a minute.
        """
        try:
            has_ended = self._wait(timeout_s)
            kill_failure = kill_child(self._child)
            output = _read_all(self._output_file)
            result_text = _read_all(self._result_file)
        finally:
            self.close()
        if not has_ended:
            message = f"no result within {timeout_s:g} s" + (f"; {kill_failure}" if kill_failure else "")
            return None, self._make_failure(Reason.TIMEOUT, message, output)
        if not result_text:
            return None, self._make_failure(Reason.OTHER, _describe_exit(self._child.returncode), output)
        result = json.loads(result_text)
        failure = result.get("failure")
        return result.get("facts"), failure and serialization.from_json_data(ApiFailure, failure)

    def _wait(self, timeout_s: float) -> bool:
        """Wait until the child has ended, and return True. Return False at the time limit."""
        start_s, remaining_s = time.monotonic(), timeout_s
        while remaining_s > 0:
            try:
                self._child.wait(remaining_s)
            except subprocess.TimeoutExpired:
                allowed_s = timeout_s + min(host.processor_wait_s(self._child.pid), _PROCESSOR_WAIT_MAX_S)
                remaining_s = allowed_s - (time.monotonic() - start_s)
            else:
                return True
        return False

    def close(self) -> None:
        """Kill the child if the caller has not waited for its result, and close the files."""
        if not self._result_file.closed:
            kill_child(self._child)
            self._result_file.close()
            self._output_file.close()

    def _make_failure(self, reason: Reason, message: str, output: bytes) -> ApiFailure:
        last_output = output.decode("utf-8", "backslashreplace").strip()[-_OUTPUT_CHARACTERS_MAX:]
        return ApiFailure(
            api=self._query_name,
            operation="query in a child process",
            status=self._child.returncode,
            status_name="",
            errno=None,
            reason=reason,
            message=f"{self._query_name}: {message}" + (f"; it printed: {last_output}" if last_output else ""),
            # The argument 1 is the descriptor of the standard output, to which the query then writes its result.
            what_to_do=f"run the query alone to see the cause: {sys.executable} -m {' '.join(self._command)} 1",
        )


def _read_all(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _describe_exit(exit_code: int) -> str:
    if exit_code < 0:
        return f"the child was killed by {signal.Signals(-exit_code).name}"
    return f"the child ended with exit code {exit_code} and without a result"
