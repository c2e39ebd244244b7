"""Processes that need each other, with one deadline for all: none outlives it, and each tells why it did not end.

What the first of them prints as its first line becomes a line of the standard input of the others.
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

# For the stack of one that is told to end.
_LAST_WORDS_S = 5.0
_LINES_SHOWN = 40
_CHUNK_BYTES = 1 << 16


class RankError(Exception):
    """A rank failed, or none did and they did not come to an end; with what all of them had written."""


class _Rank:
    """One process; its standard error is a file, whose lines are shown when something went wrong."""

    def __init__(self, number: int, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self.number, self.said = number, b""
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

    def hand(self, line: bytes) -> None:
        """Give it the line, and nothing more."""
        # One that has ended does not read it; why it has ended is seen at its end.
        with contextlib.suppress(BrokenPipeError):
            self.input.write(line)
            self.input.close()

    def end(self) -> str:
        """End it with all that it started; how it ended."""
        if self.process.poll() is None:
            self._signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LAST_WORDS_S)
            how = "was ended"
        else:
            how = f"exit {self.process.returncode}"
        # Also when it has ended: what it started may live on, and may ignore what ended it.
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.input, self.output):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return how

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def told(self, how: str) -> str:
        """How it ended and what it wrote at last."""
        parts = [f"--- rank {self.number}: {how}"]
        for path in (self._log, self._debug):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            parts += lines[-_LINES_SHOWN:]
        return "\n".join(parts)


def run_ranks(
    commands: Iterable[Sequence[str]], *, folder: Path, environ: Mapping[str, str], deadline_s: float
) -> list[list[str]]:
    """Run a process for each command, all at once.

    Parameters
    ----------
    commands : iterable of sequence of str
        One for each rank.
    folder : Path
        For what they write; it is there.
    environ : mapping
        Their environment.
    deadline_s : float
        When all of them must have ended.

    Returns
    -------
    list of list of str
        The lines that each has printed.

    Raises
    ------
    RankError
        One ended with another exit code than 0, or the deadline passed; all have ended.
    """
    ranks: list[_Rank] = []
    why = None
    try:
        for number, command in enumerate(commands):
            ranks.append(_Rank(number, command, environ, folder))
        why = _follow(ranks, time.monotonic() + deadline_s, deadline_s)
    finally:
        ends = [each.end() for each in ranks]
    if why is not None:
        raise RankError("\n".join([why, *(each.told(how) for each, how in zip(ranks, ends, strict=True))]))
    return [each.said.decode().splitlines() for each in ranks]


def _follow(ranks: Sequence[_Rank], deadline: float, deadline_s: float) -> str | None:
    """Read what they say until all have ended well; else why not."""
    first, others = ranks[0], list(ranks[1:])
    with selectors.DefaultSelector() as selector:
        for each in ranks:
            selector.register(each.output, selectors.EVENT_READ, each)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                return f"the ranks had not ended after {deadline_s:g} s"
            for key, _ in events:
                rank: _Rank = key.data
                chunk = os.read(key.fd, _CHUNK_BYTES)
                rank.said += chunk
                if chunk:
                    continue
                selector.unregister(key.fileobj)
                try:
                    code = rank.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return f"rank {rank.number} had closed its output and not ended after {deadline_s:g} s"
                if code:
                    return f"rank {rank.number} ended with {code}"
            if others and b"\n" in first.said:
                for each in others:
                    each.hand(first.said.partition(b"\n")[0] + b"\n")
                others = []
    return None
