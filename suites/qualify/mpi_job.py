"""MPI jobs of ``gdrkit qualify``: four ranks on two emulated machines, or two ranks on this machine.

An emulated machine is a network namespace with its own host name. A veth pair connects the two.
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

__all__ = ["GDRKIT", "MpiJob", "job_on_this_machine", "job_on_two_machines"]

_MARKER = "GDRKIT_SUITES_JOB"
GDRKIT = (sys.executable, "-m", "gdrkit")
# Open MPI starts its daemon on another machine by this program. The first argument is the name of the machine.
_REMOTE_SHELL = """#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@"
"""


@dataclass
class MpiJob:
    """A running job: the process of mpirun, and the marker in the environment of all processes of the job."""

    process: subprocess.Popen[str]
    marker: str

    def wait_for_line(self, text: str) -> str:
        """Read the output up to the next line that contains the text, and return that line."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return line
        message = f"the output has no {text!r}:\n{''.join(lines)}"
        raise AssertionError(message)

    def wait(self) -> int:
        """Read the rest of the output, and return the exit code of mpirun."""
        assert self.process.stdout is not None
        self.process.stdout.read()
        return self.process.wait()

    def wait_for_all(self, *, limit_s: float) -> None:
        """Wait until every process of the job has ended, also those that mpirun does not wait for."""
        end_s = time.monotonic() + limit_s
        while left := self.processes():
            assert time.monotonic() < end_s, f"these processes still run: {sorted(left)}"
            # This process is not the parent of the others, and gets no notification of their ends.
            select.select([], [], [], 0.1)

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the environment of each running process of the job by its process id."""
        processes = {}
        for folder in Path("/proc").iterdir():
            # A process may end between two accesses.
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and f"{_MARKER}={self.marker}".encode() in (folder / "environ").read_bytes():
                    pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    processes[int(folder.name)] = dict(each.split("=", 1) for each in pairs if "=" in each)
        return processes

    def measuring_process(self, rank: int) -> int:
        """Return the id of the process that measures for a rank."""
        return self._process_of(rank, b"ranks.measure")

    def rank_process(self, rank: int) -> int:
        """Return the id of the process of a rank."""
        return self._process_of(rank, b"qualify\0")

    def _process_of(self, rank: int, word: bytes) -> int:
        for process, environment in self.processes().items():
            # A process may have ended since the call.
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                if environment.get("OMPI_COMM_WORLD_RANK") == str(rank) and word in command:
                    return process
        message = f"rank {rank} has no process with {word!r}"
        raise AssertionError(message)

    def kill(self) -> None:
        """Kill every process of the job."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            # mpirun is a child of this process and is listed until this process waits for it.
            if processes.keys() == {self.process.pid}:
                break
        self.process.wait()


@contextlib.contextmanager
def job_on_two_machines(output: Path) -> Iterator[MpiJob]:
    """Run ``gdrkit qualify --mpi`` with two ranks in each of two namespaces, and remove everything at the end."""
    hosts = [f"gk{secrets.token_hex(4)}{number}" for number in (1, 2)]
    try:
        _connect(hosts)
        with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as folder:
            remote_shell = Path(folder, "remote_shell")
            remote_shell.write_text(_REMOTE_SHELL)
            remote_shell.chmod(0o700)
            options = ["--mca", "plm_rsh_agent", str(remote_shell), "--mca", "plm_rsh_no_tree_spawn", "1"]
            ranks = ["--host", ",".join(f"{host}:2" for host in hosts), "-np", "4"]
            line = shlex.join(_mpirun(Path(folder), [*options, *ranks, *_qualify(GDRKIT, output)]))
            with_host_name = ["unshare", "--uts", "sh", "-c", f"hostname {hosts[0]}; exec {line}"]
            with _running(Path(folder), ["ip", "netns", "exec", hosts[0], *with_host_name]) as running:
                yield running
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@contextlib.contextmanager
def job_on_this_machine(output: Path, *, second: Sequence[str] = GDRKIT) -> Iterator[MpiJob]:
    """Run ``gdrkit qualify --mpi`` with two ranks, of which rank 1 runs `second` instead of gdrkit."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as folder:
        ranks = ["-np", "1", *_qualify(GDRKIT, output), ":", "-np", "1", *_qualify(second, output)]
        with _running(Path(folder), _mpirun(Path(folder), ranks)) as running:
            yield running


def _connect(hosts: list[str]) -> None:
    """Create a network namespace for each host, and a veth pair between the two."""
    for host in hosts:
        _ip("netns", "add", host)
        _ip("-n", host, "link", "set", "lo", "up")
    one, other = hosts
    # Each interface has the name of its machine.
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
def _running(folder: Path, command: Sequence[str]) -> Iterator[MpiJob]:
    marker = secrets.token_hex(4)
    (folder / "fabric").mkdir()
    # mpirun needs the libraries of the system, not the twins.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "GDRKIT_TWINS_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # With this commit, gdrkit does not call git. A git process that is killed would leave its lock in the repository.
    added = {_MARKER: marker, "GDRKIT_TWINS_FABRIC": str(folder / "fabric"), "GDRKIT_COMMIT": "0" * 40}
    with subprocess.Popen(
        command,
        env={**inherited, **root, **added},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        running = MpiJob(process, marker)
        try:
            yield running
        finally:
            running.kill()
