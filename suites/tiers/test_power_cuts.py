"""A power loss in any phase of a migration loses no byte.

A power loss discards the writes in the page cache. To have the same effect, these cases stop a migration in a phase,
copy the block devices, and mount the copies. Before the copy, only one of the two devices is synced. The copy of the
other device has only the data that the migration has written with fsync, so a case fails if an fsync is missing. The
catalogue (the database of the files) is on neither device, so check_tiers() rebuilds it from the files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.mounts import mount_image_copy, mount_new_file_system
from support.processes import is_stopped, wait_until
from support.tier_campaign import MigrationProcess
from support.tier_world import TIER_NAMES, check_tiers, create_file, make_configuration

from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Configuration, Phase, TierManager
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path

FILE_SYSTEMS = [
    pytest.param(file_system, id=file_system, marks=needs(host.file_system(file_system)))
    for file_system in ("ext4", "xfs")
]
# The tiers that have a block device of their own.
DEVICE_TIER_NAMES = TIER_NAMES[:2]
# GDRKIT_TIER_KILLS is the number of kills in a campaign of test_kills.py. ``nox -s long`` sets it to 300. A run with 10
# or more kills per phase counts as long.
IS_LONG_RUN = int(os.environ.get("GDRKIT_TIER_KILLS", "20")) >= len(Phase) * 10
# A short run tests the phases around the fsync calls. ``nox -s long`` tests all phases.
SYNC_PHASES = (Phase.VERIFY, Phase.RETIRE, Phase.RETIRED, Phase.FORGET, Phase.DONE)
PHASES = tuple(Phase) if IS_LONG_RUN else SYNC_PHASES


def make_configuration_of_copies(configuration: Configuration, root: Path) -> Configuration:
    """Return a configuration of the tiers that have a device. Their folders are the mounted copies in `root`."""
    tiers = [
        replace(tier, directory=root / tier.name) for tier in configuration.tiers if tier.name in DEVICE_TIER_NAMES
    ]
    # The configuration requires the threshold 0 for the slowest tier.
    return replace(configuration, tiers=(tiers[0], replace(tiers[1], accesses_min=0)), catalogue=root / "catalogue")


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
@pytest.mark.parametrize("synced_side", ["source", "destination"])
@pytest.mark.timeout(300)
def test_power_loss_loses_no_byte(tmp_path: Path, seed: int, file_system: str, synced_side: str) -> None:
    with contextlib.ExitStack() as stack:
        for tier in DEVICE_TIER_NAMES:
            stack.enter_context(mount_new_file_system(file_system, tmp_path / tier))
        migration_process = stack.enter_context(MigrationProcess())
        configuration = make_configuration(tmp_path)
        for index, phase in enumerate(PHASES):
            name = f"folder-{index}/{phase.value}"
            source, destination = DEVICE_TIER_NAMES
            if index % 2:  # Odd migrations go from the slower to the faster tier.
                source, destination = destination, source
            with TierManager(configuration) as manager:
                data_by_name = {name: create_file(manager, name, 300 * KIB + index, seed=seed + index, tier=source)}
            subprocess.run(["sync"], check=True)
            process_id = migration_process.start(
                configuration, name, destination, phase=phase.value, signal_name="stop"
            )
            wait_until(
                lambda process_id=process_id: is_stopped(process_id),  # type: ignore[misc]
                f"the migration is stopped in {phase}",
                timeout_s=60,
            )
            # The worst case of a power loss: one device (`synced_side`) has received all writes, the other device only
            # the writes before its last fsync.
            synced_tier = {"source": source, "destination": destination}[synced_side]
            subprocess.run(["sync", "-f", str(tmp_path / synced_tier)], check=True)
            copies_folder = tmp_path / f"after-{phase.value}"
            copies_folder.mkdir()
            with contextlib.ExitStack() as mount_stack:
                for tier in DEVICE_TIER_NAMES:
                    mount_stack.enter_context(mount_image_copy(file_system, tmp_path / tier, copies_folder / tier))
                check_tiers(make_configuration_of_copies(configuration, copies_folder), data_by_name)
            os.kill(process_id, signal.SIGCONT)
            assert migration_process.wait_for_exit_code() == 0
            with TierManager(configuration) as manager:
                manager.remove(name)
