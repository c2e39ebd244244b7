"""SIGKILL of client, agent or server in named phases loses no acknowledged write, leaves nothing and blocks no process.

GDRKIT_KILLS is the number of kills, distributed evenly over all pairs of victim and phase: 20 by default (one per
pair), and 230 (ten per pair) in ``nox -s long``. The seed decides whether a client uses host or device memory. The
death of a server process loses no acknowledged write, because the kernel has the bytes. The cases do not cover a loss
of power.
"""

from __future__ import annotations

import math
import os
import random
from typing import TYPE_CHECKING

import pytest
from fault.kill_campaign import AgentCampaign
from fault.kill_phases import TRAPPED_CALLS, VICTIM_PHASES
from fault.traps import Traps

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, needs, software, verbs

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

KILLS = int(os.environ.get("GDRKIT_KILLS", "20"))


@needs(verbs.nic(count_min=2), software(Api.VERBS), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
@pytest.mark.timeout(120 + 20 * KILLS)
def test_kill_of_any_process_in_any_phase_loses_nothing(
    tmp_path: Path,
    seed: int,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(seed)
    mount = tmp_path / "mount"
    mount.mkdir()
    traps = Traps(tmp_path / "traps", TRAPPED_CALLS)
    monkeypatch.setenv("GDRKIT_TWINS_FAULTS", str(traps.plan))
    rounds = math.ceil(KILLS / len(VICTIM_PHASES))
    with AgentCampaign(mount, traps, chance) as campaign:
        campaign.run(rounds * len(VICTIM_PHASES))
    counts = {f"{victim} in {phase}": count for (victim, phase), count in campaign.hits.items()}
    evidence["hits"] = counts
    evidence["kinds"] = campaign.kinds
    evidence["acknowledged_writes"] = campaign.acknowledged
    with capsys.disabled():
        print()  # noqa: T201 - counts are printed.
        for name, count in counts.items():
            print(f"  {name:<22}{count:>5}")  # noqa: T201
        total = sum(counts.values())
        print(f"  {'kills':<22}{total:>5}, {campaign.acknowledged} acknowledged writes, {campaign.kinds}")  # noqa: T201
    assert min(counts.values()) == rounds
