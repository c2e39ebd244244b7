"""Waits with a time limit for the end of child processes and threads. Each wait reports the children and threads that
did not end.

SIGKILL does not end a process that waits inside the kernel (state D), such as for a driver or disk that hangs. A wait
for a process that is stopped by a debugger does not return either. Every wait for a child therefore has a limit.
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

__all__ = ["KILL_TIMEOUT_S", "join_threads", "kill_child"]

# Longest wait for the end of a killed child, in seconds.
KILL_TIMEOUT_S = 5.0
# Killed children that had not ended within the limit. Each later call of kill_child collects the ended children.
_abandoned_children: list[subprocess.Popen[bytes]] = []


def kill_child(child: subprocess.Popen[bytes], *, leads_group: bool = True, timeout_s: float = KILL_TIMEOUT_S) -> str:
    """Kill a child and wait until it has ended, or abandon it.

    Parameters
    ----------
    child : Popen
        The child. If it has ended already, its process group is killed nevertheless.
    leads_group : bool
        Whether the child leads a process group (``process_group=0``, ``start_new_session=True``). The whole group is
        killed: all processes that the child has started, except processes that left the group.
    timeout_s : float
        Longest wait for the end, in seconds.

    Returns
    -------
    str
        An empty string if the child has ended. Otherwise a text for an error message, with the process id, the time
        and the process state.
    """
    _abandoned_children[:] = [child for child in _abandoned_children if child.poll() is None]
    if leads_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    is_abandoned = child in _abandoned_children
    try:
        child.wait(0 if is_abandoned else timeout_s)
    except subprocess.TimeoutExpired:
        if not is_abandoned:
            _abandoned_children.append(child)
    else:
        return ""
    return (
        f"process {child.pid} did not end within {timeout_s:g} s of SIGKILL (state {_read_process_state(child.pid)}) "
        "and was left behind"
    )


def join_threads(threads: Iterable[threading.Thread], *, timeout_s: float) -> None:
    """Wait until all threads have ended, at most `timeout_s` seconds in total.

    Raises
    ------
    BrokenResource
        ``TIMEOUT``: some threads have not ended. The caller must not release objects that these threads use.
    """
    deadline_s = time.monotonic() + timeout_s
    running = []
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            running.append(thread.name)
    if running:
        message = f"threads did not end within {timeout_s:g} s: {', '.join(running)}"
        raise BrokenResource(message, reason=Reason.TIMEOUT)


def _read_process_state(pid: int) -> str:
    """Return the state of a process in /proc/PID/stat, such as D (waits in the kernel) or Z (ended, not collected)."""
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    # The line is "PID (PROGRAM) STATE ...". The name of the program may contain brackets itself.
    fields = stat_line.rpartition(")")[2].split()
    return fields[0] if fields else "unknown"
