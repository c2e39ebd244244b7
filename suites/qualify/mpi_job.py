"""MPI jobs of ``gdrkit qualify``: four ranks on two or four emulated machines, or two ranks on this machine.

An emulated machine is a network namespace with its own host name. A veth pair connects two namespaces. Four namespaces
are connected by a bridge in a fifth namespace.
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
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["GDRKIT_COMMAND", "MpiJob", "run_job_on_four_machines", "run_job_on_this_machine", "run_job_on_two_machines"]

# All processes of a job have this variable, so that list_processes() finds them.
_MARKER_VARIABLE = "GDRKIT_SUITES_JOB"
GDRKIT_COMMAND = (sys.executable, "-m", "gdrkit")
# Open MPI runs this program to start its daemon on another machine. The first argument is the name of the machine.
_REMOTE_SHELL = """#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@"
"""


@dataclass
class MpiJob:
    """A running job: the process of mpirun, and a random marker in the environment of all processes of the job."""

    process: subprocess.Popen[str]
    marker: str

    def wait_for_line(self, text: str) -> str:
        """Read the output until a line contains `text`, and return the line."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return line
        message = f"the output has no {text!r}:\n{''.join(lines)}"
        raise AssertionError(message)

    def wait(self) -> int:
        """Read the output until its end, and return the exit code of mpirun."""
        assert self.process.stdout is not None
        self.process.stdout.read()
        return self.process.wait()

    def wait_for_all_processes(self, *, limit_s: float) -> None:
        """Wait until every process of the job has ended. mpirun does not wait for all of them."""
        deadline_s = time.monotonic() + limit_s
        while running_processes := self.list_processes():
            assert time.monotonic() < deadline_s, f"these processes still run: {sorted(running_processes)}"
            # Most of these processes are not children of this process, so it is not notified when they end.
            select.select([], [], [], 0.1)

    def list_processes(self) -> dict[int, dict[str, str]]:
        """Return the environments of the running processes of the job, by process id."""
        processes = {}
        for folder in Path("/proc").iterdir():
            # A process may end between two accesses.
            with contextlib.suppress(OSError):
                if (
                    folder.name.isdecimal()
                    and f"{_MARKER_VARIABLE}={self.marker}".encode() in (folder / "environ").read_bytes()
                ):
                    pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    processes[int(folder.name)] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        return processes

    def find_measuring_process(self, rank: int) -> int:
        """Return the id of the child process that a rank started for its measurements."""
        return self._find_process(rank, b"ranks.measure")

    def find_rank_process(self, rank: int) -> int:
        """Return the id of the process that mpirun started for a rank."""
        return self._find_process(rank, b"qualify\0")

    def _find_process(self, rank: int, command_part: bytes) -> int:
        # The measuring process is a child of the process that mpirun started. It has the higher id, so the loop checks
        # it first.
        for process_id, environment in sorted(self.list_processes().items(), reverse=True):
            # A process may have ended since list_processes() returned.
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process_id}/cmdline").read_bytes()
                if environment.get("OMPI_COMM_WORLD_RANK") == str(rank) and command_part in command:
                    return process_id
        message = f"rank {rank} has no process with {command_part!r}"
        raise AssertionError(message)

    def kill(self) -> None:
        """Kill every process of the job."""
        while processes := self.list_processes():
            for process_id in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            # mpirun is a child of this process and is listed until this process waits for it.
            if processes.keys() == {self.process.pid}:
                break
        self.process.wait()


