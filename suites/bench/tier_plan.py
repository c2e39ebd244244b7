"""Time and memory of a migration plan for many files: ``python -m bench.tier_plan FOLDER FILES ROUNDS`` prints JSON.

The plan is made in its own process, so that the peak memory of the process is that of the plan.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from support.tier_world import NAMES, configuration_of

from gdrkit.tiers import TierManager
from gdrkit.tiers.heat import score_of
from gdrkit.tiers.plan import MigrationPlan
from gdrkit.tiers.policy import TierLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]

_SIZES_BYTES = (4096, 1 << 20, 1 << 30)


def _rows(count: int, now: float) -> Iterator[tuple[object, ...]]:
    """Yield rows of the catalogue: files of all sizes in all tiers, most of them cold.

    One in a hundred is pinned to a tier, and one in a hundred has two names.
    """
    chance = random.Random(count)
    for number in range(count):
        score = score_of(chance.paretovariate(0.5), at=now - chance.uniform(0, 8))
        size, percent = chance.choice(_SIZES_BYTES), chance.randrange(100)
        pinned = chance.choice(NAMES) if percent == 0 else None
        name = f"folder-{number % 1000}/file-{number}".encode()
        yield name, chance.choice(NAMES), size, size, 2 if percent == 1 else 1, score, 1, pinned


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Fill a catalogue, plan several times, and print what the plans took."""
    folder, count, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with TierManager(configuration_of(folder)) as manager:
        columns = "name, tier, size_bytes, allocated_bytes, links, score, accesses, pinned"
        with manager.catalogue.write_transaction("fill") as connection:
            rows = _rows(count, manager.catalogue.now())
            connection.executemany(f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)  # noqa: S608
        # The tiers have room for a tenth of the files, for a third, and for all.
        total = sum(each.allocated_bytes for each in manager.catalogue.totals().values())
        limits = [
            TierLimits(name, accesses_min, int(total * part))
            for name, accesses_min, part in zip(NAMES, (100, 10, 0), (0.1, 0.3, 2), strict=True)
        ]
        seconds, processor_s, moves = [], [], 0
        for _ in range(rounds):
            begin, processor = time.perf_counter(), time.process_time()
            with MigrationPlan(manager.catalogue, limits, hysteresis=0.1) as plan:
                seconds.append(time.perf_counter() - begin)
                processor_s.append(time.process_time() - processor)
                assert plan.considered == count
                moves = plan.count
    print(json.dumps({"seconds": seconds, "processor_s": processor_s, "moves": moves, "peak_mib": _peak_mib()}))  # noqa: T201


if __name__ == "__main__":
    main()
