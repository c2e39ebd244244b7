"""How long the policy needs for ten thousand, a hundred thousand and a million files, and how much memory.

It should take time that grows no faster than n log n, and the same memory for any number: the files are sorted, and
the decisions kept, by SQLite, on disk. Each count is planned in a process of its own, whose peak of memory it is. Run
it with --benchmark-enable; else it plans a thousand files, once.
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
# What a busy machine may add to a ratio of medians.
SLACK = 1.25
# As much as SQLite keeps of a file in memory (cache_size), for the catalogue and for the plan.
MEMORY_MIB_MAX = 16


def planned(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Medians of what it took, and the peak of memory of the process."""
    folder.mkdir()
    command = module_command("bench.tier_plan", folder, count, rounds)
    said = subprocess.run(command, env=suites_environ(), check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(said.stdout)
    assert 0 < found["moves"] < count
    return found | {each: statistics.median(found[each]) for each in ("seconds", "processor_s")}


@pytest.mark.timeout(900)
def test_the_policy_for_many_files(
    request: pytest.FixtureRequest, tmp_path: Path, evidence: Evidence, said: list[str]
) -> None:
    if not request.config.getoption("--benchmark-enable"):
        planned(tmp_path / "few", 1000, 1)
        return
    found = {count: planned(tmp_path / str(count), count, ROUNDS) for count in COUNTS}
    evidence.number("rounds_count", ROUNDS)
    for count, each in found.items():
        evidence.number(f"plan_of_{count}_files_s_median", each["seconds"])
        evidence.number(f"processor_for_{count}_files_s_median", each["processor_s"])
        evidence.number(f"moves_of_{count}_files_count", each["moves"])
        evidence.number(f"peak_of_{count}_files_mib", each["peak_mib"])
        line = f"{each['seconds']:.3f} s ({each['processor_s']:.3f} s of a processor), {each['moves']} moves"
        said.append(f"policy, {count:>9} files: {line}, {each['peak_mib']:.0f} MiB")
    for few, many in pairwise(COUNTS):
        # Of the processor, whatever else the machine does meanwhile.
        ratio = found[many]["processor_s"] / found[few]["processor_s"]
        evidence.number(f"time_{many}_over_{few}_files_ratio", ratio)
        assert ratio <= SLACK * (many * math.log(many)) / (few * math.log(few))
    assert found[COUNTS[-1]]["peak_mib"] - found[COUNTS[0]]["peak_mib"] <= MEMORY_MIB_MAX
