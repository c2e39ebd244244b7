"""How fast reads go through ring, agent, server and NIC, beside what the kernel does with the same cached file.

On two idle cores 4 KiB reads at depth 64 should reach a quarter of io_uring's, and 1 MiB reads half of one thread's
`pread`. That is no assertion: the machine may be busy. What an operation costs in processor time, which others disturb
less, is kept beside it. `nox -s bench` builds the program that measures.
"""

from __future__ import annotations

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
    from gdrkit.harness.evidence import Evidence

FILE_BYTES = 64 * MIB
ROUNDS, TURN_MS = 9, 300
# What is measured, the peer, and what share of the peer's speed is wanted on idle cores.
PAIRS = {"4 KiB": ("path_small", "io_uring", 0.25), "1 MiB": ("path_large", "pread", 0.5)}
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


def measure(agent: AgentProcess, path: Path, kind: str) -> dict[str, list[dict[str, Any]]]:
    """The turns of each name."""
    program = Path(os.environ["GDRKIT_BENCH_PROGRAMS"]) / "usrbio_path_bench"
    command = [str(program), str(agent.mount), str(path), "--kind", kind]
    command += ["--rounds", str(ROUNDS), "--ms", str(TURN_MS)]
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


@pytest.mark.parametrize("kind", KINDS)
def test_reads_beside_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int, evidence: Evidence, said: list[str]
) -> None:
    # A twin is late by seed, which limits what a depth can move; hardware knows nothing of it.
    monkeypatch.setenv("GDRKIT_TWINS_LATE_US", "0")
    evidence["environment"] = {"GDRKIT_TWINS_LATE_US": "0"}
    load = os.getloadavg()[0]
    with AgentProcess(tmp_path) as agent:
        turns = measure(agent, make_file(tmp_path, seed), kind)
    assert agent.statistics["failed"] == 0
    evidence["load_1min"] = [load, os.getloadavg()[0]]
    for name, (ours, peer, wanted) in PAIRS.items():
        if peer not in turns:
            said.append(f"{kind:6} {name}: this system lets nobody have an {peer}")
            continue
        # Turns of one round follow each other: what else the machine did met both.
        shares = [rate(one) / rate(other) for one, other in zip(turns[ours], turns[peer], strict=True)]
        evidence.number(f"{ours}_share_of_{peer}_ratio_median", statistics.median(shares))
        for each in (ours, peer):
            evidence.number(f"{each}_per_s_median", statistics.median(map(rate, turns[each])))
            costs = {
                who: statistics.median(turn["cpu_s"][who] / turn["operations"] * 1e6 for turn in turns[each])
                for who in turns[each][0]["cpu_s"]
            }
            for who, cost in costs.items():
                evidence.number(f"{each}_{who}_cpu_us_median", cost)
        whole = sum(evidence.numbers[f"{ours}_{who}_cpu_us_median"] for who in ("client", "agent", "server"))
        said.append(
            f"{kind:6} {name} reads: {statistics.median(shares):.2f} x {peer} (wanted on idle cores: {wanted}); "
            f"processor time {whole / evidence.numbers[f'{peer}_client_cpu_us_median']:.1f} x {peer}; load {load:.1f}"
        )
