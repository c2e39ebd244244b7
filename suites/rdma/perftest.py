"""perftest (``ib_write_bw``, ``ib_read_bw``): two of its processes on one NIC of this machine, and what they print."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes import wait_until

from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import Nic

__all__ = ["PROGRAMS", "Measured", "measure", "parse"]

PROGRAMS = {Direction.WRITE: "ib_write_bw", Direction.READ: "ib_read_bw"}
_LIMIT_S = 60
# How it names its units, by its versions; its MB were MiB before it called them so.
_UNITS = {"MB/sec": 2**20, "MiB/sec": 2**20}
_HEAD = re.compile(r"^\s*#bytes\s+#iterations\s+BW peak\[(\S+)\]\s+BW average\[(\S+)\]", re.MULTILINE)
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)(?:\s+[\d.]+)*\s*$", re.MULTILINE)
_LISTENING = "0A"


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes
    ----------
    length_bytes, operations : int
        Of each operation, and how many it says that it did.
    bytes_per_s : float
        Its average.
    process_s : float
        How long the process lived that did it; 0 where only its words are known.
    """

    length_bytes: int
    operations: int
    bytes_per_s: float
    process_s: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """All of them."""
        return self.length_bytes * self.operations


def parse(text: str) -> Measured:
    """What it printed, as numbers; ValueError where there is no result, with the last thing that it said."""
    head = _HEAD.search(text)
    rows = list(_ROW.finditer(text, head.end())) if head else []
    if head is None or len(rows) != 1 or head[2] not in _UNITS:
        said = [line for line in text.splitlines() if line.strip("-* ")]
        message = f"no result of perftest; it said {said[-1] if said else 'nothing'!r}"
        raise ValueError(message)
    length_bytes, operations, _peak, average = rows[0].groups()
    return Measured(int(length_bytes), int(operations), float(average) * _UNITS[head[2]])


def measure(
    nic: Nic,
    direction: Direction,
    *,
    length_bytes: int,
    operations: int,
    depth: int,
    list_length: int,
    reads_max: int,
) -> Measured:
    """Let one process of perftest reach the memory of another, both on `nic`."""
    port = _free_port()
    command = [PROGRAMS[direction], "-F", "-d", nic.name, "-i", str(nic.port.number), "-x", str(nic.gid_index)]
    command += ["-s", str(length_bytes), "-n", str(operations), "-t", str(depth), "-l", str(list_length)]
    # Acknowledgements within a second: where software sends them, a busy processor lets them wait.
    command += ["-u", "18"]
    command += ["-p", str(port), *(["-o", str(reads_max)] if direction is Direction.READ else [])]
    with _running(command) as passive:
        wait_until(lambda: passive.poll() is not None or _listens(port), "perftest to wait for its peer")
        begin = time.monotonic()
        with _running([*command, "127.0.0.1"]) as active:
            said, _ = active.communicate(timeout=_LIMIT_S)
        process_s = time.monotonic() - begin
        # Where it never came up, what it said is all that there is to learn.
        heard, _ = passive.communicate(timeout=_LIMIT_S)
    assert (active.returncode, passive.returncode) == (0, 0), f"{said}\n{heard}"
    found = parse(said)
    return Measured(found.length_bytes, found.operations, found.bytes_per_s, process_s)


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _listens(port: int) -> bool:
    """As the kernel has it: a connection to see it would be taken for the peer."""
    tables = [Path("/proc/net", name) for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTENING for row in rows)
