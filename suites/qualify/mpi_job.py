"""MPI jobs of ``gdrkit qualify``: four ranks on two or four emulated machines, or two ranks on this machine.

An emulated machine is a network namespace with its own host name. Two veth pairs connect two namespaces. A bridge
in a fifth namespace connects four namespaces.
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

# All processes of a job have this variable, so that read_environments() finds them.
_MARKER_VARIABLE = "GDRKIT_SUITES_JOB"
GDRKIT_COMMAND = (sys.executable, "-m", "gdrkit")
# Open MPI runs this program to start its daemon on another machine. The first argument is the name of the machine,
# which is also the name of its network namespace and becomes its host name.
_REMOTE_SHELL_SCRIPT = """#!/bin/sh
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
        """Wait until every process of the job has ended. mpirun itself may end before its ranks."""
        deadline_s = time.monotonic() + limit_s
        while running_processes := self.read_environments():
            assert time.monotonic() < deadline_s, f"these processes still run: {sorted(running_processes)}"
            # Most of these processes are not children of this process, so it is not notified when they end.
            select.select([], [], [], 0.1)

    def read_environments(self) -> dict[int, dict[str, str]]:
        """Return the environment variables of each running process of the job, by process id."""
        environment_by_process_id = {}
        for process_folder in Path("/proc").iterdir():
            # The process may end while this loop reads its environment.
            with contextlib.suppress(OSError):
                if (
                    process_folder.name.isdecimal()
                    and f"{_MARKER_VARIABLE}={self.marker}".encode() in (process_folder / "environ").read_bytes()
                ):
                    name_value_pairs = (process_folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    environment_by_process_id[int(process_folder.name)] = dict(
                        pair.split("=", 1) for pair in name_value_pairs if "=" in pair
                    )
        return environment_by_process_id

    def find_measuring_process(self, rank: int) -> int:
        """Return the id of the child process that a rank started for its measurements."""
        return self._find_process(rank, b"ranks.measure")

    def find_rank_process(self, rank: int) -> int:
        """Return the id of the process that mpirun started for a rank."""
        # In /proc/PID/cmdline, a null byte ends each argument.
        return self._find_process(rank, b"qualify\0")

    def _find_process(self, rank: int, command_part: bytes) -> int:
        # The measuring process is a child of the process that mpirun started. The child has the higher id, so the loop
        # checks the child first.
        for process_id, environment in sorted(self.read_environments().items(), reverse=True):
            # A process may have ended since read_environments() returned.
            with contextlib.suppress(OSError):
                command_line = Path(f"/proc/{process_id}/cmdline").read_bytes()
                if environment.get("OMPI_COMM_WORLD_RANK") == str(rank) and command_part in command_line:
                    return process_id
        message = f"rank {rank} has no process with {command_part!r}"
        raise AssertionError(message)

    def kill(self) -> None:
        """Kill every process of the job."""
        while running_processes := self.read_environments():
            for process_id in running_processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            # If only mpirun is left, the loop ends: mpirun is a child of this process, so wait() waits for its end.
            if running_processes.keys() == {self.process.pid}:
                break
        self.process.wait()


@contextlib.contextmanager
def run_job_on_two_machines(output_folder: Path) -> Iterator[MpiJob]:
    """Run ``gdrkit qualify --mpi`` with two ranks in each of two namespaces. Remove the namespaces at the end."""
    hosts = [f"gk{secrets.token_hex(4)}{index}" for index in (1, 2)]
    try:
        _create_connected_hosts(hosts)
        # With GDRKIT_TWINS_LATE_SHARE=100 (percent), the twins delay all completions. The job is then so slow that a
        # case can kill a process while the process measures.
        twin_variables = {"GDRKIT_TWINS_FABRIC": "tcp://10.77.0.0/24,10.78.0.0/24", "GDRKIT_TWINS_LATE_SHARE": "100"}
        with _run_job_in_namespaces(
            hosts, GDRKIT_COMMAND, output_folder, ranks_per_host=2, variables=twin_variables
        ) as job:
            yield job
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@contextlib.contextmanager
def run_job_on_four_machines(
    output_folder: Path, *, command: Sequence[str] = GDRKIT_COMMAND, variables: Mapping[str, str] | None = None
) -> Iterator[MpiJob]:
    """Run ``command qualify --mpi`` with a rank in each of four namespaces. Remove the namespaces at the end."""
    namespace_prefix = f"gk{secrets.token_hex(4)}"
    hosts, switch_namespace = [f"{namespace_prefix}{index}" for index in range(1, 5)], f"{namespace_prefix}0"
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
        with _run_job_in_namespaces(hosts, command, output_folder, ranks_per_host=1, variables=twin_variables) as job:
            yield job
    finally:
        for host in (*hosts, switch_namespace):
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@contextlib.contextmanager
def _run_job_in_namespaces(
    hosts: Sequence[str],
    command: Sequence[str],
    output_folder: Path,
    *,
    ranks_per_host: int,
    variables: Mapping[str, str],
) -> Iterator[MpiJob]:
    with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as temporary_folder:
        remote_shell = Path(temporary_folder, "remote_shell")
        remote_shell.write_text(_REMOTE_SHELL_SCRIPT)
        remote_shell.chmod(0o700)
        # With plm_rsh_no_tree_spawn, mpirun starts all daemons itself.
        remote_shell_options = ["--mca", "plm_rsh_agent", str(remote_shell), "--mca", "plm_rsh_no_tree_spawn", "1"]
        host_slots = ",".join(f"{host}:{ranks_per_host}" for host in hosts)
        rank_options = ["--host", host_slots, "-np", str(len(hosts) * ranks_per_host)]
        mpirun_line = shlex.join(
            _make_mpirun_command(
                Path(temporary_folder),
                [*remote_shell_options, *rank_options, *_make_qualify_command(command, output_folder)],
            )
        )
        command_that_sets_host_name = ["unshare", "--uts", "sh", "-c", f"hostname {hosts[0]}; exec {mpirun_line}"]
        job_variables = {"GDRKIT_TWINS_FABRIC_SECRET": secrets.token_hex(16), **variables}
        with _run_mpirun(["ip", "netns", "exec", hosts[0], *command_that_sets_host_name], job_variables) as job:
            yield job


@contextlib.contextmanager
def run_job_on_this_machine(
    output_folder: Path, *, command_of_rank_1: Sequence[str] = GDRKIT_COMMAND
) -> Iterator[MpiJob]:
    """Run ``gdrkit qualify --mpi`` with two ranks. Rank 0 runs gdrkit, rank 1 runs `command_of_rank_1`."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-", ignore_cleanup_errors=True) as temporary_folder:
        # A colon separates the programs of different ranks.
        rank_programs = [
            "-np",
            "1",
            *_make_qualify_command(GDRKIT_COMMAND, output_folder),
            ":",
            "-np",
            "1",
            *_make_qualify_command(command_of_rank_1, output_folder),
        ]
        with _run_mpirun(_make_mpirun_command(Path(temporary_folder), rank_programs), {}) as job:
            yield job


def _create_connected_hosts(hosts: list[str]) -> None:
    """Create a network namespace for each of two hosts, and connect the hosts by two veth pairs."""
    for host in hosts:
        _run_ip("netns", "add", host)
        _run_ip("-n", host, "link", "set", "lo", "up")
    first_host, second_host = hosts
    # Each network interface is one NIC of the twins. The first interface of a machine has the name of the machine.
    for suffix, network_prefix in (("", "10.77.0"), ("b", "10.78.0")):
        peer_options = ["peer", "name", second_host + suffix, "netns", second_host]
        _run_ip("link", "add", first_host + suffix, "netns", first_host, "type", "veth", *peer_options)
        for index, host in enumerate(hosts, start=1):
            _run_ip("-n", host, "addr", "add", f"{network_prefix}.{index}/24", "dev", host + suffix)
            _run_ip("-n", host, "link", "set", host + suffix, "up")


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _make_mpirun_command(session_folder: Path, options: Sequence[str]) -> list[str]:
    return ["mpirun", "--mca", "orte_tmpdir_base", str(session_folder), "--oversubscribe", *options]


def _make_qualify_command(gdrkit_command: Sequence[str], output_folder: Path) -> list[str]:
    return [*gdrkit_command, "qualify", "--software", "--mpi", "--output", str(output_folder)]


@contextlib.contextmanager
def _run_mpirun(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[MpiJob]:
    marker = secrets.token_hex(4)
    # mpirun needs the libraries of the system, not the twins.
    inherited_variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("LD_", "GDRKIT_TWINS_"))
    }
    root_variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # With GDRKIT_COMMIT, gdrkit does not call git. A killed git process would leave its lock file in the repository.
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
