"""SIGKILL of a usrbio client, agent or server in any phase loses no acknowledged write and blocks no other process.

A killed process leaves no resources behind. GDRKIT_KILLS is the number of kills: 20 by default, and 500 in ``nox -s
long``. The number is rounded up so that each pair of victim and phase gets the same number of kills. The seed decides
whether a client uses host or device memory.

The death of a server process loses no acknowledged write, because the kernel has the data. The cases do not cover a
loss of power.
"""

from __future__ import annotations

import math
import os
import random
from typing import TYPE_CHECKING

import pytest
from fault.kill_campaign import AgentCampaign
from fault.kill_phases import KILL_POINTS, LOCAL_KILL_POINTS, TRAP_BY_CALL
from fault.traps import Traps

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, needs, software, verbs

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

REQUESTED_KILL_COUNT = int(os.environ.get("GDRKIT_KILLS", "20"))


@needs(verbs.nic(count_min=2), software(Api.VERBS), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
@pytest.mark.timeout(120 + 20 * REQUESTED_KILL_COUNT)
@pytest.mark.parametrize("local_reads", [False, True], ids=["reads by the server", "reads by the agent"])
def test_kill_of_any_process_in_any_phase_loses_nothing(
    tmp_path: Path,
    local_reads: bool,  # noqa: FBT001 - a parameter of the case.
    seed: int,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(seed)
    mount = tmp_path / "mount"
    mount.mkdir()
    traps = Traps(tmp_path / "traps", TRAP_BY_CALL)
    monkeypatch.setenv("GDRKIT_TWINS_FAULTS", str(traps.plan_path))
    # Without the pool of GPU memory, the agent deregisters each iov (published memory) when the client unpublishes it.
    # This deregistration is a phase of the campaign.
    monkeypatch.setenv("GDRKIT_USRBIO_GPU_POOL_BYTES", "0")
    pair_count = len(LOCAL_KILL_POINTS if local_reads else KILL_POINTS)
    kills_per_pair = math.ceil(REQUESTED_KILL_COUNT / pair_count)
    with AgentCampaign(mount, traps, rng, local_reads=local_reads) as campaign:
        campaign.run(kills_per_pair * pair_count)
    kill_counts = {f"{victim} in {phase}": count for (victim, phase), count in campaign.kill_counts.items()}
    evidence["hits"] = kill_counts
    evidence["kinds"] = campaign.kills_by_memory_kind
    evidence["acknowledged_writes"] = campaign.acknowledged_count
    with capsys.disabled():
        print()  # noqa: T201 - the run shows the counts.
        for kill_point, count in kill_counts.items():
            print(f"  {kill_point:<22}{count:>5}")  # noqa: T201
        total_kill_count = sum(kill_counts.values())
        acknowledged_count, kills_by_memory_kind = campaign.acknowledged_count, campaign.kills_by_memory_kind
        print(f"  {'kills':<22}{total_kill_count:>5}, {acknowledged_count} acknowledged writes, {kills_by_memory_kind}")  # noqa: T201
    assert min(kill_counts.values()) == kills_per_pair
