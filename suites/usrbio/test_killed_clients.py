"""An agent keeps nothing of clients that were killed, however many there are.

GDRKIT_KILLED_CLIENTS says how many are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.kill_world import descriptors, until
from support.raw_usrbio import AgentProcess, shared_memory

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic())

SUITES = Path(__file__).resolve().parents[1]
KILLED = int(os.environ.get("GDRKIT_KILLED_CLIENTS", "2000"))
# The first clients start the agent's threads, fill malloc's arenas and grow Python's tables to the size that they keep.
WARM_UP = 200
GROWTH_KIB_MAX = 2048
TIMEOUT_S = 60 + KILLED / 10


class Held(NamedTuple):
    """Counts of the resources that an agent holds."""

    descriptors: int
    threads: int
    shared: int
    links: int


def resident_kib(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def held(agent: AgentProcess) -> Held:
    process_id = agent.process.pid
    return Held(
        descriptors=len(descriptors(process_id)),
        threads=len(list(Path(f"/proc/{process_id}/task").iterdir())),
        shared=len(shared_memory(agent.mount)),
        links=len(list((agent.mount / "3fs-virt" / "iovs").iterdir())),
    )


def kill_clients(agent: AgentProcess, count: int) -> None:
    path = os.pathsep.join([str(SUITES), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "support.client_kills", str(agent.mount), str(count)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_agent_does_not_grow_by_killed_clients(tmp_path: Path, seed: int, evidence: Evidence) -> None:
    (tmp_path / "input").write_bytes(pattern.payload(MIB, seed=seed))
    with AgentProcess(tmp_path) as agent:
        links = held(agent).links
        kill_clients(agent, WARM_UP)
        until(lambda: held(agent).links == links, "everything of the first clients is gone", timeout_s=60)
        idle = held(agent)
        before_kib = resident_kib(agent.process.pid)
        kill_clients(agent, KILLED)
        # At most: a thread of the last one of the first clients may just have been ending.
        until(
            lambda: all(now <= then for now, then in zip(held(agent), idle, strict=True)),
            "everything of the killed clients is gone",
            timeout_s=60,
        )
        grown_kib = resident_kib(agent.process.pid) - before_kib
        assert agent.terminate() == 0, agent.errors
    evidence.number("killed_clients_count", KILLED)
    evidence.number("resident_before_kib", before_kib)
    evidence.number("resident_growth_kib", grown_kib)
    evidence["held_before"] = idle._asdict()
    assert grown_kib < GROWTH_KIB_MAX
