"""Run perftest (``ib_write_bw``, ``ib_read_bw``) between two processes of this machine, and parse its output."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes import wait_until

from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gdrkit.verbs import Nic

__all__ = [
    "PROGRAMS",
    "PerftestResult",
    "find_free_port",
    "is_listening",
    "parse_output",
    "run_perftest",
    "start_program",
]

PROGRAMS = {Direction.WRITE: "ib_write_bw", Direction.READ: "ib_read_bw"}
_TIMEOUT_S = 60
# Number of bytes of each unit in the output. Older versions of perftest write MB, but mean MiB.
_UNIT_BYTES = {"MB/sec": 2**20, "MiB/sec": 2**20}
# The header line of the table of results, and a row of the table.
_HEADER_REGEX = re.compile(r"^\s*#bytes\s+#iterations\s+BW peak\[(\S+)\]\s+BW average\[(\S+)\]", re.MULTILINE)
_ROW_REGEX = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)(?:\s+[\d.]+)*\s*$", re.MULTILINE)
# State of a listener (TCP_LISTEN) in /proc/net/tcp.
_LISTEN_STATE = "0A"


@dataclass(frozen=True)
class PerftestResult:
    """The result of one run of perftest.

    Attributes
    ----------
    length_bytes : int
        Length of each operation.
    operations : int
        Number of operations.
    bytes_per_s : float
        Average throughput.
    process_lifetime_s : float
        Lifetime of the active process in seconds, or 0 in a result of :func:`parse_output`.
    """

    length_bytes: int
    operations: int
    bytes_per_s: float
    process_lifetime_s: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Number of bytes of all operations."""
        return self.length_bytes * self.operations


def parse_output(output: str) -> PerftestResult:
    """Parse the output of perftest.

    Raises
    ------
    ValueError
        The output has no result. The message has the last line of the output.
    """
    header = _HEADER_REGEX.search(output)
    rows = list(_ROW_REGEX.finditer(output, header.end())) if header else []
    if header is None or len(rows) != 1 or header[2] not in _UNIT_BYTES:
        lines = [line for line in output.splitlines() if line.strip("-* ")]
        message = f"perftest printed no result; its last line is {lines[-1] if lines else ''!r}"
        raise ValueError(message)
    length_bytes, operations, _peak, average = rows[0].groups()
    return PerftestResult(int(length_bytes), int(operations), float(average) * _UNIT_BYTES[header[2]])


def run_perftest(
    nic: Nic,
    direction: Direction,
    *,
    length_bytes: int,
    operations: int,
    depth: int,
    list_length: int,
    reads_max: int,
    peer: Nic | None = None,
    observer_command: Sequence[str] = (),
) -> PerftestResult:
    """Run perftest from `nic` to `peer`, by default to `nic` itself, and return the result of the active process.

    `observer_command` is the beginning of the command of the active process, such as ``gdrkit observe --``. `depth` is
    the number of outstanding operations, `list_length` the number of operations in one call of ibv_post_send, and
    `reads_max` the number of outstanding RDMA READs of a queue pair.
    """
    port = find_free_port()
    # -F: do not fail if the frequency of the processor varies.
    options = ["-F", "-s", str(length_bytes), "-n", str(operations), "-t", str(depth), "-l", str(list_length)]
    # -u 18 sets the timeout for an acknowledgement to one second, because software RDMA on a busy processor is slow.
    options += ["-u", "18"]
    options += ["-p", str(port), *(["-o", str(reads_max)] if direction is Direction.READ else [])]

    def make_command(device_nic: Nic) -> list[str]:
        # -d, -i and -x select the device, the port and the index of the GID.
        device_options = ["-d", device_nic.name, "-i", str(device_nic.port.number), "-x", str(device_nic.gid_index)]
        return [PROGRAMS[direction], *device_options, *options]

    with start_program(make_command(peer or nic)) as passive_process:
        wait_until(
            lambda: passive_process.poll() is not None or is_listening(passive_process.pid, port),
            "a listener of perftest",
        )
        start_s = time.monotonic()
        with start_program([*observer_command, *make_command(nic), "127.0.0.1"]) as active_process:
            output, _ = active_process.communicate(timeout=_TIMEOUT_S)
        process_lifetime_s = time.monotonic() - start_s
        # If the passive process did not start, its output has the reason.
        passive_output, _ = passive_process.communicate(timeout=_TIMEOUT_S)
    assert (active_process.returncode, passive_process.returncode) == (0, 0), f"{output}\n{passive_output}"
    return replace(parse_output(output), process_lifetime_s=process_lifetime_s)


@contextlib.contextmanager
def start_program(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a program with piped output, and kill it at the end of the block. `environ` replaces the environment."""
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def find_free_port() -> int:
    """Return a TCP port on which no program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def is_listening(process_id: int, port: int) -> bool:
    """Return whether the kernel lists a listener on the port, in the network namespace of the process.

    A test connection is not possible, because perftest would treat it as its peer.
    """
    # The first columns are: row number, local address and port, remote address and port, state.
    table_paths = [Path("/proc", str(process_id), "net", name) for name in ("tcp", "tcp6")]
    rows = [
        line.split()
        for table_path in table_paths
        if table_path.exists()
        for line in table_path.read_text().splitlines()[1:]
    ]
    return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTEN_STATE for row in rows)