@contextlib.contextmanager
def run_job_on_two_machines(output_folder: Path) -> Iterator[MpiJob]:
    """Run ``gdrkit qualify --mpi`` with two ranks in each of two namespaces, and remove the namespaces at the end."""
    hosts = [f"gk{secrets.token_hex(4)}{index}" for index in (1, 2)]
    try:
        _create_connected_hosts(hosts)
        # All completions are delayed. The job is then so slow that a case can kill a process while it measures.
        twin_variables = {"GDRKIT_TWINS_FABRIC": "tcp://10.77.0.0/24,10.78.0.0/24", "GDRKIT_TWINS_LATE_SHARE": "100"}
        with _run_job(hosts, GDRKIT_COMMAND, output_folder, ranks_per_host=2, variables=twin_variables) as job:
            yield job
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@contextlib.contextmanager
def run_job_on_four_machines(
    output_folder: Path, *, command: Sequence[str] = GDRKIT_COMMAND, variables: Mapping[str, str] | None = None
) -> Iterator[MpiJob]:
    """Run ``command qualify --mpi`` with a rank in each of four namespaces, and remove the namespaces at the end."""
    prefix = f"gk{secrets.token_hex(4)}"
    hosts, switch_namespace = [f"{prefix}{index}" for index in range(1, 5)], f"{prefix}0"
    try:
        _run_ip("netns", "add", switch_namespace)
        _run_ip("-n", switch_namespace, "link", "add", "bridge", "type", "bridge")
        _run_ip("-n", switch_namespace, "link", "set", "bridge", "up")
        for index, host in enumerate(hosts, start=1):
            _run_ip("netns", "add", host)
            _run_ip("-n", host, "link", "set", "lo", "up")
            _run_ip("link", "add", host, "netns", host, "type", "veth", "peer", "name", host, "netns", switch_namespace)
            _run_ip("-n", switch_namespace, "link", "set", host, "master", "bridge", "up")
            _run_ip("-n", host, "addr", "add", f"10.77.0.{index}/24", "dev", host)
            _run_ip("-n", host, "link", "set", host, "up")
        twin_variables = {"GDRKIT_TWINS_FABRIC": "tcp://10.77.0.0/24", "GDRKIT_TWINS_GPUS": "1", **(variables or {})}
        with _run_job(hosts, command, output_folder, ranks_per_host=1, variables=twin_variables) as job:
            yield job
    finally:
        for host in (*hosts, switch_namespace):
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@contextlib.contextmanager
def _run_job(
    hosts: Sequence[str],
    command: Sequence[str],
    output_folder: Path,
    *,
    ranks_per_host: int,
    variables: Mapping[str, str],
) -> Iterator[MpiJob]:
    with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as folder:
        remote_shell = Path(folder, "remote_shell")
        remote_shell.write_text(_REMOTE_SHELL)
        remote_shell.chmod(0o700)
        options = ["--mca", "plm_rsh_agent", str(remote_shell), "--mca", "plm_rsh_no_tree_spawn", "1"]
        slots = ",".join(f"{host}:{ranks_per_host}" for host in hosts)
        rank_options = ["--host", slots, "-np", str(len(hosts) * ranks_per_host)]
        mpirun_line = shlex.join(
            _make_mpirun_command(
                Path(folder), [*options, *rank_options, *_make_qualify_command(command, output_folder)]
            )
        )
        command_with_host_name = ["unshare", "--uts", "sh", "-c", f"hostname {hosts[0]}; exec {mpirun_line}"]
        job_variables = {"GDRKIT_TWINS_FABRIC_SECRET": secrets.token_hex(16), **variables}
        with _start_job(["ip", "netns", "exec", hosts[0], *command_with_host_name], job_variables) as job:
            yield job


@contextlib.contextmanager
def run_job_on_this_machine(
    output_folder: Path, *, command_of_rank_1: Sequence[str] = GDRKIT_COMMAND
) -> Iterator[MpiJob]:
    """Run ``gdrkit qualify --mpi`` with two ranks. Rank 1 runs the command `command_of_rank_1` instead of gdrkit."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as folder:
        rank_options = [
            "-np",
            "1",
            *_make_qualify_command(GDRKIT_COMMAND, output_folder),
            ":",
            "-np",
            "1",
            *_make_qualify_command(command_of_rank_1, output_folder),
        ]
        with _start_job(_make_mpirun_command(Path(folder), rank_options), {}) as job:
            yield job


def _create_connected_hosts(hosts: list[str]) -> None:
    """Create a network namespace for each host, and a veth pair between the two."""
    for host in hosts:
        _run_ip("netns", "add", host)
        _run_ip("-n", host, "link", "set", "lo", "up")
    first_host, second_host = hosts
    # The first network interface of each machine has the name of the machine. Each interface is one NIC of the twins.
    for suffix, network in (("", "10.77.0"), ("b", "10.78.0")):
        peer_options = ["peer", "name", second_host + suffix, "netns", second_host]
        _run_ip("link", "add", first_host + suffix, "netns", first_host, "type", "veth", *peer_options)
        for index, host in enumerate(hosts, start=1):
            _run_ip("-n", host, "addr", "add", f"{network}.{index}/24", "dev", host + suffix)
            _run_ip("-n", host, "link", "set", host + suffix, "up")


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _make_mpirun_command(folder: Path, options: Sequence[str]) -> list[str]:
    return ["mpirun", "--mca", "orte_tmpdir_base", str(folder), "--oversubscribe", *options]


def _make_qualify_command(gdrkit_command: Sequence[str], output_folder: Path) -> list[str]:
    return [*gdrkit_command, "qualify", "--software", "--mpi", "--output", str(output_folder)]


@contextlib.contextmanager
def _start_job(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[MpiJob]:
    marker = secrets.token_hex(4)
    # mpirun needs the libraries of the system, not the twins.
    inherited_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("LD_", "GDRKIT_TWINS_"))
    }
    root_variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # With GDRKIT_COMMIT, gdrkit does not call git. A git process that is killed would leave its lock in the repository.
    job_variables = {_MARKER_VARIABLE: marker, "GDRKIT_COMMIT": "0" * 40, **variables}
    with subprocess.Popen(
        command,
        env={**inherited_variables, **root_variables, **job_variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        job = MpiJob(process, marker)
        try:
            yield job
        finally:
            job.kill()
