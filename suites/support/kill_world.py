"""Processes that are watched, stopped and killed: clients, an agent, its server; and the traps that catch them.

A trap is a rule of the twins' fault plan with ``stop=``: the process stops itself in the named call, and the renamed
file says which one did. Nothing here guesses from time: what is awaited is seen, in /proc or in shared memory.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from support.kill_client import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Client",
    "HungError",
    "RingMemory",
    "Traps",
    "descriptors",
    "is_gone",
    "is_idle",
    "is_stopped",
    "links",
    "pause",
    "shared_memory_of",
    "until",
]

_SUITES = Path(__file__).resolve().parents[1]
_SHARED = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is.
_LOOK_S = 0.001
_START_S = 60.0
# What a client says beside its own deadline: to be scheduled on a busy machine.
_SLACK_S = 5.0


class HungError(AssertionError):
    """Something that should have ended, or answered, has not."""


def until(holds: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
    """Look again and again until it is so."""
    end, between = time.monotonic() + timeout_s, threading.Event()
    while not holds():
        if time.monotonic() > end:
            message = f"not within {timeout_s} s: {what}"
            raise HungError(message)
        between.wait(_LOOK_S)


def _states(process_id: int) -> list[str]:
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{process_id}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        # A thread, or the whole process, ended meanwhile: not stopped, not idle.
        return []
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def is_stopped(process_id: int) -> bool:
    """Whether every thread of it is stopped by a signal."""
    states = _states(process_id)
    return bool(states) and all(state == "T" for state in states)


def is_idle(process_id: int) -> bool:
    """Whether every thread of it sleeps."""
    states = _states(process_id)
    return bool(states) and all(state == "S" for state in states)


def is_gone(process_id: int) -> bool:
    """Whether there is no such process any more, but for the record that its parent has not fetched."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in {"Z", "X"}


def pause(process_id: int) -> None:
    """Stop a process, and see it stopped."""
    os.kill(process_id, signal.SIGSTOP)
    until(lambda: is_stopped(process_id), f"process {process_id} is stopped")


class Traps:
    """Named calls, in which processes stop when a trap is set.

    Parameters
    ----------
    folder : Path
        For the files of the traps and the plan; ``plan`` is the path for GDRKIT_TWINS_FAULTS.
    points : dict
        The name of a trap for each function of the plan.
    """

    def __init__(self, folder: Path, points: dict[str, str]) -> None:
        self._folder = folder
        folder.mkdir()
        self.plan = folder / "plan"
        rules = [f"{point} call=* stop={folder / trap}" for point, trap in points.items()]
        self.plan.write_text("\n".join(["gdrkit-faults 1", *rules, ""]))

    def set(self, trap: str) -> None:
        """The next call stops its process."""
        (self._folder / trap).touch()

    def unset(self, trap: str) -> bool:
        """Take it away; whether nobody ran into it, and nobody will: the one who does renames it."""
        try:
            (self._folder / trap).unlink()
        except FileNotFoundError:
            return False
        return True

    def caught(self, trap: str, process_id: int) -> bool:
        """Whether this process is stopped in the call; that the mark is there and the process stopped are one fact."""
        marks = list(self._folder.glob(f"{trap}.*"))
        assert all(mark.suffix == f".{process_id}" for mark in marks), f"{marks} instead of process {process_id}"
        return bool(marks) and is_stopped(process_id)

    def catch(self, trap: str, process_id: int, *, timeout_s: float = WAIT_S) -> None:
        """Wait until this process is in it, and take the mark away."""
        until(lambda: self.caught(trap, process_id), f"process {process_id} in trap {trap}", timeout_s=timeout_s)
        (self._folder / f"{trap}.{process_id}").unlink()


class RingMemory:
    """The heads and tails of a ring, as its agent has it mapped; stays after both have died."""

    def __init__(self, agent: int, name: str) -> None:
        found = next(
            link for link in Path(f"/proc/{agent}/fd").iterdir() if _target(link).startswith(f"{_SHARED}/{name}")
        )
        descriptor = os.open(found, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    @property
    def undrained(self) -> int:
        """Heads and tails differ by what was submitted and is not yet answered."""
        head, tail, _, _ = struct.unpack_from("=4i", self._memory)
        return int(head != tail)

    @property
    def unreaped(self) -> bool:
        """Whether a completion is there that nobody has taken."""
        _, _, head, tail = struct.unpack_from("=4i", self._memory)
        return bool(head != tail)

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()


class Client:
    """An application in a process of its own (:mod:`support.kill_client`), told what to do line by line.

    `kind` is where its memory is.
    """

    def __init__(self, mount: Path, file: Path, kind: str) -> None:
        path = os.pathsep.join([str(_SUITES), os.environ.get("PYTHONPATH", "")])
        self.links: set[str] = set()
        self._mount = mount
        self._started = False
        self.process = subprocess.Popen(
            [sys.executable, str(_SUITES / "support" / "kill_client.py"), str(mount), str(file), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": path},
        )

    def open(self) -> None:
        """Have it open everything; what it published then is in `links`."""
        before = links(self._mount)
        self.ask("open", timeout_s=_START_S)
        self.links = links(self._mount) - before

    def tell(self, action: str, **arguments: object) -> None:
        """Have it do something; :meth:`answer` is what came of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")

    def answer(self, *, timeout_s: float = WAIT_S + _SLACK_S) -> dict[str, object]:
        """What came of the last thing that it was told; HungError when that takes too long."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not readable:
            message = f"client {self.process.pid} does not answer within {timeout_s} s"
            raise HungError(message)
        line = self.process.stdout.readline()
        assert line, f"client {self.process.pid} has ended"
        found: dict[str, object] = json.loads(line)
        return found

    def ask(self, action: str, *, timeout_s: float = WAIT_S + _SLACK_S, **arguments: object) -> object:
        """Tell and answer, where nothing may go wrong."""
        self.tell(action, **arguments)
        answer = self.answer(timeout_s=timeout_s)
        assert "errno" not in answer, answer
        return answer["result"]

    def ring(self, agent: int, *, for_read: bool) -> RingMemory:
        """One of its rings, as the agent has it."""
        (name,) = (link for link in self.links if f".{'r' if for_read else 'w'}0" in link)
        return RingMemory(agent, f"hf3fs-iov-{name.partition('.')[0]}")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self._hang_up()

    def end(self) -> None:
        """Have it give everything back, and end."""
        self.tell("close")
        answer = self.answer()
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(WAIT_S) == 0, answer
        self._hang_up()

    def _hang_up(self) -> None:
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                try:
                    end.close()
                except BrokenPipeError:
                    # What it was told last is lost with it.
                    continue


def links(mount: Path) -> set[str]:
    """What is published."""
    names = {path.name for path in (mount / "3fs-virt" / "iovs").iterdir()}
    return {name for name in names if not name.startswith("submit-ios")}


def descriptors(process_id: int) -> list[str]:
    """What a process has open, and mapped of shared memory."""
    found = [_target(link) for link in Path(f"/proc/{process_id}/fd").iterdir()]
    maps = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return [*found, *(line.split(maxsplit=5)[5] for line in maps if f"{_SHARED}/" in line)]


def shared_memory_of(process_id: int) -> set[str]:
    """The names of the shared memory of usrbio that a process has mapped."""
    maps = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[5] for line in maps if f"{_SHARED}/hf3fs-iov-" in line)
    return {path.removeprefix(f"{_SHARED}/").removesuffix(" (deleted)") for path in paths}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""
