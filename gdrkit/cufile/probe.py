"""Whether libcufile opens on this machine at all, found out by a child with a time limit.

Level 2. libcufile (1.15 to 1.20) was seen to spin for ever in cuFileDriverOpen where there is no /proc/modules, as with
a kernel without loadable modules; no exception ends that, only the end of the process. So a child opens the driver
first, and this process only when the child came back. Runs as ``python -m gdrkit.cufile.probe`` there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdrkit.errors import Api, ApiError, Reason, SetupMissing
from gdrkit.forks import ForkSafeLock

__all__ = ["TIMEOUT_S", "ProbeAnswer", "main", "probe", "require"]

# libcufile opened in under a second where it opened at all; a machine that is busy gets the rest.
TIMEOUT_S = 30.0
_OPERATION = "cuFileDriverOpen in a child process"
_SHOWN_CHARACTERS = 400
_MODULES = Path("/proc/modules")
_NO_MODULES = "there is no /proc/modules, which libcufile reads for ever: use a kernel with loadable modules"

# How long the end of a killed child is waited for; one that a driver holds in the kernel does not end.
_KILL_S = 5.0
_lock = ForkSafeLock()
_opened: list[ProbeAnswer] = []


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What a child found.

    Attributes
    ----------
    version : int
        As cuFileGetVersion writes it: 1150 for 1.15.
    """

    version: int


def probe(*, timeout_s: float = TIMEOUT_S) -> ProbeAnswer:
    """Have a child open and close the driver.

    Raises
    ------
    SetupMissing
        ``TIMEOUT``: it did not come back, and was killed. Otherwise what the child met, with its numbers.
    """
    with tempfile.TemporaryDirectory(prefix="gdrkit-cufile-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            # Without this, libcufile leaves its log in the current folder.
            env={"CUFILE_LOGFILE_PATH": f"{folder}/cufile.log", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        answer, printed = _ended(child, timeout_s)
    lines = answer.decode("utf-8", "backslashreplace").splitlines()
    found = json.loads(lines[-1]) if child.returncode == 0 and lines else None
    if found is None:
        last = printed.decode("utf-8", "backslashreplace").strip()[-_SHOWN_CHARACTERS:]
        how = _how_it_ended(child.returncode) + (f"; it printed: {last}" if last else "")
        raise _failed(how, Reason.OTHER)
    if "failure" in found:
        raise _refused(found["failure"])
    return ProbeAnswer(version=int(found["version"]))


def require(*, timeout_s: float = TIMEOUT_S) -> ProbeAnswer:
    """As :func:`probe`; asked once, since what opened in a child opens here too.

    Raises
    ------
    SetupMissing
        As :func:`probe`; a failure is looked at again the next time.
    """
    with _lock:
        if not _opened:
            _opened.append(probe(timeout_s=timeout_s))
        return _opened[0]


def main() -> int:
    """Open and close the driver, and write what came of it as one line of JSON."""
    from gdrkit.cufile import _cufile

    answer: dict[str, object]
    try:
        _cufile.load()
        _cufile.call("cuFileDriverOpen", "driver_open")
        _cufile.call("cuFileDriverClose", "driver_close")
        answer = {"version": _cufile.library_version()}
    except ApiError as error:
        answer = {
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
    # On a line of its own: libraries print too.
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0


def _ended(child: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bytes]:
    try:
        return child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        how = f"it did not come back within {timeout_s:g} s and was killed"
        if not _killed(child):
            how = (
                f"it did not come back within {timeout_s:g} s, and not within {_KILL_S:g} s of SIGKILL: it is abandoned"
            )
        raise _failed(how, Reason.TIMEOUT, what_to_do="" if _MODULES.exists() else _NO_MODULES) from error
    except BaseException:
        # It is in a session of its own, so that an interrupt of the terminal does not reach it.
        _killed(child)
        raise


def _killed(child: subprocess.Popen[bytes]) -> bool:
    """Kill it with all that it started, and wait; False when a driver still holds it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdout, child.stderr):
        # What left its group may hold the other ends for as long as it likes.
        if pipe is not None:
            pipe.close()
    try:
        child.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _refused(failure: dict[str, Any]) -> SetupMissing:
    api, reason = Api(failure.pop("api")), Reason(failure.pop("reason"))
    return SetupMissing(api=api, reason=reason, **failure)


def _failed(detail: str, reason: Reason, *, what_to_do: str = "") -> SetupMissing:
    return SetupMissing(
        api=Api.CUFILE,
        operation=_OPERATION,
        status=None,
        status_name="no answer",
        reason=reason,
        what_to_do=what_to_do or f"run it alone to see why: {sys.executable} -m {__name__}",
        detail=detail,
    )


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the child was ended by {signal.Signals(-code).name}"
    return f"the child ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
