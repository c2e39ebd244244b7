"""A power loss in any phase of a migration loses no byte.

The writes of a killed process stay in the kernel's page cache; a power loss discards them. So these cases stop the
migration in a phase, copy the block devices, and mount the copies. The copies contain only what had reached the
devices, so a case fails if an fsync is missing. The catalogue is lost too, and is rebuilt from the devices.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.mounts import mounted, power_cut
from support.processes import is_stopped, wait_until
from support.tier_campaign import Mover
from support.tier_world import NAMES, check_tiers, configuration_of, create_file

from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Configuration, Phase, TierManager
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("GDRKIT_TIER_KILLS", "20"))
KINDS = [pytest.param(kind, id=kind, marks=needs(host.file_system(kind))) for kind in ("ext4", "xfs")]
ON_DEVICES = NAMES[:2]
# A short run tests the phases around the fsync calls. ``nox -s long`` tests all phases.
SYNC_PHASES = (Phase.VERIFY, Phase.RETIRE, Phase.RETIRED, Phase.FORGET, Phase.DONE)
PHASES = SYNC_PHASES if len(Phase) * 10 > KILLS else tuple(Phase)


def on_copies(configuration: Configuration, root: Path) -> Configuration:
    """Return a configuration with the same tiers on the copies of their devices, which are mounted below `root`."""
    tiers = [replace(tier, directory=root / tier.name) for tier in configuration.tiers if tier.name in ON_DEVICES]
    return replace(configuration, tiers=(tiers[0], replace(tiers[1], accesses_min=0)), catalogue=root / "catalogue")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("complete", ["source", "destination"])
@pytest.mark.timeout(300)
def test_power_loss_loses_no_byte(tmp_path: Path, seed: int, kind: str, complete: str) -> None:
    with contextlib.ExitStack() as stack:
        for name in ON_DEVICES:
            stack.enter_context(mounted(kind, tmp_path / name))
        mover = stack.enter_context(Mover())
        configuration = configuration_of(tmp_path)
        for number, phase in enumerate(PHASES):
            name, source, to = f"folder-{number}/{phase.value}", *ON_DEVICES[:: 1 - 2 * (number % 2)]
            with TierManager(configuration) as manager:
                files = {name: create_file(manager, name, 300 * KIB + number, seed=seed + number, tier=source)}
            subprocess.run(["sync"], check=True)
            process_id = mover.start(configuration, name, to, phase=phase.value, how="stop")
            wait_until(
                lambda process_id=process_id: is_stopped(process_id),  # type: ignore[misc]
                f"the migration is stopped in {phase}",
                timeout_s=60,
            )
            # In the worst case, one device has all writes, and the other one only those that were synced.
            synced = {"source": source, "destination": to}[complete]
            subprocess.run(["sync", "-f", str(tmp_path / synced)], check=True)
            copies = tmp_path / f"after-{phase.value}"
            copies.mkdir()
            with contextlib.ExitStack() as cuts:
                for tier in ON_DEVICES:
                    cuts.enter_context(power_cut(kind, tmp_path / tier, copies / tier))
                check_tiers(on_copies(configuration, copies), files)
            os.kill(process_id, signal.SIGCONT)
            assert mover.migration_code() == 0
            with TierManager(configuration) as manager:
                manager.remove(name)
