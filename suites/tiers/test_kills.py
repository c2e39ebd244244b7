"""A migration that is killed (kill -9) in any phase loses no byte, in folders and on mounted file systems.

After a restart, the file is in exactly one tier, and the catalogue agrees with the disks. The environment variable
GDRKIT_TIER_KILLS is the number of kills per campaign, spread evenly over all phases: 20 by default, 300 in
``nox -s long``. A campaign can be repeated with the seed of its run (``--seed``). The cases of a power loss are in
test_power_cuts.py.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
from support.mounts import mount_new_file_system
from support.tier_campaign import PHASES, MigrationProcess, TierCampaign
from support.tier_world import TIER_NAMES, make_configuration

from gdrkit.harness.needs import host, needs

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

KILL_COUNT = int(os.environ.get("GDRKIT_TIER_KILLS", "20"))
FILE_SYSTEMS = [
    pytest.param("folders", id="folders"),
    pytest.param("ext4", id="ext4", marks=needs(host.file_system("ext4"))),
    pytest.param("xfs", id="xfs", marks=needs(host.file_system("xfs"))),
]


@pytest.mark.parametrize("in_background", [False, True], ids=["command", "background"])
@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
@pytest.mark.timeout(120 + 10 * KILL_COUNT)
def test_killed_migration_loses_no_byte(
    tmp_path: Path,
    seed: int,
    evidence: Evidence,
    capsys: pytest.CaptureFixture[str],
    *,
    file_system: str,
    in_background: bool,
) -> None:
    with contextlib.ExitStack() as stack:
        if file_system != "folders":
            # Two tiers have file systems of their own. The third tier is a folder.
            stack.enter_context(mount_new_file_system(file_system, tmp_path / TIER_NAMES[0]))
            stack.enter_context(mount_new_file_system(file_system, tmp_path / TIER_NAMES[1]))
        migration_process = stack.enter_context(MigrationProcess())
        campaign = TierCampaign(make_configuration(tmp_path), migration_process, seed=seed, in_background=in_background)
        campaign.run(KILL_COUNT)
    evidence["hits"] = campaign.kill_counts
    evidence["killed_from_outside_before_the_end"] = campaign.timely_outside_kill_count
    with capsys.disabled():
        counts = campaign.kill_counts
        print(f"\n  {file_system}, {in_background=}: {sum(counts.values())} kills, {counts}")  # noqa: T201 - for the log.
    assert min(campaign.kill_counts.values()) >= KILL_COUNT // len(PHASES)
