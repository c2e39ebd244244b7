"""`gdrkit compare` finds regressions, and does not report noise as a regression."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.hosts import HARDWARE_SUBSTRATES, make_host_facts, make_host_records, write_run
from support.records import make_facts, make_proven_route, make_record, make_run

from gdrkit.report import CaseReason, ClaimedRoute, Verdict
from gdrkit.report.compare import Comparison, compare, describe_comparison
from gdrkit.report.contents import RunContents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.report import Record

TWIN_SUBSTRATE = {"verbs": "twin", "cuda": "twin"}
PAIR_COUNT, ROUND_COUNT, RELATIVE_NOISE, RELATIVE_REGRESSION = 1000, 15, 0.03, 0.10
RATE_NAME = "rate_gb_per_s_median"


def make_contents(*records: Record) -> RunContents:
    return RunContents(
        make_run(),
        make_facts(),
        records,
        tuple(f"records.jsonl:{line_number}" for line_number in range(1, len(records) + 1)),
    )


def compare_records(before: Record, after: Record) -> Comparison:
    return compare(make_contents(before), make_contents(after), noise_percent=5.0)


def make_measured_record(draw_noise_factor: Callable[[], float], rate: float) -> Record:
    """Return a record with the median and the spread of several rounds. Each rate has a random noise factor."""
    round_rates = sorted(rate * draw_noise_factor() for _ in range(ROUND_COUNT))
    lower_quartile, median, upper_quartile = statistics.quantiles(round_rates, n=4)
    numbers = {
        RATE_NAME: median,
        "rate_spread_percent": (upper_quartile - lower_quartile) / median * 100,
        "rounds_count": ROUND_COUNT,
    }
    return make_record(numbers=numbers, substrate=HARDWARE_SUBSTRATES)


def make_single_number_record(draw_noise_factor: Callable[[], float], rate: float) -> Record:
    """Return a record with one number and no spread. The number has one random noise factor."""
    return make_record(numbers={"rate_gb_per_s": rate * draw_noise_factor()}, substrate=HARDWARE_SUBSTRATES)


def is_worse(before: Record, after: Record) -> bool:
    return compare_records(before, after).is_worse


@pytest.mark.parametrize(
    ("name", "make_noisy_record", "false_alarms_max", "misses_max"),
    [("15 rounds", make_measured_record, 5, 5), ("one number", make_single_number_record, 30, 30)],
)
def test_regression_of_10_percent_exceeds_noise_of_3_percent(
    name: str,
    make_noisy_record: Callable[[Callable[[], float], float], Record],
    false_alarms_max: int,
    misses_max: int,
) -> None:
    rng = random.Random(20261121)

    def draw_noise_factor() -> float:
        return (
            rng.gauss(1.0, RELATIVE_NOISE)
            if make_noisy_record is make_measured_record
            else rng.uniform(1 - RELATIVE_NOISE, 1 + RELATIVE_NOISE)
        )

    false_alarm_count = sum(
        is_worse(make_noisy_record(draw_noise_factor, 50.0), make_noisy_record(draw_noise_factor, 50.0))
        for _ in range(PAIR_COUNT)
    )
    miss_count = sum(
        not is_worse(
            make_noisy_record(draw_noise_factor, 50.0),
            make_noisy_record(draw_noise_factor, 50.0 * (1 - RELATIVE_REGRESSION)),
        )
        for _ in range(PAIR_COUNT)
    )
    print(f"{name}: {false_alarm_count} false alarms and {miss_count} misses in {PAIR_COUNT} pairs each")  # noqa: T201 - for the reader of the log.
    assert false_alarm_count <= false_alarms_max
    assert miss_count <= misses_max


@pytest.mark.parametrize(
    ("number_name", "before", "after", "outcome"),
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
def test_direction_of_a_change_follows_from_the_unit(
    number_name: str, before: float, after: float, outcome: str
) -> None:
    earlier_record, later_record = (
        make_record(numbers={number_name: value}, substrate=HARDWARE_SUBSTRATES) for value in (before, after)
    )
    (change,) = compare_records(earlier_record, later_record).changes
    assert change.outcome == outcome
    assert change.origins == ("records.jsonl:1", "records.jsonl:1")


def test_noise_band_widens_with_the_spread() -> None:
    numbers = {"rate_spread_percent": 40.0, "rounds_count": 15.0}
    earlier_record, later_record = (
        make_record(numbers={RATE_NAME: rate, **numbers}, substrate=HARDWARE_SUBSTRATES) for rate in (50.0, 40.0)
    )
    (change,) = compare_records(earlier_record, later_record).changes
    assert change.outcome == "same"
    assert change.band_percent is not None
    assert change.band_percent > 20


def test_extreme_numbers_are_compared_without_an_error() -> None:
    # The differences and ratios of these numbers exceed the range of a float.
    before = [
        make_record(numbers={"rate_gb_per_s": rate}, substrate=HARDWARE_SUBSTRATES)
        for rate in (1.7e308, -1.7e308, 5e-324)
    ]
    after = make_record(numbers={"rate_gb_per_s": 1.7e308}, substrate=HARDWARE_SUBSTRATES)
    comparison = compare(make_contents(*before), make_contents(after), noise_percent=5.0)
    (change,) = comparison.changes
    assert (change.outcome, change.change_percent, change.band_percent) == ("same", 1e9, 1e9)
    assert "Infinity" not in comparison.to_json()


def test_records_of_one_side_are_combined() -> None:
    before = [
        make_record(numbers={"rate_gb_per_s": rate}, substrate=HARDWARE_SUBSTRATES) for rate in (50.0, 10.0, 51.0)
    ]
    after = make_record(numbers={"rate_gb_per_s": 49.5}, substrate=HARDWARE_SUBSTRATES)
    (change,) = compare(make_contents(*before), make_contents(after), noise_percent=5.0).changes
    assert (change.before, change.outcome) == ("50", "same")


def test_numbers_of_different_substrates_are_not_compared() -> None:
    hardware_record = make_record(numbers={"rate_gb_per_s": 50.0}, substrate=HARDWARE_SUBSTRATES)
    (change,) = compare_records(
        hardware_record, make_record(numbers={"rate_gb_per_s": 1.0}, substrate=TWIN_SUBSTRATE)
    ).changes
    assert change.outcome == "not_comparable"


def test_numbers_of_twins_have_a_change_and_no_value() -> None:
    earlier_record, later_record = (
        make_record(numbers={"rate_gb_per_s": rate}, substrate=TWIN_SUBSTRATE) for rate in (12.345, 6.0)
    )
    comparison = compare_records(earlier_record, later_record)
    assert comparison.is_worse
    assert "-51.4 %" in describe_comparison(comparison)
    assert "12.3" not in describe_comparison(comparison) + comparison.to_json()


def test_worse_verdicts_and_routes_are_found() -> None:
    route = make_proven_route(0, "mlx5_0")
    good_record = make_record(routes=(route,), substrate=HARDWARE_SUBSTRATES)
    fallback_route = ClaimedRoute(0, "mlx5_0", "dmabuf", "by the host")
    bad_record = make_record(
        Verdict.UNPROVEN, routes=(fallback_route,), reasons=(CaseReason("not seen"),), substrate=HARDWARE_SUBSTRATES
    )
    changes = compare_records(good_record, bad_record).changes
    worse_changes = {(change.kind, change.before, change.after) for change in changes if change.outcome == "worse"}
    assert worse_changes == {("verdict", "pass", "unproven"), ("route", "proven", "fell_back")}
    assert not compare_records(bad_record, good_record).is_worse
    comparison = compare(make_contents(good_record), make_contents(make_record(case="b.py::other")), noise_percent=5.0)
    assert {(change.kind, change.outcome) for change in comparison.changes} == {("verdict", "gone"), ("route", "gone")}


def test_hostile_name_is_escaped() -> None:
    name = "a.py::test\x1b[2J\x9b31m\u202e\ud800[ü]"
    earlier_record, later_record = (
        make_record(case=name, numbers={"rate_gb_per_s": rate}, substrate=HARDWARE_SUBSTRATES) for rate in (50.0, 40.0)
    )
    comparison = compare_records(earlier_record, later_record)
    for text in (comparison.to_json(), describe_comparison(comparison)):
        assert [character for character in "\x1b\x9b\u202e\ud800" if character in text] == []
    # A JSON parser returns the original name.
    assert json.loads(comparison.to_json())["changes"][0]["name"].startswith(name)


def run_gdrkit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdrkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_exit_code_is_1_if_something_became_worse(tmp_path: Path) -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    folder_before = write_run(tmp_path / "before", facts, list(make_host_records(facts)))
    folder_after = write_run(tmp_path / "after", facts, list(make_host_records(facts, rate_factor=0.9)))
    equal_comparison = run_gdrkit("compare", folder_before, folder_before)
    assert (equal_comparison.returncode, equal_comparison.stdout.splitlines()[-1]) == (0, "nothing became worse")
    worse_comparison = run_gdrkit("compare", folder_before, folder_after / "records.jsonl", "--json")
    assert worse_comparison.returncode == 1, worse_comparison.stderr
    changes = json.loads(worse_comparison.stdout)["changes"]
    worse_names = [change["name"] for change in changes if change["outcome"] == "worse"]
    # make_host_records() multiplies 8 rates by `rate_factor`.
    assert len(worse_names) == 8
    assert run_gdrkit("compare", folder_before, folder_after, "--noise", "15").returncode == 0
    assert run_gdrkit("compare", folder_before, tmp_path).returncode == 2
