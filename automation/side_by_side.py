"""Function that runs several commands at the same time and prints the output of each command when it ends."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from automation.commands import ROOT, print_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Part", "call_side_by_side", "choose_job_count"]

_JOBS_MAX = 8
_POLL_PERIOD_S = 0.2
_PROGRESS_PERIOD_S = 30.0


@dataclass(frozen=True, slots=True)
class Part:
    """A command to run: its name in the output, and its words."""

    name: str
    command: tuple[str, ...]


@dataclass(slots=True)
class _RunningCommand:
    part: Part
    process: subprocess.Popen[bytes]
    output_file: BinaryIO
    start_s: float

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.start_s


def choose_job_count() -> int:
    """Return how many commands run at the same time: two for each processor, and at most eight.

    On average, a suite uses a third to a half of a processor, because its cases mostly wait for other processes and for
    time limits.
    """
    return min(2 * (os.cpu_count() or 1), _JOBS_MAX)


def call_side_by_side(parts: Sequence[Part], *, jobs_max: int) -> dict[str, int]:
    """Start the commands in the given order, at most `jobs_max` at the same time, and return their exit codes by name.

    The output of a command is printed when it ends. If no command ends for 30 s, a line names the running commands.
    """
    waiting_parts, running_commands, exit_codes = list(parts), list[_RunningCommand](), dict[str, int]()
    print_line(f"{len(parts)} parts, {jobs_max} at a time")
    last_print_time_s = time.monotonic()
    try:
        while waiting_parts or running_commands:
            while waiting_parts and len(running_commands) < jobs_max:
                running_commands.append(_start(waiting_parts.pop(0)))
            ended_commands = [command for command in running_commands if command.process.poll() is not None]
            for command in ended_commands:
                running_commands.remove(command)
                exit_codes[command.part.name] = command.process.returncode
                _print_output(command, progress_text=f"{len(exit_codes)} of {len(parts)}")
            if ended_commands:
                last_print_time_s = time.monotonic()
            elif time.monotonic() - last_print_time_s >= _PROGRESS_PERIOD_S:
                last_print_time_s = time.monotonic()
                names = [f"{command.part.name} ({command.elapsed_s:.0f} s)" for command in running_commands]
                print_line("running: " + ", ".join(names))
            else:
                time.sleep(_POLL_PERIOD_S)
    finally:
        # After Ctrl-C, the commands have also received SIGINT, because they are in the same process group.
        for command in running_commands:
            command.process.terminate()
            command.process.wait()
            command.output_file.close()
    return exit_codes


def _start(part: Part) -> _RunningCommand:
    output_file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when the command has ended.
    process = subprocess.Popen(
        part.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output_file, stderr=subprocess.STDOUT
    )
    return _RunningCommand(part, process, output_file, time.monotonic())


def _print_output(command: _RunningCommand, *, progress_text: str) -> None:
    with command.output_file as output_file:
        output_file.seek(0)
        text = output_file.read().decode(errors="replace").rstrip()
    code = command.process.returncode
    print_line(f"---- {command.part.name}: exit code {code} after {command.elapsed_s:.0f} s ({progress_text})")
    print_line(text)
