"""`gdrkit compare`: regressions are found, and noise is not reported as a regression."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.hosts import HARDWARE, host_facts, host_records, write_run
from support.records import facts_of, record_of, run_of

from gdrkit.report import CaseReason, ClaimedRoute, Verdict
from gdrkit.report.compare import Comparison, compare, describe_comparison
from gdrkit.report.contents import Contents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.report import Record

TWINS = {"verbs": "twin", "cuda": "twin"}
PAIRS, ROUNDS, NOISE, REGRESSION = 1000, 15, 0.03, 0.10
NUMBER = "rate_gb_per_s_median"


def contents(*records: Record) -> Contents:
    return Contents(
        run_of(), facts_of(), records, tuple(f"records.jsonl:{number}" for number in range(1, len(records) + 1))
    )


def compared(before: Record, after: Record) -> Comparison:
    return compare(contents(before), contents(after), noise_percent=5.0)


def measured(draw: Callable[[], float], rate: float) -> Record:
    """Return a record like those of the throughput cases: median and spread of rounds, each scaled by `draw`."""
    rounds = sorted(rate * draw() for _ in range(ROUNDS))
    low, median, high = statistics.quantiles(rounds, n=4)
    numbers = {NUMBER: median, "rate_spread_percent": (high - low) / median * 100, "rounds_count": ROUNDS}
    return record_of(numbers=numbers, substrate=HARDWARE)


def single(draw: Callable[[], float], rate: float) -> Record:
    """Return a record of one number without a spread."""
    return record_of(numbers={"rate_gb_per_s": rate * draw()}, substrate=HARDWARE)


def is_worse(before: Record, after: Record) -> bool:
    return compared(before, after).is_worse


@pytest.mark.parametrize(
    ("name", "make", "alarms_max", "misses_max"), [("15 rounds", measured, 5, 5), ("one number", single, 30, 30)]
)
def test_regression_of_10_percent_exceeds_noise_of_3_percent(
    name: str,
    make: Callable[[Callable[[], float], float], Record],
    alarms_max: int,
    misses_max: int,
) -> None:
    generator = random.Random(20261121)

    def draw() -> float:
        return generator.gauss(1.0, NOISE) if make is measured else generator.uniform(1 - NOISE, 1 + NOISE)

    alarms = sum(is_worse(make(draw, 50.0), make(draw, 50.0)) for _ in range(PAIRS))
    misses = sum(not is_worse(make(draw, 50.0), make(draw, 50.0 * (1 - REGRESSION))) for _ in range(PAIRS))
    print(f"{name}: {alarms} false alarms and {misses} misses in {PAIRS} pairs each")  # noqa: T201 - for the reader of the log.
    assert alarms <= alarms_max
    assert misses <= misses_max


@pytest.mark.parametrize(
    ("name", "before", "after", "outcome"),
    [
        ("rate_gb_per_s", 50.0, 40.0, "worse"),
        ("rate_gb_per_s", 40.0, 50.0, "better"),
        ("rate_gb_per_s", 50.0, 49.0, "same"),
        ("latency_us_median", 2.0, 3.0, "worse"),
        ("latency_us_median", 3.0, 2.0, "better"),
        ("direct_over_by_host_ratio", 2.0, 1.0, "changed"),
        ("rate_gb_per_s", 0.0, 1.0, "better"),
    ],
)
def test_direction_of_a_change_follows_from_the_unit(name: str, before: float, after: float, outcome: str) -> None:
    earlier, later = (record_of(numbers={name: value}, substrate=HARDWARE) for value in (before, after))
    (change,) = compared(earlier, later).changes
    assert change.outcome == outcome
    assert change.origins == ("records.jsonl:1", "records.jsonl:1")


def test_noise_band_widens_with_the_spread() -> None:
    numbers = {"rate_spread_percent": 40.0, "rounds_count": 15.0}
    earlier, later = (record_of(numbers={NUMBER: rate, **numbers}, substrate=HARDWARE) for rate in (50.0, 40.0))
    (change,) = compared(earlier, later).changes
    assert change.outcome == "same"
    assert change.band_percent is not None
    assert change.band_percent > 20


def test_extreme_numbers_are_compared_without_an_error() -> None:
    before = [record_of(numbers={"rate_gb_per_s": rate}, substrate=HARDWARE) for rate in (1.7e308, -1.7e308, 5e-324)]
    after = record_of(numbers={"rate_gb_per_s": 1.7e308}, substrate=HARDWARE)
    comparison = compare(contents(*before), contents(after), noise_percent=5.0)
    (change,) = comparison.changes
    assert (change.outcome, change.change_percent, change.band_percent) == ("same", 1e9, 1e9)
    assert "Infinity" not in comparison.to_json()


def test_records_of_one_side_are_combined() -> None:
    before = [record_of(numbers={"rate_gb_per_s": rate}, substrate=HARDWARE) for rate in (50.0, 10.0, 51.0)]
    after = record_of(numbers={"rate_gb_per_s": 49.5}, substrate=HARDWARE)
    (change,) = compare(contents(*before), contents(after), noise_percent=5.0).changes
    assert (change.before, change.outcome) == ("50", "same")


def test_numbers_of_different_substrates_are_not_compared() -> None:
    one = record_of(numbers={"rate_gb_per_s": 50.0}, substrate=HARDWARE)
    (change,) = compared(one, record_of(numbers={"rate_gb_per_s": 1.0}, substrate=TWINS)).changes
    assert change.outcome == "not_comparable"


def test_numbers_of_twins_have_a_change_and_no_value() -> None:
    earlier, later = (record_of(numbers={"rate_gb_per_s": rate}, substrate=TWINS) for rate in (12.345, 6.0))
    comparison = compared(earlier, later)
    assert comparison.is_worse
    assert "-51.4 %" in describe_comparison(comparison)
    assert "12.3" not in describe_comparison(comparison) + comparison.to_json()


def test_worse_verdicts_and_routes_are_found() -> None:
    route = ClaimedRoute(0, "mlx5_0", "dmabuf")
    good = record_of(routes=(route,), substrate=HARDWARE)
    fallen = ClaimedRoute(0, "mlx5_0", "dmabuf", "by the host")
    bad = record_of(Verdict.UNPROVEN, routes=(fallen,), reasons=(CaseReason("not seen"),), substrate=HARDWARE)
    changes = compared(good, bad).changes
    worse = {(change.kind, change.before, change.after) for change in changes if change.outcome == "worse"}
    assert worse == {("verdict", "pass", "unproven"), ("route", "proven", "fell_back")}
    assert not compared(bad, good).is_worse
    gone = compare(contents(good), contents(record_of(case="b.py::other")), noise_percent=5.0)
    assert {(change.kind, change.outcome) for change in gone.changes} == {("verdict", "gone"), ("route", "gone")}


def test_hostile_name_is_escaped() -> None:
    name = "a.py::test\x1b[2J\x9b31m\u202e\ud800[ü]"
    earlier, later = (
        record_of(case=name, numbers={"rate_gb_per_s": rate}, substrate=HARDWARE) for rate in (50.0, 40.0)
    )
    comparison = compared(earlier, later)
    for text in (comparison.to_json(), describe_comparison(comparison)):
        assert [character for character in "\x1b\x9b\u202e\ud800" if character in text] == []
    # A program gets the name itself.
    assert json.loads(comparison.to_json())["changes"][0]["name"].startswith(name)


def gdrkit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdrkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_exit_code_is_1_if_something_became_worse(tmp_path: Path) -> None:
    facts = host_facts(gpus=1, nics=1)
    before = write_run(tmp_path / "before", facts, list(host_records(facts)))
    after = write_run(tmp_path / "after", facts, list(host_records(facts, factor=0.9)))
    same = gdrkit("compare", before, before)
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "nothing became worse")
    worse = gdrkit("compare", before, after / "records.jsonl", "--json")
    assert worse.returncode == 1, worse.stderr
    changes = json.loads(worse.stdout)["changes"]
    names = [change["name"] for change in changes if change["outcome"] == "worse"]
    assert len(names) == 8
    assert gdrkit("compare", before, after, "--noise", "15").returncode == 0
    assert gdrkit("compare", before, tmp_path).returncode == 2
