"""Time and memory of the migration policy for ten thousand, a hundred thousand and a million files.

The time must not grow faster than n log n, where n is the number of files. The memory must not depend on n, because
SQLite sorts the files and stores the decisions on disk. Each plan is made in a new process (:mod:`bench.tier_plan`),
whose peak memory is measured. Without --benchmark-enable, the case only plans a thousand files once.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from support.python_child import module_command, suites_environ

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

FILE_COUNTS = (10_000, 100_000, 1_000_000)
ROUNDS_COUNT = 3
# The measured ratio of two medians may exceed the limit by this factor, because the load of a busy machine changes it.
TOLERANCE_FACTOR = 1.25
# Maximum difference between the peak memories for the most and for the fewest files. SQLite caches pages of two files,
# the catalogue and the plan (cache_size).
MEMORY_GROWTH_MIB_MAX = 16


def measure_plan(folder: Path, files_count: int, rounds_count: int) -> dict[str, Any]:
    """Return the median times of a plan for this number of files, and the peak memory of its process."""
    folder.mkdir()
    command = module_command("bench.tier_plan", folder, files_count, rounds_count)
    completed = subprocess.run(command, env=suites_environ(), check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(completed.stdout)
    assert 0 < result["moves"] < files_count
    return result | {name: statistics.median(result[name]) for name in ("seconds", "processor_s")}


@pytest.mark.timeout(900)
def test_policy_for_many_files(
    request: pytest.FixtureRequest, tmp_path: Path, evidence: Evidence, summary: list[str]
) -> None:
    if not request.config.getoption("--benchmark-enable"):
        measure_plan(tmp_path / "few", 1000, 1)
        return
    results = {count: measure_plan(tmp_path / str(count), count, ROUNDS_COUNT) for count in FILE_COUNTS}
    evidence.number("rounds_count", ROUNDS_COUNT)
    for count, result in results.items():
        evidence.number(f"plan_of_{count}_files_s_median", result["seconds"])
        evidence.number(f"processor_for_{count}_files_s_median", result["processor_s"])
        evidence.number(f"moves_of_{count}_files_count", result["moves"])
        evidence.number(f"peak_of_{count}_files_mib", result["peak_mib"])
        times_text = (
            f"{result['seconds']:.3f} s ({result['processor_s']:.3f} s of a processor), {result['moves']} moves"
        )
        summary.append(f"policy, {count:>9} files: {times_text}, {result['peak_mib']:.0f} MiB")
    for small_count, large_count in pairwise(FILE_COUNTS):
        # The ratio compares processor times, because the load of the machine affects them less than elapsed times.
        ratio = results[large_count]["processor_s"] / results[small_count]["processor_s"]
        evidence.number(f"time_{large_count}_over_{small_count}_files_ratio", ratio)
        assert ratio <= TOLERANCE_FACTOR * (large_count * math.log(large_count)) / (small_count * math.log(small_count))
    assert results[FILE_COUNTS[-1]]["peak_mib"] - results[FILE_COUNTS[0]]["peak_mib"] <= MEMORY_GROWTH_MIB_MAX
