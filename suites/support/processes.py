"""Tools for cases with several processes: wait with a timeout, query /proc, and exchange lines with a child process."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support.python_child import module_command, suites_environ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "WAIT_S",
    "HungError",
    "LineChildProcess",
    "is_gone",
    "is_idle",
    "is_stopped",
    "limit_open_files",
    "list_open_paths",
    "stop_process",
    "wait_until",
]

# Default timeout of `wait_until`, and the time within which a process must notice the end of another process.
WAIT_S = 10.0
# Timeout of a line from a child process. The start of a Python interpreter took half a minute on a busy machine.
_LINE_TIMEOUT_S = 90.0
_POLL_PERIOD_S = 0.001
_SHARED_MEMORY_FOLDER = "/dev/shm/"  # noqa: S108 - the folder of POSIX shared memory.


class HungError(AssertionError):
    """A condition did not hold, or a process printed no line, before the timeout."""


def wait_until(condition: Callable[[], bool], description: str, *, timeout_s: float = WAIT_S) -> None:
    """Wait until the condition holds. After the timeout, raise :class:`HungError`.

    The error contains `description`, which names the condition, for example "process 12 is stopped".
    """
    # No thread sets this event, so a wait for the event is a pause.
    end_s, never_set_event = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > end_s:
            message = f"timeout after {timeout_s} s of waiting for: {description}"
            raise HungError(message)
        never_set_event.wait(_POLL_PERIOD_S)


def is_stopped(process_id: int) -> bool:
    """Return whether every thread of the process is stopped by a signal."""
    states = _read_thread_states(process_id)
    return bool(states) and all(state == "T" for state in states)


def is_idle(process_id: int) -> bool:
    """Return whether every thread of the process sleeps."""
    states = _read_thread_states(process_id)
    return bool(states) and all(state == "S" for state in states)


def is_gone(process_id: int) -> bool:
    """Return whether the process has ended. A zombie, for which its parent has not yet waited, has ended, too."""
    try:
        stat_text = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return _read_state(stat_text) in {"Z", "X"}


def stop_process(process_id: int) -> None:
    """Send SIGSTOP to a process and wait until all its threads are stopped."""
    os.kill(process_id, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process_id), f"process {process_id} is stopped")


@contextlib.contextmanager
def limit_open_files(count: int) -> Iterator[None]:
    """Limit the open files of this process to `count` during the block. Its hard limit must be at least `count`."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


def list_open_paths(process_id: int) -> list[str]:
    """Return the paths of the files that a process has open, and of the shared memory that it has mapped."""
    paths = []
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.append(str(link.readlink()))
    # The sixth field of a line of /proc/PID/maps is the path.
    map_lines = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return [*paths, *(line.split(maxsplit=5)[5] for line in map_lines if _SHARED_MEMORY_FOLDER in line)]


def _read_thread_states(process_id: int) -> list[str]:
    """Return the state letter of each thread, or an empty list if a thread or the process has just ended."""
    try:
        stat_texts = [(task / "stat").read_text() for task in Path(f"/proc/{process_id}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [_read_state(stat_text) for stat_text in stat_texts]


def _read_state(stat_text: str) -> str:
    """Return the state letter in the contents of a file ``stat`` of /proc."""
    # The name of the program is in parentheses, and may contain blanks and parentheses.
    return stat_text.rpartition(")")[2].split()[0]


class LineChildProcess:
    """A module of the suites in a child process that exchanges lines of text with the case.

    Use it as a context manager. At the end of the block, the process is killed if it still runs.
    """

    def __init__(self, module: str, *arguments: object, environ: Mapping[str, str] = os.environ) -> None:
        self._module = module
        self.process = subprocess.Popen(
            module_command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The pipes are unbuffered, because select() does not see data that Python has read in advance.
            bufsize=0,
            env=suites_environ(environ),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout

    def write_line(self, line: str) -> None:
        """Send a line to the standard input of the process."""
        self._input.write(f"{line}\n".encode())

    def read_line(self, *, timeout_s: float = _LINE_TIMEOUT_S) -> str:
        """Return the next line of the standard output; raise :class:`HungError` after the timeout."""
        readable, _, _ = select.select([self._output], [], [], timeout_s)
        if not readable:
            message = f"{self._module} printed no line within {timeout_s} s"
            raise HungError(message)
        line = self._output.readline().decode().strip()
        assert line, f"{self._module} has ended or printed an empty line"
        return line

    def expect_line(self, expected: str) -> None:
        """Read the next line, and require that it is `expected`."""
        line = self.read_line()
        assert line == expected, f"{line!r} instead of {expected!r}"

    def end(self, *, timeout_s: float = _LINE_TIMEOUT_S) -> None:
        """Close the standard input, and require that the process then ends with exit code 0."""
        self._input.close()
        exit_code = self.process.wait(timeout_s)
        self._output.close()
        assert exit_code == 0, f"{self._module} ended with exit code {exit_code}"

    def kill(self) -> None:
        """Kill the process by SIGKILL and wait for its end."""
        self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self._input, self._output):
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
