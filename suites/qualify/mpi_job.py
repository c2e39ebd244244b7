"""A job of four ranks on two machines (network namespaces with names of their own, and a cable between them), or of
two ranks on this one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["GDRKIT", "Job", "job", "job_of_this_machine"]

_MARKER = "GDRKIT_SUITES_JOB"
GDRKIT = (sys.executable, "-m", "gdrkit")
# Open MPI starts its daemon on another machine by this program, with the machine's name first.
_AGENT = """#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@"
"""


@dataclass
class Job:
    """What was started."""

    process: subprocess.Popen[str]
    marker: str

    def line_with(self, text: str) -> str:
        """The next line of its output that has this."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if text in line:
                return line
        message = f"{text!r} was not said:\n{''.join(seen)}"
        raise AssertionError(message)

    def wait(self) -> int:
        """Read what it says to the end; its exit code."""
        assert self.process.stdout is not None
        self.process.stdout.read()
        return self.process.wait()

    def wait_for_all(self, *, limit_s: float) -> None:
        """Wait until every process of it has ended, also those that mpirun does not wait for."""
        end = time.monotonic() + limit_s
        while left := self.members():
            assert time.monotonic() < end, f"still there: {sorted(left)}"
            # Nothing reports the end of a process that is not ours.
            select.select([], [], [], 0.1)

    def members(self) -> dict[int, dict[str, str]]:
        """Its living processes, each with its environment."""
        found = {}
        for folder in Path("/proc").iterdir():
            # A process may end while it is looked at.
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and f"{_MARKER}={self.marker}".encode() in (folder / "environ").read_bytes():
                    pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    found[int(folder.name)] = dict(each.split("=", 1) for each in pairs if "=" in each)
        return found

    def measuring(self, rank: int) -> int:
        """The process that measures for a rank."""
        return self._process_of(rank, b"ranks.measure")

    def ranked(self, rank: int) -> int:
        """The process that is a rank."""
        return self._process_of(rank, b"qualify\0")

    def _process_of(self, rank: int, part: bytes) -> int:
        for process, environment in self.members().items():
            # It may have ended since.
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                if environment.get("OMPI_COMM_WORLD_RANK") == str(rank) and part in command:
                    return process
        message = f"rank {rank} has no process with {part!r}"
        raise AssertionError(message)

    def kill(self) -> None:
        """Kill every process of it."""
        while members := self.members():
            for process in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            # What was ended by us is only gone when it was waited for.
            if members.keys() == {self.process.pid}:
                break
        self.process.wait()


@contextlib.contextmanager
def job(output: Path) -> Iterator[Job]:
    """Run ``gdrkit qualify --mpi`` in two namespaces, two ranks in each; nothing of it is left afterwards."""
    hosts = [f"gk{secrets.token_hex(4)}{number}" for number in (1, 2)]
    try:
        _cable(hosts)
        with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as folder:
            agent = Path(folder, "agent")
            agent.write_text(_AGENT)
            agent.chmod(0o700)
            options = ["--mca", "plm_rsh_agent", str(agent), "--mca", "plm_rsh_no_tree_spawn", "1"]
            ranks = ["--host", ",".join(f"{host}:2" for host in hosts), "-np", "4"]
            line = shlex.join(_mpirun(Path(folder), [*options, *ranks, *_qualify(GDRKIT, output)]))
            named = ["unshare", "--uts", "sh", "-c", f"hostname {hosts[0]}; exec {line}"]
            with _running(Path(folder), ["ip", "netns", "exec", hosts[0], *named]) as running:
                yield running
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@contextlib.contextmanager
def job_of_this_machine(output: Path, *, second: Sequence[str] = GDRKIT) -> Iterator[Job]:
    """Run ``gdrkit qualify --mpi`` as two ranks, and `second` in place of gdrkit as rank 1; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as folder:
        ranks = ["-np", "1", *_qualify(GDRKIT, output), ":", "-np", "1", *_qualify(second, output)]
        with _running(Path(folder), _mpirun(Path(folder), ranks)) as running:
            yield running


def _cable(hosts: list[str]) -> None:
    for host in hosts:
        _ip("netns", "add", host)
        _ip("-n", host, "link", "set", "lo", "up")
    one, other = hosts
    # The interfaces have the names of their machines.
    _ip("link", "add", one, "netns", one, "type", "veth", "peer", "name", other, "netns", other)
    for number, host in enumerate(hosts, start=1):
        _ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", host)
        _ip("-n", host, "link", "set", host, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _mpirun(folder: Path, options: Sequence[str]) -> list[str]:
    return ["mpirun", "--mca", "orte_tmpdir_base", str(folder), "--oversubscribe", *options]


def _qualify(gdrkit: Sequence[str], output: Path) -> list[str]:
    return [*gdrkit, "qualify", "--software", "--mpi", "--output", str(output)]


@contextlib.contextmanager
def _running(folder: Path, command: Sequence[str]) -> Iterator[Job]:
    marker = secrets.token_hex(4)
    (folder / "fabric").mkdir()
    # MPI itself must find the libraries of the system.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "GDRKIT_TWINS_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Nobody asks git for the commit, row by row: one that is killed leaves its lock in the repository.
    own = {_MARKER: marker, "GDRKIT_TWINS_FABRIC": str(folder / "fabric"), "GDRKIT_COMMIT": "0" * 40}
    with subprocess.Popen(
        command,
        env={**kept, **root, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        running = Job(process, marker)
        try:
            yield running
        finally:
            running.kill()
