"""A loss of power in every phase of a migration, on real file systems: what had come to the devices by then is mounted
anew, and no byte is lost.

A process that is killed leaves its writes in the kernel; a machine that goes down does not. Here the migration is
stopped in a phase, and a copy of the devices taken, which has nothing of what was only in memory. So these cases fail
when an fsync is missing. The catalogue is lost with the machine, and made anew from the devices.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.kill_world import is_stopped, until
from support.mounts import mounted, power_cut
from support.tier_campaign import Mover
from support.tier_world import NAMES, configuration_of, expect, place_file

from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Configuration, Phase, TierManager
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("GDRKIT_TIER_KILLS", "20"))
KINDS = [pytest.param(kind, id=kind, marks=needs(host.file_system(kind))) for kind in ("ext4", "xfs")]
ON_DEVICES = NAMES[:2]
# All of them where there is time: ``nox -s long``.
TELLING = (Phase.VERIFY, Phase.RETIRE, Phase.RETIRED, Phase.FORGET, Phase.DONE)
PHASES = TELLING if len(Phase) * 10 > KILLS else tuple(Phase)


def on_copies(configuration: Configuration, root: Path) -> Configuration:
    """The same tiers, with their devices mounted in another place."""
    tiers = [replace(tier, directory=root / tier.name) for tier in configuration.tiers if tier.name in ON_DEVICES]
    return replace(configuration, tiers=(tiers[0], replace(tiers[1], accesses_min=0)), catalogue=root / "catalogue")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("complete", ["source", "destination"])
@pytest.mark.timeout(300)
def test_when_the_power_goes_no_byte_is_lost(tmp_path: Path, seed: int, kind: str, complete: str) -> None:
    with contextlib.ExitStack() as stack:
        for name in ON_DEVICES:
            stack.enter_context(mounted(kind, tmp_path / name))
        mover = stack.enter_context(Mover())
        configuration = configuration_of(tmp_path)
        for number, phase in enumerate(PHASES):
            name, source, to = f"folder-{number}/{phase.value}", *ON_DEVICES[:: 1 - 2 * (number % 2)]
            with TierManager(configuration) as manager:
                files = {name: place_file(manager, name, 300 * KIB + number, seed=seed + number, tier=source)}
            subprocess.run(["sync"], check=True)
            process_id = mover.start(configuration, name, to, phase=phase.value, how="stop")
            until(
                lambda process_id=process_id: is_stopped(process_id),  # type: ignore[misc]
                f"it is stopped in {phase}",
                timeout_s=60,
            )
            # The worst orders: one device has everything by then, the other only what it was asked for.
            whole = {"source": source, "destination": to}[complete]
            subprocess.run(["sync", "-f", str(tmp_path / whole)], check=True)
            copies = tmp_path / f"after-{phase.value}"
            copies.mkdir()
            with contextlib.ExitStack() as cuts:
                for tier in ON_DEVICES:
                    cuts.enter_context(power_cut(kind, tmp_path / tier, copies / tier))
                expect(on_copies(configuration, copies), files)
            os.kill(process_id, signal.SIGCONT)
            assert mover.end() == 0
            with TierManager(configuration) as manager:
                manager.remove(name)
