"""kill -9 of a migration in every phase, on folders and on real mounts: no byte is lost, one copy counts, and after the
restart catalogue and disks agree.

GDRKIT_TIER_KILLS says how many kills there are on each ground, evenly over all phases: 20 when it is not set, 300 in
``nox -s long``. The seed of the run (``--seed``) repeats it. That no byte is lost when the power goes is shown by
test_power_cuts.py.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
from support.mounts import mounted
from support.tier_campaign import PHASES, Campaign, Mover
from support.tier_world import NAMES, configuration_of

from gdrkit.harness.needs import host, needs

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

KILLS = int(os.environ.get("GDRKIT_TIER_KILLS", "20"))
GROUNDS = [
    pytest.param("folders", id="folders"),
    pytest.param("ext4", id="ext4", marks=needs(host.file_system("ext4"))),
    pytest.param("xfs", id="xfs", marks=needs(host.file_system("xfs"))),
]


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.timeout(120 + 10 * KILLS)
def test_a_migration_that_is_killed_loses_nothing(
    tmp_path: Path, seed: int, evidence: Evidence, capsys: pytest.CaptureFixture[str], ground: str
) -> None:
    with contextlib.ExitStack() as stack:
        if ground != "folders":
            # Two file systems, one of which has two tiers: the move between those is a copy all the same.
            stack.enter_context(mounted(ground, tmp_path / NAMES[0]))
            stack.enter_context(mounted(ground, tmp_path / NAMES[1]))
        mover = stack.enter_context(Mover())
        campaign = Campaign(configuration_of(tmp_path), mover, seed=seed)
        campaign.run(KILLS)
    evidence["hits"] = campaign.hits
    evidence["killed_from_outside_before_the_end"] = campaign.before
    with capsys.disabled():
        print(f"\n  {ground}: {sum(campaign.hits.values())} kills, {campaign.hits}")  # noqa: T201 - counts are printed.
    assert min(campaign.hits.values()) >= KILLS // len(PHASES)
