"""Commands that run at the same time, each with its output printed whole when it ends."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from automation.commands import ROOT, say

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Part", "call_side_by_side", "job_count"]

_JOBS_MAX = 4
_POLL_S = 0.2
_PROGRESS_S = 30.0


@dataclass(frozen=True, slots=True)
class Part:
    """One of the commands: its name in the output, and its words."""

    name: str
    command: tuple[str, ...]


@dataclass(slots=True)
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    output: BinaryIO
    began_s: float

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.began_s


def job_count() -> int:
    """Return how many commands may run at the same time: one more than there are processors, because cases also wait
    for time limits and other processes; at most four.
    """
    return min((os.cpu_count() or 1) + 1, _JOBS_MAX)


def call_side_by_side(parts: Sequence[Part], *, jobs: int) -> dict[str, int]:
    """Run the commands in the given order, `jobs` of them at the same time, and return their exit codes by name.

    The output of a command is printed when the command ends. While none ends, a line names the running ones every 30 s.
    """
    waiting, running, codes = list(parts), list[_Running](), dict[str, int]()
    say(f"{len(parts)} parts, {jobs} at a time")
    spoken_s = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0)))
            ended = [each for each in running if each.process.poll() is not None]
            for each in ended:
                running.remove(each)
                codes[each.part.name] = each.process.returncode
                _print_output(each, done=len(codes), total=len(parts))
            if ended:
                spoken_s = time.monotonic()
            elif time.monotonic() - spoken_s >= _PROGRESS_S:
                spoken_s = time.monotonic()
                say("running: " + ", ".join(f"{each.part.name} ({each.took_s:.0f} s)" for each in running))
            else:
                time.sleep(_POLL_S)
    finally:
        # An interrupt from the terminal has reached the commands too.
        for each in running:
            each.process.terminate()
            each.process.wait()
            each.output.close()
    return codes


def _start(part: Part) -> _Running:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - the command that writes it is waited for elsewhere.
    process = subprocess.Popen(
        part.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    return _Running(part, process, output, time.monotonic())


def _print_output(ended: _Running, *, done: int, total: int) -> None:
    with ended.output as output:
        output.seek(0)
        text = output.read().decode(errors="replace").rstrip()
    say(f"---- {ended.part.name}: exit code {ended.process.returncode} after {ended.took_s:.0f} s ({done} of {total})")
    say(text)
