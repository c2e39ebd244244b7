"""Start of the processes of all ranks of an NCCL job, with one deadline for all of them.

The first rank prints the ncclUniqueId as its first line, and the other ranks get this line on their standard input.
Ranks wait for each other, so the other ranks would hang if one rank failed. So if a rank fails or the deadline passes,
all ranks are killed, and the error contains the last output of all ranks.
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

# Time that a rank has to print its stack after SIGABRT, in seconds.
_ABORT_TIMEOUT_S = 5.0
# Number of lines from the end of each log file that an error contains.
_LOG_LINES_MAX = 40
_READ_BYTES_MAX = 1 << 16


class RankError(Exception):
    """A rank failed, or the deadline has passed. The text has the last output of all ranks."""


class _Rank:
    """The process of a rank. Its standard error and its NCCL log are written to files."""

    def __init__(self, index: int, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self.index, self.output_data = index, b""
        self._error_file, self._nccl_log = folder / f"rank{index}.stderr", folder / f"rank{index}.nccl"
        with self._error_file.open("wb") as error_file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error_file,
                env={"NCCL_DEBUG": "INFO", **environ, "NCCL_DEBUG_FILE": str(self._nccl_log)},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout

    def send(self, line: bytes) -> None:
        """Write a line to the standard input of the rank, and close the standard input."""
        # The pipe is broken if the rank has ended. Then run_ranks() reports the exit code of the rank.
        with contextlib.suppress(BrokenPipeError):
            self.input.write(line)
            self.input.close()

    def end(self) -> str:
        """Kill the process and its children if they still run, and return how the process ended."""
        if self.process.poll() is None:
            self._send_signal_to_group(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ABORT_TIMEOUT_S)
            outcome = "was killed"
        else:
            outcome = f"exit {self.process.returncode}"
        # Child processes of the rank may still run, and they may ignore SIGABRT.
        self._send_signal_to_group(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.input, self.output):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return outcome

    def _send_signal_to_group(self, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal_number)

    def report(self, outcome: str) -> str:
        """Return the outcome and the last lines of standard error and of the NCCL log."""
        report_lines = [f"--- rank {self.index}: {outcome}"]
        for path in (self._error_file, self._nccl_log):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            report_lines += lines[-_LOG_LINES_MAX:]
        return "\n".join(report_lines)


def run_ranks(
    commands: Iterable[Sequence[str]], *, folder: Path, environ: Mapping[str, str], deadline_s: float
) -> list[list[str]]:
    """Run the processes of all ranks at the same time.

    Parameters
    ----------
    commands : iterable of sequence of str
        The command of each rank.
    folder : Path
        Existing folder for the logs. NCCL's log of a rank is ``rank0.nccl`` and so on.
    environ : mapping
        Environment of the processes.
    deadline_s : float
        Time within which all ranks must end, in seconds.

    Returns
    -------
    list of list of str
        The lines that each rank printed.

    Raises
    ------
    RankError
        A rank ended with an exit code other than 0, or the deadline passed. When the error is raised, all processes
        have ended.
    """
    ranks: list[_Rank] = []
    failure_reason = None
    try:
        for index, command in enumerate(commands):
            ranks.append(_Rank(index, command, environ, folder))
        failure_reason = _wait_for_all(ranks, deadline_s)
    finally:
        outcomes = [rank.end() for rank in ranks]
    if failure_reason is not None:
        reports = [rank.report(outcome) for rank, outcome in zip(ranks, outcomes, strict=True)]
        raise RankError("\n".join([failure_reason, *reports]))
    return [rank.output_data.decode().splitlines() for rank in ranks]


def _wait_for_all(ranks: Sequence[_Rank], deadline_s: float) -> str | None:
    """Read the output of the ranks until all have ended. Return the reason if a rank failed or the deadline passed."""
    end_s = time.monotonic() + deadline_s
    first_rank, ranks_without_id = ranks[0], list(ranks[1:])
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.output, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = selector.select(max(0.0, end_s - time.monotonic()))
            if not events:
                return f"the ranks did not end within {deadline_s:g} s"
            for selector_key, _ in events:
                rank = selector_key.data
                new_output = os.read(selector_key.fd, _READ_BYTES_MAX)
                rank.output_data += new_output
                if new_output:
                    continue
                # No data means that the rank has closed its output.
                selector.unregister(selector_key.fileobj)
                try:
                    exit_code = rank.process.wait(max(0.0, end_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return f"rank {rank.index} closed its output but did not end within {deadline_s:g} s"
                if exit_code:
                    return f"rank {rank.index} ended with exit code {exit_code}"
            if ranks_without_id and b"\n" in first_rank.output_data:
                for rank_without_id in ranks_without_id:
                    rank_without_id.send(first_rank.output_data.partition(b"\n")[0] + b"\n")
                ranks_without_id = []
    return None
