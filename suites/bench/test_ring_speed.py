"""Processor time of a ring operation in the client, compared with a NOP of io_uring and a bare loop of semaphores.

On idle cores, it should be at most twice that of the NOP if the agent polls for up to 50 us before it sleeps, and at
most 1.2 times that of the loop if the agent sleeps at once. This is not asserted, because the machine may be busy.
`nox -s bench` builds the measuring program, which measures all of them in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

ROUNDS, BATCHES = 15, 20000
NAMES = {
    "usrbio, agent spins up to 50 us, 3 batches in flight": "spinning",
    "usrbio, agent spins up to 50 us, 1 batch in flight": "spinning_one_batch",
    "usrbio, agent sleeps": "sleeping",
    "bare loop, same semaphores": "bare_loop",
    "io_uring NOP": "nop",
    "usrbio with a spinning agent / io_uring NOP": "spinning_over_nop",
    "usrbio with a sleeping agent / bare loop": "sleeping_over_bare_loop",
}
pytestmark = pytest.mark.timeout(180)


def test_ring_operation_beside_its_peers(evidence: Evidence, summary: list[str]) -> None:
    program = Path(os.environ["GDRKIT_BENCH_PROGRAMS"]) / "usrbio_ring_bench"
    load = os.getloadavg()[0]
    done = subprocess.run(
        [str(program), str(ROUNDS), str(BATCHES)], capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr
    evidence["load_1min"] = [load, os.getloadavg()[0]]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["name"] for line in lines} <= NAMES.keys()
    for line in lines:
        name = NAMES[line["name"]]
        if "ratio" in line:
            evidence.number(f"{name}_ratio_median", line["ratio"])
            goal = f"goal on idle cores: {line['limit']}"
            summary.append(f"{line['name']}: {line['ratio']:.2f} ({goal}); load {load:.1f}")
        elif "not_run" in line:
            summary.append(f"{line['name']}: {line['not_run']}")
        else:
            evidence.number(f"{name}_client_cpu_ns_median", line["client_cpu_ns_per_operation"])
            evidence.number(f"{name}_client_cpu_ns_min", line["client_cpu_ns_per_operation_min"])
            evidence["batch"] = line["batch"]
