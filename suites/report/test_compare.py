"""`gdrkit compare`: what became worse is found, and noise is not taken for it."""

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
    return Contents(run_of(), facts_of(), records, tuple(f"records.jsonl:{it}" for it in range(1, len(records) + 1)))


def compared(before: Record, after: Record) -> Comparison:
    return compare(contents(before), contents(after), noise_percent=5.0)


def measured(draw: Callable[[], float], rate: float) -> Record:
    """A record as the throughput cases write it: median and spread of rounds, each as noisy as `draw` says."""
    rounds = sorted(rate * draw() for _ in range(ROUNDS))
    low, median, high = statistics.quantiles(rounds, n=4)
    numbers = {NUMBER: median, "rate_spread_percent": (high - low) / median * 100, "rounds_count": ROUNDS}
    return record_of(numbers=numbers, substrate=HARDWARE)


def once(draw: Callable[[], float], rate: float) -> Record:
    """A record of a single number, which nothing says how exact it is."""
    return record_of(numbers={"rate_gb_per_s": rate * draw()}, substrate=HARDWARE)


def is_worse(before: Record, after: Record) -> bool:
    return compared(before, after).is_worse


@pytest.mark.parametrize(
    ("kind", "make", "alarms_max", "misses_max"), [("15 rounds", measured, 5, 5), ("one number", once, 30, 30)]
)
def test_a_regression_of_10_percent_is_found_and_noise_of_3_percent_is_not(
    kind: str,
    make: Callable[[Callable[[], float], float], Record],
    alarms_max: int,
    misses_max: int,
) -> None:
    chance = random.Random(20261121)

    def draw() -> float:
        return chance.gauss(1.0, NOISE) if make is measured else chance.uniform(1 - NOISE, 1 + NOISE)

    alarms = sum(is_worse(make(draw, 50.0), make(draw, 50.0)) for _ in range(PAIRS))
    misses = sum(not is_worse(make(draw, 50.0), make(draw, 50.0 * (1 - REGRESSION))) for _ in range(PAIRS))
    print(f"{kind}: {alarms} false alarms and {misses} misses in {PAIRS} pairs each")  # noqa: T201 - it is asked for.
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
def test_a_number_is_worse_where_its_unit_says_so(name: str, before: float, after: float, outcome: str) -> None:
    one, other = (record_of(numbers={name: value}, substrate=HARDWARE) for value in (before, after))
    (change,) = compared(one, other).changes
    assert change.outcome == outcome
    assert change.origins == ("records.jsonl:1", "records.jsonl:1")


def test_a_wide_spread_makes_the_band_wide() -> None:
    numbers = {"rate_spread_percent": 40.0, "rounds_count": 15.0}
    one, other = (record_of(numbers={NUMBER: rate, **numbers}, substrate=HARDWARE) for rate in (50.0, 40.0))
    (change,) = compared(one, other).changes
    assert change.outcome == "same"
    assert change.band_percent is not None
    assert change.band_percent > 20


def test_numbers_beyond_all_measure_are_compared_without_an_error() -> None:
    before = [record_of(numbers={"rate_gb_per_s": rate}, substrate=HARDWARE) for rate in (1.7e308, -1.7e308, 5e-324)]
    after = record_of(numbers={"rate_gb_per_s": 1.7e308}, substrate=HARDWARE)
    found = compare(contents(*before), contents(after), noise_percent=5.0)
    (change,) = found.changes
    assert (change.outcome, change.change_percent, change.band_percent) == ("same", 1e9, 1e9)
    assert "Infinity" not in found.to_json()


def test_runs_of_one_side_are_taken_together() -> None:
    before = [record_of(numbers={"rate_gb_per_s": rate}, substrate=HARDWARE) for rate in (50.0, 10.0, 51.0)]
    after = record_of(numbers={"rate_gb_per_s": 49.5}, substrate=HARDWARE)
    (change,) = compare(contents(*before), contents(after), noise_percent=5.0).changes
    assert (change.before, change.outcome) == ("50", "same")


def test_numbers_of_different_substrates_are_not_compared() -> None:
    one = record_of(numbers={"rate_gb_per_s": 50.0}, substrate=HARDWARE)
    (change,) = compared(one, record_of(numbers={"rate_gb_per_s": 1.0}, substrate=TWINS)).changes
    assert change.outcome == "not_comparable"


def test_of_numbers_of_twins_the_change_is_shown_and_no_value() -> None:
    one, other = (record_of(numbers={"rate_gb_per_s": rate}, substrate=TWINS) for rate in (12.345, 6.0))
    found = compared(one, other)
    assert found.is_worse
    assert "-51.4 %" in describe_comparison(found)
    assert "12.3" not in describe_comparison(found) + found.to_json()


def test_a_verdict_and_a_route_that_became_worse_are_found() -> None:
    route = ClaimedRoute(0, "mlx5_0", "dmabuf")
    good = record_of(routes=(route,), substrate=HARDWARE)
    fallen = ClaimedRoute(0, "mlx5_0", "dmabuf", "by the host")
    bad = record_of(Verdict.UNPROVEN, routes=(fallen,), reasons=(CaseReason("not seen"),), substrate=HARDWARE)
    worse = {(it.kind, it.before, it.after) for it in compared(good, bad).changes if it.outcome == "worse"}
    assert worse == {("verdict", "pass", "unproven"), ("route", "proven", "fell_back")}
    assert not compared(bad, good).is_worse
    gone = compare(contents(good), contents(record_of(case="b.py::other")), noise_percent=5.0)
    assert {(it.kind, it.outcome) for it in gone.changes} == {("verdict", "gone"), ("route", "gone")}


def test_a_hostile_name_acts_on_no_terminal() -> None:
    name = "a.py::test\x1b[2J\x9b31m\u202e\ud800[ü]"
    one, other = (record_of(case=name, numbers={"rate_gb_per_s": rate}, substrate=HARDWARE) for rate in (50.0, 40.0))
    found = compared(one, other)
    for text in (found.to_json(), describe_comparison(found)):
        assert [sign for sign in "\x1b\x9b\u202e\ud800" if sign in text] == []
    # What a program reads is the name itself.
    assert json.loads(found.to_json())["changes"][0]["name"].startswith(name)


def gdrkit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdrkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_ends_with_1_where_something_became_worse(tmp_path: Path) -> None:
    facts = host_facts(gpus=1, nics=1)
    before = write_run(tmp_path / "before", facts, list(host_records(facts)))
    after = write_run(tmp_path / "after", facts, list(host_records(facts, factor=0.9)))
    same = gdrkit("compare", before, before)
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "nothing became worse")
    worse = gdrkit("compare", before, after / "records.jsonl", "--json")
    assert worse.returncode == 1, worse.stderr
    names = [it["name"] for it in json.loads(worse.stdout)["changes"] if it["outcome"] == "worse"]
    assert len(names) == 8
    assert gdrkit("compare", before, after, "--noise", "15").returncode == 0
    assert gdrkit("compare", before, tmp_path).returncode == 2
