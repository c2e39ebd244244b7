"""A test that opens the cuFile driver on this machine, in a child process with a time limit.

libcufile (1.15 to 1.20) was observed to loop forever in cuFileDriverOpen if /proc/modules does not exist, as with a
kernel without loadable modules. Only the end of the process ends the loop. So a child process opens the driver first,
and this process opens it only if the child has succeeded. The child runs ``python -m gdrkit.cufile.probe``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdrkit.children import SpawnedChild
from gdrkit.errors import Api, ApiError, Reason, SetupMissing
from gdrkit.forks import ForkSafeLock

__all__ = ["TIMEOUT_S", "ProbeResult", "main", "probe", "require"]

# A successful open takes less than a second on an idle machine. The limit is much larger, for busy machines.
TIMEOUT_S = 30.0
_OPERATION = "cuFileDriverOpen in a child process"
_QUOTED_OUTPUT_CHARACTERS_MAX = 400
_OUTPUT_FILE_NAME, _ERROR_OUTPUT_FILE_NAME = "output", "error_output"
_PROC_MODULES = Path("/proc/modules")
_NO_MODULES_ADVICE = "use a kernel with loadable modules: without /proc/modules, libcufile loops forever"

_cache_lock = ForkSafeLock(reentrant=True)
# The result of the first successful probe, or an empty list.
_cached_results: list[ProbeResult] = []


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a child process that opened the driver successfully.

    Attributes
    ----------
    version : int
        Version of libcufile in the form of cuFileGetVersion: 1150 for 1.15.
    """

    version: int


def probe(*, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Open and close the driver in a child process and return the result.

    Raises
    ------
    SetupMissing
        ``TIMEOUT``: the child did not end in time and was killed. Otherwise the error that the child reported.
    """
    with tempfile.TemporaryDirectory(prefix="gdrkit-cufile-") as folder:
        exit_status = _run_child(folder, timeout_s)
        output, error_output = (
            (Path(folder) / name).read_text("utf-8", "backslashreplace")
            for name in (_OUTPUT_FILE_NAME, _ERROR_OUTPUT_FILE_NAME)
        )
    lines = output.splitlines()
    result = json.loads(lines[-1]) if exit_status == 0 and lines else None
    if result is None:
        error_text = error_output.strip()[-_QUOTED_OUTPUT_CHARACTERS_MAX:]
        detail = _describe_exit(exit_status) + (f"; it printed: {error_text}" if error_text else "")
        raise _make_no_result_error(detail, Reason.OTHER)
    if "failure" in result:
        raise _make_child_error(result["failure"])
    return ProbeResult(version=int(result["version"]))


def require(*, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Return the result of :func:`probe`, which is called only until it has succeeded once.

    A success is cached: once the driver has opened in a child process, the open does not hang in this process either.

    Raises
    ------
    SetupMissing
        See :func:`probe`. A failure is not cached.
    """
    with _cache_lock:
        if not _cached_results:
            _cached_results.append(probe(timeout_s=timeout_s))
        return _cached_results[0]


def main() -> int:
    """Open and close the driver, and print the result or the error as one line of JSON. Return 0 in both cases."""
    from gdrkit.cufile import _cufile

    result: dict[str, object]
    try:
        _cufile.load()
        _cufile.call("cuFileDriverOpen", "driver_open")
        _cufile.call("cuFileDriverClose", "driver_close")
        result = {"version": _cufile.library_version()}
    except ApiError as error:
        result = {
            "failure": {
                "api": error.api.value,
                "operation": error.operation,
                "status": error.status,
                "status_name": error.status_name,
                "errno": error.errno,
                "reason": error.reason.value,
                "what_to_do": error.what_to_do,
                "detail": error.detail,
                "arguments": {name: str(value) for name, value in error.arguments.items()},
            }
        }
    # The result starts on a new line, because libraries may print, too.
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0


def _run_child(folder: str, timeout_s: float) -> int:
    """Run the child with its output in files of the folder, and return its exit status.

    The child is in its own session, so Ctrl-C in the terminal does not reach it. Ctrl-C raises KeyboardInterrupt in
    this function, and the function then ends the child.
    """
    child = SpawnedChild()
    try:
        child.start(
            [sys.executable, "-m", __name__],
            # Without this variable, libcufile writes its log into the current folder.
            {"CUFILE_LOGFILE_PATH": f"{folder}/cufile.log", **os.environ},
            output_path=f"{folder}/{_OUTPUT_FILE_NAME}",
            error_output_path=f"{folder}/{_ERROR_OUTPUT_FILE_NAME}",
        )
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        detail = f"the child did not end within {timeout_s:g} s and was killed"
        if kill_failure_text := child.end():
            detail += f"; {kill_failure_text}"
        raise _make_no_result_error(
            detail, Reason.TIMEOUT, what_to_do="" if _PROC_MODULES.exists() else _NO_MODULES_ADVICE
        ) from error
    finally:
        child.end()


def _make_child_error(failure: dict[str, Any]) -> SetupMissing:
    """Return the exception for an error that :func:`main` printed in the child process."""
    api, reason = Api(failure.pop("api")), Reason(failure.pop("reason"))
    return SetupMissing(api=api, reason=reason, **failure)


def _make_no_result_error(detail: str, reason: Reason, *, what_to_do: str = "") -> SetupMissing:
    return SetupMissing(
        api=Api.CUFILE,
        operation=_OPERATION,
        status=None,
        status_name="no result",
        reason=reason,
        what_to_do=what_to_do or f"run this command to see the cause: {sys.executable} -m {__name__}",
        detail=detail,
    )


def _describe_exit(exit_status: int) -> str:
    if exit_status < 0:
        return f"the child was killed by {signal.Signals(-exit_status).name}"
    return f"the child exited with status {exit_status}"


if __name__ == "__main__":
    sys.exit(main())
