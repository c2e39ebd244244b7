"""The policy places files by their heat, by the space of the tiers and by pins, and moves no file without a reason."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.tier_world import create_file, make_configuration, read_contents

from gdrkit.errors import ApiError
from gdrkit.serialization import to_json_data
from gdrkit.tiers import Configuration, TierManager
from gdrkit.tiers.heat import NEVER_ACCESSED, add_accesses_to_score, heat, least_score, score_from_heat
from gdrkit.tiers.policy import Decision, FileRow, MoveReason, TierLimits, decide
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path

# Current time in all cases of the function `decide`, in half-lives since 1970.
NOW_HALF_LIVES = 2900.0
# Limit of a tier that no case reaches.
UNLIMITED_BYTES = 1 << 60


def make_tier_limits(*limits_bytes: int) -> list[TierLimits]:
    """Return the tiers nvme, ssd and hdd with the default thresholds and these limits, by default UNLIMITED_BYTES."""
    tier_fields = zip(("nvme", "ssd", "hdd"), (100, 10, 0), limits_bytes or (UNLIMITED_BYTES,) * 3, strict=True)
    return [TierLimits(*fields) for fields in tier_fields]


def make_file_row(
    accesses: int,
    tier: str = "hdd",
    *,
    size_bytes: int = 100,
    pinned: str | None = None,
    links: int = 1,
    file_id: int = 1,
) -> FileRow:
    """Return the row of a file whose heat at NOW_HALF_LIVES is the heat of `accesses` new accesses."""
    return FileRow(file_id, tier, size_bytes, score_from_heat(accesses, at_half_lives=NOW_HALF_LIVES), pinned, links)


def get_decisions(*rows: FileRow, limits_bytes: tuple[int, ...] = (), hysteresis: float = 0.1) -> list[Decision]:
    """Return the decisions of the policy about these files. `limits_bytes` has one limit for each tier."""
    return list(decide(rows, make_tier_limits(*limits_bytes), now_half_lives=NOW_HALF_LIVES, hysteresis=hysteresis))


@pytest.mark.parametrize(
    ("accesses", "expected_tier"),
    [(0, "hdd"), (1, "hdd"), (9, "hdd"), (10, "ssd"), (99, "ssd"), (100, "nvme"), (1_000_000, "nvme")],
)
@pytest.mark.parametrize("current_tier", ["nvme", "ssd", "hdd"])
def test_default_thresholds_select_the_tier(accesses: int, expected_tier: str, current_tier: str) -> None:
    decisions = get_decisions(make_file_row(accesses, current_tier), hysteresis=0.0)
    assert [decision.destination for decision in decisions] == (
        [] if current_tier == expected_tier else [expected_tier]
    )


# With a hysteresis of 0.1, a file stays in nvme (threshold 100) while its heat is at least 90.
@pytest.mark.parametrize(("accesses", "is_kept"), [(99, True), (91, True), (90, True), (89, False), (10, False)])
def test_file_stays_within_the_hysteresis(accesses: int, *, is_kept: bool) -> None:
    assert (get_decisions(make_file_row(accesses, "nvme")) == []) == is_kept


def test_hotter_files_get_the_space() -> None:
    rows = [make_file_row(500, file_id=1), make_file_row(400, file_id=2), make_file_row(300, file_id=3)]
    decisions = get_decisions(*rows, limits_bytes=(250, 100, UNLIMITED_BYTES))
    assert [(decision.id, decision.destination, decision.why) for decision in decisions] == [
        (1, "nvme", MoveReason.HEAT),
        (2, "nvme", MoveReason.HEAT),
        (3, "ssd", MoveReason.NO_SPACE),
    ]


def test_hotter_file_displaces_a_colder_one() -> None:
    decisions = get_decisions(
        make_file_row(500, file_id=1),
        make_file_row(200, "nvme", file_id=2),
        limits_bytes=(100, UNLIMITED_BYTES, UNLIMITED_BYTES),
    )
    assert [(decision.id, decision.destination) for decision in decisions] == [(1, "nvme"), (2, "ssd")]


def test_file_stays_if_no_tier_has_space() -> None:
    assert get_decisions(make_file_row(500, "hdd"), limits_bytes=(10, 10, 10)) == []


def test_pinned_file_gets_its_space_first() -> None:
    decisions = get_decisions(
        make_file_row(0, "nvme", pinned="nvme", file_id=1),
        make_file_row(500, file_id=2),
        limits_bytes=(100, UNLIMITED_BYTES, UNLIMITED_BYTES),
    )
    assert [(decision.id, decision.destination) for decision in decisions] == [(2, "ssd")]


def test_pinned_file_moves_to_its_tier() -> None:
    (decision,) = get_decisions(make_file_row(500, "hdd", pinned="ssd"))
    assert (decision.destination, decision.why) == ("ssd", MoveReason.PINNED)


# The fields of a Decision are: file id, allocated bytes, destination, tiers down (negative: up), and reason.
@pytest.mark.parametrize(
    ("free_bytes", "expected_decisions"), [(99, []), (100, [Decision(1, 100, "ssd", -1, MoveReason.PINNED)])]
)
def test_pin_needs_space_in_its_tier(free_bytes: int, expected_decisions: list[Decision]) -> None:
    assert (
        get_decisions(make_file_row(500, pinned="ssd"), limits_bytes=(UNLIMITED_BYTES, free_bytes, UNLIMITED_BYTES))
        == expected_decisions
    )


def test_pin_to_an_unknown_tier_keeps_the_file() -> None:
    assert get_decisions(make_file_row(500, "ssd", pinned="tape")) == []


def test_hard_links_keep_a_file_and_its_space() -> None:
    linked_file = make_file_row(500, "nvme", size_bytes=60, links=2, file_id=1)
    decisions = get_decisions(
        linked_file,
        make_file_row(400, size_bytes=40, file_id=2),
        make_file_row(300, size_bytes=1, file_id=3),
        limits_bytes=(100, UNLIMITED_BYTES, UNLIMITED_BYTES),
    )
    assert decisions == [Decision(2, 40, "nvme", -2, MoveReason.HEAT), Decision(3, 1, "ssd", -1, MoveReason.NO_SPACE)]


def test_unknown_tier_keeps_its_files_alone() -> None:
    assert get_decisions(make_file_row(500, "tape", file_id=1), make_file_row(0, "nvme", file_id=2)) == [
        Decision(2, 100, "hdd", 2, MoveReason.HEAT)
    ]


def test_decision_has_every_field() -> None:
    rows = [
        make_file_row(0, "hdd", pinned="nvme", size_bytes=1, file_id=1),
        make_file_row(500, "ssd", size_bytes=2, file_id=2),
        make_file_row(20, "nvme", size_bytes=3, file_id=3),
    ]
    assert get_decisions(*rows) == [
        Decision(1, 1, "nvme", -2, MoveReason.PINNED),
        Decision(2, 2, "nvme", -1, MoveReason.HEAT),
        Decision(3, 3, "ssd", 1, MoveReason.HEAT),
    ]


@pytest.mark.parametrize("tier", ["nvme", "ssd"])
def test_file_colder_than_every_tier_goes_to_the_last(tier: str) -> None:
    tiers_with_positive_thresholds = [
        TierLimits("nvme", 100, UNLIMITED_BYTES),
        TierLimits("ssd", 20, UNLIMITED_BYTES),
        TierLimits("hdd", 10, UNLIMITED_BYTES),
    ]
    decisions = list(
        decide([make_file_row(0, tier)], tiers_with_positive_thresholds, now_half_lives=NOW_HALF_LIVES, hysteresis=0.1)
    )
    assert [decision.destination for decision in decisions] == ["hdd"]


def test_least_score_of_a_tier_is_enough() -> None:
    # The fields of a FileRow are: file id, tier, allocated bytes, score, pinned tier, and number of links.
    lowest_score_to_enter = least_score(100, at_half_lives=NOW_HALF_LIVES)
    for score, tier in ((lowest_score_to_enter, "nvme"), (math.nextafter(lowest_score_to_enter, 0), "ssd")):
        assert [decision.destination for decision in get_decisions(FileRow(1, "hdd", 100, score, None, 1))] == [tier]
    lowest_score_to_stay = least_score(100, at_half_lives=NOW_HALF_LIVES, threshold_factor=0.9)
    for score, destinations in ((lowest_score_to_stay, []), (math.nextafter(lowest_score_to_stay, 0), ["ssd"])):
        assert [
            decision.destination for decision in get_decisions(FileRow(1, "nvme", 100, score, None, 1))
        ] == destinations


@pytest.mark.parametrize(("free_bytes", "expected_tier"), [(100, "nvme"), (99, "ssd")])
def test_file_that_just_fits_gets_the_space(free_bytes: int, expected_tier: str) -> None:
    assert [
        decision.destination
        for decision in get_decisions(make_file_row(500), limits_bytes=(free_bytes, UNLIMITED_BYTES, UNLIMITED_BYTES))
    ] == [expected_tier]


def test_file_that_stays_keeps_its_space() -> None:
    decisions = get_decisions(
        make_file_row(500, "nvme", size_bytes=60, file_id=1),
        make_file_row(400, size_bytes=50, file_id=2),
        limits_bytes=(100, UNLIMITED_BYTES, UNLIMITED_BYTES),
    )
    assert [(decision.id, decision.destination) for decision in decisions] == [(2, "ssd")]


def test_heat_halves_with_every_half_life() -> None:
    score = score_from_heat(100, at_half_lives=NOW_HALF_LIVES)
    assert [round(heat(score, at_half_lives=NOW_HALF_LIVES + half_lives), 6) for half_lives in range(4)] == [
        100,
        50,
        25,
        12.5,
    ]
    assert heat(NEVER_ACCESSED, at_half_lives=NOW_HALF_LIVES) == 0


def test_hundred_accesses_are_a_heat_of_100() -> None:
    score = NEVER_ACCESSED
    for index in range(100):
        score = add_accesses_to_score(score, access_count=1, at_half_lives=NOW_HALF_LIVES + index * 1e-5)
    assert heat(score, at_half_lives=NOW_HALF_LIVES + 1e-3) == pytest.approx(100, rel=1e-3)
    # A score that is far below or far above the time causes no overflow.
    assert math.isfinite(add_accesses_to_score(score, access_count=1, at_half_lives=NOW_HALF_LIVES + 1e6))
    assert add_accesses_to_score(1e9, access_count=1, at_half_lives=NOW_HALF_LIVES) == 1e9


def test_files_move_up_and_down_by_their_use(configuration: Configuration) -> None:
    now_s = [1_800_000_000.0]
    with TierManager(configuration, clock=lambda: now_s[0]) as manager:
        # The creation of a file is its first access.
        for name, accesses in (("hot", 100), ("warm", 10), ("cold", 9)):
            create_file(manager, name, 1000, seed=1)
            for _ in range(accesses - 1):
                manager.open(name).close()
        result = manager.migrate()
        assert (result.moved, result.refused, result.considered) == (2, (), 3)
        tiers = {name: manager.find(name).tier for name in ("hot", "warm", "cold")}
        assert tiers == {"hot": "nvme", "warm": "ssd", "cold": "hdd"}
        assert manager.migrate().moved == 0
        # After two half-lives, the heat of `hot` is 25, and the heat of `warm` 2.5.
        now_s[0] += 2 * configuration.half_life_s
        assert manager.migrate().moved == 2
        tiers = {name: manager.find(name).tier for name in ("hot", "warm", "cold")}
        assert tiers == {"hot": "ssd", "warm": "hdd", "cold": "hdd"}


def test_plan_moves_nothing(manager: TierManager) -> None:
    create_file(manager, "file", 1000, seed=1)
    for _ in range(99):
        manager.open("file").close()
    with manager.plan() as plan:
        assert [(move.name, move.source, move.destination) for move in plan.moves()] == [("file", "hdd", "nvme")]
    assert manager.find("file").tier == "hdd"


def test_plan_names_the_reason_of_each_move(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path, headroom=0.0)
    limited_tiers = (replace(configuration.tiers[0], capacity_bytes=KIB), *configuration.tiers[1:])
    with TierManager(replace(configuration, tiers=limited_tiers)) as manager:
        for name, size_bytes, accesses in (("warm", 4 * KIB, 20), ("hot", 4 * KIB, 200), ("pinned", 8 * KIB, 1)):
            create_file(manager, name, size_bytes, seed=1)
            for _ in range(accesses):
                manager.open(name).close()
        manager.pin("pinned", "ssd")
        with manager.plan() as plan:
            moves = sorted(map(str, map(to_json_data, plan.moves())))
    # The JSON value of MoveReason.NO_SPACE is "room".
    expected_moves = [("hot", 4 * KIB, "room"), ("pinned", 8 * KIB, "pinned"), ("warm", 4 * KIB, "heat")]
    assert moves == [
        str({"name": name, "source": "hdd", "destination": "ssd", "allocated_bytes": size_bytes, "why": why})
        for name, size_bytes, why in expected_moves
    ]


def test_moves_down_come_before_moves_up(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path, headroom=0.0)
    limited_tiers = (
        replace(configuration.tiers[0], capacity_bytes=64 * KIB),
        replace(configuration.tiers[1], capacity_bytes=64 * KIB),
        configuration.tiers[2],
    )
    with TierManager(replace(configuration, tiers=limited_tiers)) as manager:
        create_file(manager, "was hot", 64 * KIB, seed=1, tier="nvme")
        create_file(manager, "was warm", 64 * KIB, seed=2, tier="ssd")
        create_file(manager, "is hot", 64 * KIB, seed=3)
        for name, accesses in (("is hot", 200), ("was hot", 20)):
            for _ in range(accesses):
                manager.open(name).close()
        assert manager.migrate().refused == ()
        tiers = {name: manager.find(name).tier for name in ("was hot", "was warm", "is hot")}
        assert tiers == {"was hot": "ssd", "was warm": "hdd", "is hot": "nvme"}


def test_auto_tier_moves_one_file_by_its_heat(configuration: Configuration) -> None:
    now_s = [1_800_000_000.0]
    with TierManager(configuration, clock=lambda: now_s[0]) as manager:
        for name in ("hot_file.dat", "other"):
            create_file(manager, name, 1000, seed=1)
        for _ in range(99):
            manager.open("hot_file.dat").close()
            manager.open("other").close()
        assert manager.auto_tier("hot_file.dat") == "nvme"
        assert (manager.find("hot_file.dat").tier, manager.find("other").tier) == ("nvme", "hdd")
        assert manager.auto_tier("hot_file.dat") == "nvme"
        now_s[0] += 2 * configuration.half_life_s
        assert (manager.auto_tier("hot_file.dat"), manager.find("hot_file.dat").tier) == ("ssd", "ssd")
        manager.pin("hot_file.dat", "hdd")
        assert manager.auto_tier("hot_file.dat") == "hdd"
        with pytest.raises(FileNotFoundError):
            manager.auto_tier("nothing")


@pytest.mark.parametrize(("spare_bytes", "expected_tier"), [(0, "nvme"), (-1, "ssd")])
def test_auto_tier_uses_only_free_space(tmp_path: Path, spare_bytes: int, expected_tier: str) -> None:
    configuration = make_configuration(tmp_path, headroom=0.0)
    limited_tiers = (replace(configuration.tiers[0], capacity_bytes=12 * KIB + spare_bytes), *configuration.tiers[1:])
    with TierManager(replace(configuration, tiers=limited_tiers)) as manager:
        create_file(manager, "cold", 4 * KIB, seed=1, tier="nvme")
        data = create_file(manager, "hot", 8 * KIB, seed=2)
        for _ in range(99):
            manager.open("hot").close()
        # The second call leaves the file in its tier, although the tier has no space for a second file of this size.
        assert [manager.auto_tier("hot") for _ in range(2)] == [expected_tier, expected_tier]
        assert (manager.find("cold").tier, read_contents(manager, "hot")) == ("nvme", data)


def test_auto_tier_of_a_file_in_use_names_the_reason(manager: TierManager) -> None:
    create_file(manager, "file", 1000, seed=1)
    manager.pin("file", "ssd")
    with manager.open("file", "r+"), pytest.raises(ApiError, match="another process migrates or writes"):
        manager.auto_tier("file")
    assert manager.auto_tier("file") == "ssd"


def test_pin_overrides_the_policy(manager: TierManager) -> None:
    create_file(manager, "file", 1000, seed=1)
    assert manager.pin("file", "nvme") == "nvme"
    assert manager.migrate().moved == 1
    assert manager.migrate().moved == 0
    assert manager.find("file").tier == "nvme"
    manager.unpin("file")
    assert manager.migrate().moved == 1
    assert manager.find("file").tier == "hdd"


def test_file_that_cannot_move_does_not_stop_the_others(manager: TierManager) -> None:
    for name in ("first", "second"):
        create_file(manager, name, 1000, seed=1)
        manager.pin(name, "nvme")
    with manager.open("first", "r+"):
        result = manager.migrate()
    assert (result.moved, [move.name for move in result.refused]) == (1, ["first"])
    assert manager.migrate().moved == 1


def test_new_file_is_created_in_the_landing_tier(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path, landing="ssd")
    with TierManager(configuration) as manager:
        create_file(manager, "file", 100, seed=1)
        assert manager.find("file").tier == "ssd"
    # If the landing tier is full, a new file is created in the next slower tier.
    nvme, ssd, hdd = configuration.tiers
    tiers_with_full_ssd = (nvme, replace(ssd, capacity_bytes=0), hdd)
    with TierManager(replace(configuration, tiers=tiers_with_full_ssd)) as manager:
        with manager.open("other", "a+") as file:
            os.pwrite(file.fileno(), b"x", 0)
        assert manager.find("other").tier == "hdd"
