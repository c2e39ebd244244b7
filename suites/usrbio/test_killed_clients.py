"""An agent releases all resources of killed clients. GDRKIT_KILLED_CLIENTS is the number of killed clients."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.processes import list_open_paths, wait_until
from support.python_child import module_command, suites_environ
from support.raw_usrbio import AgentProcess, list_shared_memory_files

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic())

KILLED_CLIENT_COUNT = int(os.environ.get("GDRKIT_KILLED_CLIENTS", "1000"))
# The first clients start the agent's threads, fill malloc's arenas and grow Python's tables to the size that they keep.
WARM_UP_CLIENT_COUNT = 200
# Largest allowed growth of the resident memory of the agent.
GROWTH_KIB_MAX = 2048
TIMEOUT_S = 60 + KILLED_CLIENT_COUNT / 10


class ResourceCounts(NamedTuple):
    """Counts of the resources that an agent holds. `shared` counts the published files in /dev/shm."""

    descriptors: int
    threads: int
    shared: int
    links: int


def read_resident_kib(process_id: int) -> int:
    """Return the resident memory of a process in KiB."""
    status_text = Path(f"/proc/{process_id}/status").read_text()
    return next(int(line.split()[1]) for line in status_text.splitlines() if line.startswith("VmRSS"))


def count_resources(agent: AgentProcess) -> ResourceCounts:
    process_id = agent.process.pid
    return ResourceCounts(
        descriptors=len(list_open_paths(process_id)),
        threads=len(list(Path(f"/proc/{process_id}/task").iterdir())),
        shared=len(list_shared_memory_files(agent.mount)),
        links=len(list((agent.mount / "3fs-virt" / "iovs").iterdir())),
    )


def kill_clients(agent: AgentProcess, client_count: int) -> None:
    """Run `client_count` clients, which kill themselves."""
    command = module_command("usrbio.killed_clients", agent.mount, client_count)
    subprocess.run(command, check=True, timeout=TIMEOUT_S, env=suites_environ())


@pytest.mark.timeout(TIMEOUT_S + 120)
def test_agent_does_not_grow_by_killed_clients(tmp_path: Path, seed: int, evidence: Evidence) -> None:
    (tmp_path / "input").write_bytes(pattern.payload(MIB, seed=seed))
    with AgentProcess(tmp_path) as agent:
        link_count = count_resources(agent).links
        kill_clients(agent, WARM_UP_CLIENT_COUNT)
        wait_until(
            lambda: count_resources(agent).links == link_count,
            "the links of the first clients are removed",
            timeout_s=60,
        )
        idle_counts = count_resources(agent)
        resident_before_kib = read_resident_kib(agent.process.pid)
        kill_clients(agent, KILLED_CLIENT_COUNT)
        # The new counts may be lower, because the last client's thread may still have run when `idle_counts` was read.
        wait_until(
            lambda: all(
                count <= idle_count for count, idle_count in zip(count_resources(agent), idle_counts, strict=True)
            ),
            "the resources of the killed clients are released",
            timeout_s=60,
        )
        grown_kib = read_resident_kib(agent.process.pid) - resident_before_kib
        assert agent.terminate() == 0, agent.error_output
    evidence.number("killed_clients_count", KILLED_CLIENT_COUNT)
    evidence.number("resident_before_kib", resident_before_kib)
    evidence.number("resident_growth_kib", grown_kib)
    evidence["held_before"] = idle_counts._asdict()
    assert grown_kib < GROWTH_KIB_MAX
