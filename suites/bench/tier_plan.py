"""Program that measures the time and memory of a migration plan: ``python -m bench.tier_plan FOLDER FILES ROUNDS``.

It fills a tier catalogue with FILES files, makes ROUNDS plans, and prints the measurements as JSON. It is a separate
program, so that the peak memory of its process is the memory of the plan.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from support.tier_world import TIER_NAMES, make_configuration

from gdrkit.tiers import TierManager
from gdrkit.tiers.heat import score_from_heat
from gdrkit.tiers.plan import MigrationPlan
from gdrkit.tiers.policy import TierLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main"]

_SIZES_BYTES = (4096, 1 << 20, 1 << 30)


def _generate_rows(files_count: int, now_half_lives: float) -> Iterator[tuple[object, ...]]:
    """Yield rows of the catalogue: files of several sizes in all tiers, most of them rarely used.

    `now_half_lives` is the current time in half-lives of the heat. One file in a hundred is pinned to a tier, and one
    file in a hundred has two hard links. The values of a row stand in the order of `columns` in main().
    """
    rng = random.Random(files_count)
    for file_number in range(files_count):
        score = score_from_heat(rng.paretovariate(0.5), at_half_lives=now_half_lives - rng.uniform(0, 8))
        size_bytes, random_percent = rng.choice(_SIZES_BYTES), rng.randrange(100)
        pinned_tier = rng.choice(TIER_NAMES) if random_percent == 0 else None
        links_count = 2 if random_percent == 1 else 1
        name = f"folder-{file_number % 1000}/file-{file_number}".encode()
        yield name, rng.choice(TIER_NAMES), size_bytes, size_bytes, links_count, score, 1, pinned_tier


def _get_peak_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Fill a catalogue, plan several times, and print the times, the number of moves, and the peak memory."""
    folder, files_count, rounds_count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with TierManager(make_configuration(folder)) as manager:
        columns = "name, tier, size_bytes, allocated_bytes, links, score, accesses, pinned"
        with manager.catalogue.write_transaction("fill") as connection:
            rows = _generate_rows(files_count, manager.catalogue.now_half_lives())
            connection.executemany(f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)  # noqa: S608
        # The capacities of the tiers: a tenth of all bytes, almost a third, and twice all bytes.
        total_bytes = sum(totals.allocated_bytes for totals in manager.catalogue.totals().values())
        limits = [
            TierLimits(name, accesses_min, int(total_bytes * share))
            for name, accesses_min, share in zip(TIER_NAMES, (100, 10, 0), (0.1, 0.3, 2), strict=True)
        ]
        wall_s, processor_s, moves_count = [], [], 0
        for _ in range(rounds_count):
            begin_s, processor_begin_s = time.perf_counter(), time.process_time()
            with MigrationPlan(manager.catalogue, limits, hysteresis=0.1) as plan:
                wall_s.append(time.perf_counter() - begin_s)
                processor_s.append(time.process_time() - processor_begin_s)
                assert plan.considered_count == files_count
                moves_count = plan.count
    measurements = {"seconds": wall_s, "processor_s": processor_s, "moves": moves_count, "peak_mib": _get_peak_mib()}
    print(json.dumps(measurements))  # noqa: T201


if __name__ == "__main__":
    main()
