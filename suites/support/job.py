"""A job of four ranks on two machines: network namespaces with names of their own, and a cable between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Job", "job"]

_MARKER = "GDRKIT_SUITES_JOB"
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
        for process, environment in self.members().items():
            # It may have ended since.
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                if environment.get("OMPI_COMM_WORLD_RANK") == str(rank) and b"ranks.measure" in command:
                    return process
        message = f"rank {rank} has no measuring process"
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
    token = secrets.token_hex(4)
    hosts = [f"gk{token}{number}" for number in (1, 2)]
    folder = tempfile.mkdtemp(prefix="gdrkit-")
    try:
        _cable(hosts)
        with _started(hosts, Path(folder), output, token) as process:
            running = Job(process, token)
            try:
                yield running
            finally:
                running.kill()
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


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


def _started(hosts: list[str], folder: Path, output: Path, token: str) -> subprocess.Popen[str]:
    agent = folder / "agent"
    agent.write_text(_AGENT)
    agent.chmod(0o700)
    (folder / "fabric").mkdir()
    options = ["--mca", "plm_rsh_agent", str(agent), "--mca", "plm_rsh_no_tree_spawn", "1"]
    options += ["--mca", "orte_tmpdir_base", str(folder), "--oversubscribe"]
    ranks = ["--host", ",".join(f"{host}:2" for host in hosts), "-np", "4"]
    command = [sys.executable, "-m", "gdrkit", "qualify", "--software", "--mpi", "--output", str(output)]
    line = shlex.join(["mpirun", *options, *ranks, *command])
    # MPI itself must find the libraries of the system.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "GDRKIT_TWINS_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Nobody asks git for the commit, row by row: one that is killed leaves its lock in the repository.
    own = {_MARKER: token, "GDRKIT_TWINS_FABRIC": str(folder / "fabric"), "GDRKIT_COMMIT": "0" * 40}
    first = ["ip", "netns", "exec", hosts[0], "unshare", "--uts", "sh", "-c", f"hostname {hosts[0]}; exec {line}"]
    return subprocess.Popen(
        first,
        env={**kept, **root, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
