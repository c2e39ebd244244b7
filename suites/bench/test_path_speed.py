"""How fast reads go through ring, agent, server and NIC, beside what the kernel does with the same cached file.

On two idle cores 4 KiB reads at depth 64 should reach a quarter of io_uring's, and 1 MiB reads half of one thread's
`pread`. That is no assertion: the machine may be busy. Beside it stand what an operation costs in processor time, which
others disturb less, and a second peer: the copies of this path without the rest, by two threads. It is no bound, and
was slower than the path itself in some runs.
`nox -s bench` builds the program that measures.

All of it has two cores, also where there are more. Where its threads run is first left to the system; then the thread
that reads and sums for the server, which has as much to do as all others together, gets a core of its own.
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
ROUNDS, TURN_MS = 9, 300
# A twin is late by seed, which limits what a depth can move, and each NIC has threads: two would have more of them than
# two cores can run. Hardware knows nothing of either.
ENVIRONMENT = {"GDRKIT_TWINS_LATE_US": "0", "GDRKIT_TWINS_NICS": "1"}
# What is measured, its peer, a second peer that has only the copies of the path, and the share of the first peer's
# speed that is wanted on idle cores.
PAIRS = {
    "4 KiB": ("path_small", "io_uring", "bare_small", 0.25),
    "1 MiB": ("path_large", "pread", "bare_large", 0.5),
}
KINDS = [
    pytest.param("host", marks=needs(verbs.nic())),
    pytest.param("device", marks=needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)),
]
pytestmark = pytest.mark.timeout(180)


def make_file(mount: Path, seed: int) -> Path:
    """A file that was written through the path, so that every read is verified by the sums of its chunks."""
    path = mount / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        usrbio.register_fd(fd)
        with Application(mount, kind="host", length_bytes=MIB) as application:
            for at in range(0, FILE_BYTES, MIB):
                application.poke(0, pattern.payload(MIB, seed=seed, offset_bytes=at))
                assert application.write((fd, 0, at, MIB)) == [MIB]
        usrbio.deregister_fd(fd)
    finally:
        os.close(fd)
    return path


@contextlib.contextmanager
def two_cores() -> Iterator[list[int]]:
    """The processors that this process, and what it starts, may use meanwhile."""
    before = os.sched_getaffinity(0)
    chosen = sorted(before)[:2]
    os.sched_setaffinity(0, chosen)
    try:
        yield chosen
    finally:
        os.sched_setaffinity(0, before)


def set_apart(agent: AgentProcess, cores: list[int]) -> None:
    """The server's session gets the last core, everything else the first."""
    # Of this process the thread that starts the client, which is what two_cores() puts back.
    os.sched_setaffinity(0, {cores[0]})
    for process in (agent.process.pid, agent.server_process_id()):
        for task in Path(f"/proc/{process}/task").iterdir():
            # One that ends meanwhile needs no core.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (task / "comm").read_text().strip()
                os.sched_setaffinity(int(task.name), {cores[-1] if name == "gdrkit-session" else cores[0]})


def measure(agent: AgentProcess, path: Path, kind: str, cores: list[int]) -> dict[str, list[dict[str, Any]]]:
    """The turns of each name."""
    program = Path(os.environ["GDRKIT_BENCH_PROGRAMS"]) / "usrbio_path_bench"
    command = [str(program), str(agent.mount), str(path), "--kind", kind]
    command += ["--rounds", str(ROUNDS), "--ms", str(TURN_MS)]
    if len(cores) > 1:
        command += ["--cores", f"{cores[0]},{cores[-1]}"]
    command += ["--pid", f"agent={agent.process.pid}", "--pid", f"server={agent.server_process_id()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    turns: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        turn = json.loads(line)
        turns.setdefault(turn["turn"], []).append(turn)
    return turns


def rate(turn: dict[str, Any]) -> float:
    """Operations per second."""
    return float(turn["operations"] / turn["passed_s"])


def median_share(turns: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Of rates. Turns of one round follow each other: what else the machine did met both."""
    return statistics.median(rate(one) / rate(other) for one, other in zip(turns, others, strict=True))


@pytest.mark.parametrize("placement", ["by the system", "session apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_beside_the_kernel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    placement: str,
    seed: int,
    evidence: Evidence,
    said: list[str],
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    evidence["environment"] = ENVIRONMENT
    load = os.getloadavg()[0]
    with two_cores() as cores, AgentProcess(tmp_path) as agent:
        evidence["cores"] = len(cores)
        path = make_file(tmp_path, seed)
        if placement == "session apart":
            set_apart(agent, cores)
        turns = measure(agent, path, kind, cores)
    assert agent.statistics["failed"] == 0
    evidence["load_1min"] = [load, os.getloadavg()[0]]
    for name, (ours, peer, bare, wanted) in PAIRS.items():
        if peer not in turns:
            said.append(f"{kind:6} {name}, {placement}: this system lets nobody have an {peer}")
            continue
        share = median_share(turns[ours], turns[peer])
        evidence.number(f"{ours}_share_of_{peer}_ratio_median", share)
        for each in (ours, peer):
            evidence.number(f"{each}_per_s_median", statistics.median(map(rate, turns[each])))
            costs = {
                who: statistics.median(turn["cpu_s"][who] / turn["operations"] * 1e6 for turn in turns[each])
                for who in turns[each][0]["cpu_s"]
            }
            for who, cost in costs.items():
                evidence.number(f"{each}_{who}_cpu_us_median", cost)
        alone = ""
        if bare in turns:
            bare_share = median_share(turns[bare], turns[peer])
            evidence.number(f"{bare}_share_of_{peer}_ratio_median", bare_share)
            evidence.number(f"{ours}_share_of_{bare}_ratio_median", median_share(turns[ours], turns[bare]))
            alone = f"; its copies by two threads, another peer: {bare_share:.2f}"
        whole = sum(evidence.numbers[f"{ours}_{who}_cpu_us_median"] for who in ("client", "agent", "server"))
        said.append(
            f"{kind:6} {name} reads, {placement}: {share:.2f} x {peer} (wanted on idle cores: {wanted}{alone}); "
            f"processor time {whole / evidence.numbers[f'{peer}_client_cpu_us_median']:.1f} x {peer}; load {load:.1f}"
        )
