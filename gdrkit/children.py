"""The end of child processes and threads: bounded waits, and an answer that says which of them did not end.

SIGKILL does not end a process that waits inside the kernel (state D, a driver or disk that hangs), and a process that
a debugger holds is not collected. Every wait for the end of a child therefore has a limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import BrokenResource, Reason

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

__all__ = ["KILLED_S", "join_threads", "kill_child"]

# How long the end of a killed child is waited for, in seconds.
KILLED_S = 5.0
# Killed children that had not ended. Each later call collects those that have ended since.
_abandoned: list[subprocess.Popen[bytes]] = []


def kill_child(child: subprocess.Popen[bytes], *, leads_group: bool = True, timeout_s: float = KILLED_S) -> str:
    """Kill a child and wait until it has ended, or abandon it.

    Parameters
    ----------
    child : Popen
        It may have ended already; its process group is killed also then.
    leads_group : bool
        Whether the child leads a process group (``process_group=0``, ``start_new_session=True``), which is killed as a
        whole: all that the child has started, except what left the group.
    timeout_s : float
        How long to wait for the end.

    Returns
    -------
    str
        A clause that names the process, the time and the process state; empty when the child has ended.
    """
    _abandoned[:] = [other for other in _abandoned if other.poll() is None]
    if leads_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    is_known = child in _abandoned
    try:
        child.wait(0 if is_known else timeout_s)
    except subprocess.TimeoutExpired:
        if not is_known:
            _abandoned.append(child)
    else:
        return ""
    return (
        f"process {child.pid} did not end within {timeout_s:g} s of SIGKILL (state {_state(child.pid)}) "
        "and was left behind"
    )


def join_threads(threads: Iterable[threading.Thread], *, timeout_s: float) -> None:
    """Wait until all threads have ended, with one deadline for all.

    Raises
    ------
    BrokenResource
        ``TIMEOUT``: some have not ended. They still use what they were given, so the caller must not release it.
    """
    deadline_s = time.monotonic() + timeout_s
    left = []
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    if left:
        message = f"threads did not end within {timeout_s:g} s: {', '.join(left)}"
        raise BrokenResource(message, reason=Reason.TIMEOUT)


def _state(process: int) -> str:
    """Return the letter of /proc/PID/stat for a process: D waits in the kernel, Z was not collected."""
    try:
        # The name before it is in brackets, and may contain brackets itself.
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "unknown"
