"""A process that migrates files, each in a child that ends as it is told: ``python tier_mover.py``.

It reads a task a line (:func:`task`) and writes ``pid N`` when the child is there and ``ended STATUS`` when it is gone:
1 where the file was busy.
``phase`` and ``count`` of a task say where: the count-th time that the migration comes to this phase the child kills
itself with SIGKILL (``how`` = kill) or stops itself with SIGSTOP (stop). With ``say`` it writes a line at each phase,
for whoever kills it from outside. It is forked, so that nothing has to be imported again for each of hundreds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gdrkit.errors import ApiError, Reason
from gdrkit.tiers import Configuration, Phase, Tier, TierManager

__all__ = ["main", "migrate", "task"]

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def task(configuration: Configuration, name: str, to: str, **how: object) -> str:
    """What the process is told."""
    tiers = [(tier.name, str(tier.directory), tier.accesses_min) for tier in configuration.tiers]
    return json.dumps({"tiers": tiers, "catalogue": str(configuration.catalogue), "name": name, "to": to, **how})


def migrate(told: dict[str, Any]) -> None:
    """Do what one task says."""
    tiers = tuple(Tier(name, Path(directory), least) for name, directory, least in told["tiers"])
    count = 0

    def observe(phase: Phase, name: str, offset_bytes: int) -> None:
        nonlocal count
        if told.get("say"):
            os.write(1, f"{phase.value} {offset_bytes}\n".encode())
        if phase.value == told.get("phase"):
            count += 1
            if count == told.get("count", 1):
                os.kill(os.getpid(), _SIGNALS[told["how"]])

    with TierManager(Configuration(tiers=tiers, catalogue=Path(told["catalogue"]), timeout_ms=20_000)) as manager:
        manager.move(told["name"], told["to"], observe=observe)


def main() -> None:
    """Do what is said until it is over."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.write(1, f"pid {os.getpid()}\n".encode())
            try:
                migrate(json.loads(line))
            except ApiError as error:
                os._exit(1 if error.reason is Reason.BUSY else 2)
            os._exit(0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


if __name__ == "__main__":
    main()
