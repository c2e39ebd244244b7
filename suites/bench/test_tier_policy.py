"""Time and memory of the migration policy for ten thousand, a hundred thousand and a million files.

The time must not grow faster than n log n, and the memory must not depend on the number: SQLite sorts the files and
stores the decisions on disk. Each plan is made in its own process, whose peak memory is measured. Run it with
--benchmark-enable. Without it, the case plans a thousand files once.
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

COUNTS = (10_000, 100_000, 1_000_000)
ROUNDS = 3
# Factor by which the load of a busy machine may change a ratio of medians.
LOAD_FACTOR = 1.25
# SQLite caches parts of two files in memory, the catalogue and the plan (cache_size).
MEMORY_MIB_MAX = 16


def measure_plan(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Return the median times of a plan for this number of files, and the peak memory of its process."""
    folder.mkdir()
    command = module_command("bench.tier_plan", folder, count, rounds)
    done = subprocess.run(command, env=suites_environ(), check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    assert 0 < result["moves"] < count
    return result | {each: statistics.median(result[each]) for each in ("seconds", "processor_s")}


@pytest.mark.timeout(900)
def test_policy_for_many_files(
    request: pytest.FixtureRequest, tmp_path: Path, evidence: Evidence, summary: list[str]
) -> None:
    if not request.config.getoption("--benchmark-enable"):
        measure_plan(tmp_path / "few", 1000, 1)
        return
    results = {count: measure_plan(tmp_path / str(count), count, ROUNDS) for count in COUNTS}
    evidence.number("rounds_count", ROUNDS)
    for count, each in results.items():
        evidence.number(f"plan_of_{count}_files_s_median", each["seconds"])
        evidence.number(f"processor_for_{count}_files_s_median", each["processor_s"])
        evidence.number(f"moves_of_{count}_files_count", each["moves"])
        evidence.number(f"peak_of_{count}_files_mib", each["peak_mib"])
        line = f"{each['seconds']:.3f} s ({each['processor_s']:.3f} s of a processor), {each['moves']} moves"
        summary.append(f"policy, {count:>9} files: {line}, {each['peak_mib']:.0f} MiB")
    for few, many in pairwise(COUNTS):
        # Other load has less effect on the processor time.
        ratio = results[many]["processor_s"] / results[few]["processor_s"]
        evidence.number(f"time_{many}_over_{few}_files_ratio", ratio)
        assert ratio <= LOAD_FACTOR * (many * math.log(many)) / (few * math.log(few))
    assert results[COUNTS[-1]]["peak_mib"] - results[COUNTS[0]]["peak_mib"] <= MEMORY_MIB_MAX
