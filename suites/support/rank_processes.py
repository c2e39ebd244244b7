"""Processes of ranks that wait for each other, with one deadline after which all are killed.

The first line that the first rank prints is passed to the standard input of the others. If a rank fails, the error has
the last output of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["RankError", "run_ranks"]

# An aborted rank has this time, in seconds, to print its stack.
_ABORT_S = 5.0
_LOG_LINES = 40
_CHUNK_BYTES = 1 << 16


class RankError(Exception):
    """A rank failed, or the deadline has passed. The text has the last output of all ranks."""


class _Rank:
    """The process of a rank. Its standard error and the log of NCCL are files."""

    def __init__(self, number: int, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self.number, self.received = number, b""
        self._log, self._debug = folder / f"rank{number}.stderr", folder / f"rank{number}.nccl"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(self._debug)},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout

    def send(self, line: bytes) -> None:
        """Write a line to the standard input, and close it."""
        # A rank that has ended is reported by its exit code.
        with contextlib.suppress(BrokenPipeError):
            self.input.write(line)
            self.input.close()

    def end(self) -> str:
        """Kill the process and its children if they still run, and return how the process ended."""
        if self.process.poll() is None:
            self._signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ABORT_S)
            outcome = "was killed"
        else:
            outcome = f"exit {self.process.returncode}"
        # Children of a process that has ended may still run, and may ignore SIGABRT.
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.input, self.output):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return outcome

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def report(self, outcome: str) -> str:
        """Return the outcome and the last lines of standard error and of the log."""
        parts = [f"--- rank {self.number}: {outcome}"]
        for path in (self._log, self._debug):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            parts += lines[-_LOG_LINES:]
        return "\n".join(parts)


def run_ranks(
    commands: Iterable[Sequence[str]], *, folder: Path, environ: Mapping[str, str], deadline_s: float
) -> list[list[str]]:
    """Run the processes of all ranks at the same time.

    Parameters
    ----------
    commands : iterable of sequence of str
        The command of each rank.
    folder : Path
        Existing folder for the logs.
    environ : mapping
        Environment of the processes.
    deadline_s : float
        Time, in seconds, within which all must end.

    Returns
    -------
    list of list of str
        The lines that each rank printed.

    Raises
    ------
    RankError
        A rank ended with an exit code other than 0, or the deadline has passed. All processes have ended.
    """
    ranks: list[_Rank] = []
    failure = None
    try:
        for number, command in enumerate(commands):
            ranks.append(_Rank(number, command, environ, folder))
        failure = _wait_for_all(ranks, deadline_s)
    finally:
        outcomes = [each.end() for each in ranks]
    if failure is not None:
        reports = [each.report(outcome) for each, outcome in zip(ranks, outcomes, strict=True)]
        raise RankError("\n".join([failure, *reports]))
    return [each.received.decode().splitlines() for each in ranks]


def _wait_for_all(ranks: Sequence[_Rank], deadline_s: float) -> str | None:
    """Read the output of the ranks until all have ended with exit code 0; return the reason if one does not."""
    end_s = time.monotonic() + deadline_s
    first, others = ranks[0], list(ranks[1:])
    with selectors.DefaultSelector() as selector:
        for each in ranks:
            selector.register(each.output, selectors.EVENT_READ, each)
        while selector.get_map():
            events = selector.select(max(0.0, end_s - time.monotonic()))
            if not events:
                return f"the ranks had not ended after {deadline_s:g} s"
            for key, _ in events:
                rank: _Rank = key.data
                chunk = os.read(key.fd, _CHUNK_BYTES)
                rank.received += chunk
                if chunk:
                    continue
                selector.unregister(key.fileobj)
                try:
                    code = rank.process.wait(max(0.0, end_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return f"rank {rank.number} had closed its output and not ended after {deadline_s:g} s"
                if code:
                    return f"rank {rank.number} ended with {code}"
            if others and b"\n" in first.received:
                for each in others:
                    each.send(first.received.partition(b"\n")[0] + b"\n")
                others = []
    return None
