"""Rate of reads through ring, agent, server and NIC, compared with reads of the same cached file by the kernel.

On two idle cores, 4 KiB reads at depth 64 should reach a quarter of the rate of io_uring, and 1 MiB reads half of the
rate of `pread` in one thread. This is not asserted, because the machine may be busy. The record also has the processor
time of an operation, on which other load has less effect, and the rate of a second peer: only the copies of this path,
by two threads. The second peer is not an upper bound; in some runs it was slower than the path.
`nox -s bench` builds the measuring program.

All processes share two cores, also on a machine with more. In a first run, the scheduler places the threads. In a
second one, the session thread of the server, which has as much work as all others together, has its own core.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.application import Application
from support.raw_usrbio import AgentProcess

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.evidence import Evidence

FILE_BYTES = 64 * MIB
ROUNDS, DURATION_MS = 9, 300
# By default, the twin delays completions at random, which limits the rate at a depth, and has two NICs, whose threads
# do not fit on two cores. Hardware does not have these variables.
ENVIRONMENT = {"GDRKIT_TWINS_LATE_US": "0", "GDRKIT_TWINS_NICS": "1"}
# For each size: the measurement, its peer, the peer that makes only the copies of the path, and the desired share of
# the first peer's rate on idle cores.
PEERS = {
    "4 KiB": ("path_small", "io_uring", "bare_small", 0.25),
    "1 MiB": ("path_large", "pread", "bare_large", 0.5),
}
KINDS = [
    pytest.param("host", marks=needs(verbs.nic())),
    pytest.param("device", marks=needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)),
]
pytestmark = pytest.mark.timeout(180)


def create_file(mount: Path, seed: int) -> Path:
    """Create a file through the agent, so that its chunks have checksums and every read verifies them."""
    path = mount / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        usrbio.register_fd(fd)
        with Application(mount, kind="host", length_bytes=MIB) as application:
            for offset in range(0, FILE_BYTES, MIB):
                application.poke(0, pattern.payload(MIB, seed=seed, offset_bytes=offset))
                assert application.write((fd, 0, offset, MIB)) == [MIB]
        usrbio.deregister_fd(fd)
    finally:
        os.close(fd)
    return path


@contextlib.contextmanager
def two_cores() -> Iterator[list[int]]:
    """Restrict this process and its children to two cores, and yield their numbers."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    os.sched_setaffinity(0, cores)
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, before)


def isolate_session(agent: AgentProcess, cores: list[int]) -> None:
    """Restrict the session thread of the server to the last core, and all other threads to the first."""
    # This thread starts the client, which inherits its core. two_cores() restores the affinity.
    os.sched_setaffinity(0, {cores[0]})
    for process in (agent.process.pid, agent.server_process_id()):
        for task in Path(f"/proc/{process}/task").iterdir():
            # A thread may end between the two calls.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (task / "comm").read_text().strip()
                os.sched_setaffinity(int(task.name), {cores[-1] if name == "gdrkit-session" else cores[0]})


def measure(agent: AgentProcess, path: Path, kind: str, cores: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Run the measuring program, and return its measurements by name."""
    program = Path(os.environ["GDRKIT_BENCH_PROGRAMS"]) / "usrbio_path_bench"
    command = [str(program), str(agent.mount), str(path), "--kind", kind]
    command += ["--rounds", str(ROUNDS), "--ms", str(DURATION_MS)]
    if len(cores) > 1:
        command += ["--cores", f"{cores[0]},{cores[-1]}"]
    command += ["--pid", f"agent={agent.process.pid}", "--pid", f"server={agent.server_process_id()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measurements: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        measurement = json.loads(line)
        measurements.setdefault(measurement["turn"], []).append(measurement)
    return measurements


def rate(measurement: dict[str, Any]) -> float:
    """Return the operations per second."""
    return float(measurement["operations"] / measurement["passed_s"])


def median_share(measurements: list[dict[str, Any]], peers: list[dict[str, Any]]) -> float:
    """Return the median of the ratios of rates in the same round, in which the load of the machine affects both."""
    return statistics.median(rate(one) / rate(peer) for one, peer in zip(measurements, peers, strict=True))


@pytest.mark.parametrize("placement", ["by the system", "session apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_beside_the_kernel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    placement: str,
    seed: int,
    evidence: Evidence,
    summary: list[str],
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    evidence["environment"] = ENVIRONMENT
    load = os.getloadavg()[0]
    with two_cores() as cores, AgentProcess(tmp_path) as agent:
        evidence["cores"] = len(cores)
        path = create_file(tmp_path, seed)
        if placement == "session apart":
            isolate_session(agent, cores)
        measured = measure(agent, path, kind, cores)
    assert agent.statistics["failed"] == 0
    evidence["load_1min"] = [load, os.getloadavg()[0]]
    for name, (ours, peer, bare, desired) in PEERS.items():
        if peer not in measured:
            summary.append(f"{kind:6} {name}, {placement}: {peer} is not allowed on this system")
            continue
        share = median_share(measured[ours], measured[peer])
        evidence.number(f"{ours}_share_of_{peer}_ratio_median", share)
        for each in (ours, peer):
            evidence.number(f"{each}_per_s_median", statistics.median(map(rate, measured[each])))
            for process in measured[each][0]["cpu_s"]:
                cpu_us = statistics.median(one["cpu_s"][process] / one["operations"] * 1e6 for one in measured[each])
                evidence.number(f"{each}_{process}_cpu_us_median", cpu_us)
        copies = ""
        if bare in measured:
            bare_share = median_share(measured[bare], measured[peer])
            evidence.number(f"{bare}_share_of_{peer}_ratio_median", bare_share)
            evidence.number(f"{ours}_share_of_{bare}_ratio_median", median_share(measured[ours], measured[bare]))
            copies = f"; only the copies, by two threads: {bare_share:.2f}"
        cpu_us = sum(evidence.numbers[f"{ours}_{process}_cpu_us_median"] for process in ("client", "agent", "server"))
        summary.append(
            f"{kind:6} {name} reads, {placement}: {share:.2f} x {peer} (goal on idle cores: {desired}{copies}); "
            f"processor time {cpu_us / evidence.numbers[f'{peer}_client_cpu_us_median']:.1f} x {peer}; load {load:.1f}"
        )
