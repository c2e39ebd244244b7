"""Functions that wait with a time limit for the end of child processes and threads, and report which did not end.

SIGKILL does not end a process that waits inside the kernel (state D), such as for a driver or disk that hangs. A wait
for a process that is stopped by a debugger does not return either. Every wait for a child therefore has a limit.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import BrokenResource, Reason

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["KILL_TIMEOUT_S", "SpawnedChild", "join_threads", "kill_child"]

# Longest wait for the end of a killed child, in seconds.
KILL_TIMEOUT_S = 5.0
# Killed children that did not end within the limit. Each later call of kill_child reaps the children that have ended
# since.
_abandoned_children: list[subprocess.Popen[bytes] | SpawnedChild] = []
# Longest pause between two calls of SpawnedChild.poll() while waiting, in seconds.
_POLL_PAUSE_S_MAX = 0.05


class SpawnedChild:
    """A child process in its own session, whose process id and status survive an exception from a signal handler.

    ``Popen()`` loses the child if such an exception comes right after the fork. Here, ``list.extend(map(...))`` starts
    the child and stores its process id, and a second such call reaps the child and stores its status. Python runs no
    signal handler inside such a call, because the whole call is C code.
    """

    def __init__(self) -> None:
        # Holds the process id once the child was started.
        self._started_pids: list[int] = []
        # Holds (process id, wait status) once the child was reaped.
        self._reaped_statuses: list[tuple[int, int]] = []

    @property
    def pid(self) -> int:
        """The process id."""
        return self._started_pids[0]

    @property
    def returncode(self) -> int | None:
        """The exit status, as in :class:`subprocess.Popen`; None if the child was not reaped."""
        return os.waitstatus_to_exitcode(self._reaped_statuses[0][1]) if self._reaped_statuses else None

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], *, output_path: str, error_output_path: str
    ) -> None:
        """Start the child. It inherits no descriptors, and its output goes to two files."""
        output_flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file_actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, output_path, output_flags, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, error_output_path, output_flags, 0o600),
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in map(int, os.listdir("/proc/self/fd")) if fd not in (0, 1, 2)),  # noqa: PTH208
        ]
        spawn = functools.partial(os.posix_spawn, file_actions=file_actions, setsid=True)
        self._started_pids.extend(map(spawn, command[:1], [command], [environ]))

    def poll(self) -> int | None:
        """Reap the child if it has ended. Return :attr:`returncode`."""
        if not self._reaped_statuses:
            try:
                # While the child runs, waitpid returns the process id 0, which the filter drops.
                self._reaped_statuses.extend(
                    filter(operator.itemgetter(0), map(os.waitpid, self._started_pids, (os.WNOHANG,)))
                )
            except ChildProcessError:  # If this process ignores SIGCHLD, the kernel keeps no status. Assume 0.
                self._reaped_statuses.append((self.pid, 0))
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait until the child has ended, and return its exit status.

        Raises
        ------
        TimeoutExpired
            The child did not end within `timeout` seconds.
        """
        deadline_s, pause_s = time.monotonic() + timeout, 0.0005
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_PAUSE_S_MAX)
        return status

    def kill(self) -> None:
        """Kill the process group of the child, unless the child was reaped: another process may have its id then."""
        if not self._reaped_statuses:
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill the child if it was started and not reaped yet. Return the error text of :func:`kill_child`, or ""."""
        # SpawnedChild.kill() already kills the whole process group, so kill_child() need not.
        return kill_child(self, leads_group=False) if self._started_pids and not self._reaped_statuses else ""


def kill_child(
    child: subprocess.Popen[bytes] | SpawnedChild, *, leads_group: bool = True, timeout_s: float = KILL_TIMEOUT_S
) -> str:
    """Kill a child and wait until it has ended, at most `timeout_s`.

    If the child does not end in time, a later call, for any child, reaps it.

    Parameters
    ----------
    child : Popen or SpawnedChild
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
        limit and the process state.
    """
    _abandoned_children[:] = [abandoned for abandoned in _abandoned_children if abandoned.poll() is None]
    if leads_group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    # An earlier call has already waited for an abandoned child.
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
    running_names = []
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            running_names.append(thread.name)
    if running_names:
        message = f"threads did not end within {timeout_s:g} s: {', '.join(running_names)}"
        raise BrokenResource(message, reason=Reason.TIMEOUT)


def _read_process_state(pid: int) -> str:
    """Return the state of a process in /proc/PID/stat, such as D (waits in the kernel) or Z (ended, not reaped)."""
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    # The line is "PID (PROGRAM) STATE ...". The name of the program may contain brackets itself.
    fields = stat_line.rpartition(")")[2].split()
    return fields[0] if fields else "unknown"
