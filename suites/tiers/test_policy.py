"""Where files belong: thresholds, time, room, pins; decided in one pass, and no file goes for nothing."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.tier_world import configuration_of, place_file

from gdrkit.tiers import Configuration, TierManager
from gdrkit.tiers.heat import NEVER, heat, score_after, score_of
from gdrkit.tiers.policy import Decision, Place, Row, Why, decide
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path

NOW = 2900.0
ROOMY = 1 << 60


def places(*limits: int) -> list[Place]:
    names = zip(("nvme", "ssd", "hdd"), (100, 10, 0), limits or (ROOMY,) * 3, strict=True)
    return [Place(*each) for each in names]


def row(
    accesses: int, tier: str = "hdd", *, size: int = 100, pinned: str | None = None, links: int = 1, n: int = 1
) -> Row:
    return Row(n, tier, size, score_of(accesses, at=NOW), pinned, links)


def decided(*rows: Row, limits: tuple[int, ...] = (), hysteresis: float = 0.1) -> list[Decision]:
    return list(decide(rows, places(*limits), at=NOW, hysteresis=hysteresis))


@pytest.mark.parametrize(
    ("accesses", "tier"),
    [(0, "hdd"), (1, "hdd"), (9, "hdd"), (10, "ssd"), (99, "ssd"), (100, "nvme"), (1_000_000, "nvme")],
)
@pytest.mark.parametrize("here", ["nvme", "ssd", "hdd"])
def test_the_thresholds_of_the_update(accesses: int, tier: str, here: str) -> None:
    found = decided(row(accesses, here), hysteresis=0.0)
    assert [each.destination for each in found] == ([] if here == tier else [tier])


@pytest.mark.parametrize(("accesses", "stays"), [(99, True), (91, True), (90, True), (89, False), (10, False)])
def test_a_file_may_cool_a_little_before_it_leaves(accesses: int, *, stays: bool) -> None:
    assert (decided(row(accesses, "nvme")) == []) == stays


def test_who_is_hotter_gets_the_room() -> None:
    rows = [row(500, n=1), row(400, n=2), row(300, n=3)]
    found = decided(*rows, limits=(250, 100, ROOMY))
    assert [(each.id, each.destination, each.why) for each in found] == [
        (1, "nvme", Why.HEAT),
        (2, "nvme", Why.HEAT),
        (3, "ssd", Why.ROOM),
    ]


def test_a_hotter_file_takes_the_place_of_one_that_is_there() -> None:
    found = decided(row(500, n=1), row(200, "nvme", n=2), limits=(100, ROOMY, ROOMY))
    assert [(each.id, each.destination) for each in found] == [(1, "nvme"), (2, "ssd")]


def test_where_no_tier_has_room_a_file_stays() -> None:
    assert decided(row(500, "hdd"), limits=(10, 10, 10)) == []


def test_a_pinned_file_has_its_room_first() -> None:
    found = decided(row(0, "nvme", pinned="nvme", n=1), row(500, n=2), limits=(100, ROOMY, ROOMY))
    assert [(each.id, each.destination) for each in found] == [(2, "ssd")]


def test_a_pinned_file_goes_where_it_is_pinned() -> None:
    (found,) = decided(row(500, "hdd", pinned="ssd"))
    assert (found.destination, found.why) == ("ssd", Why.PINNED)


def test_a_file_with_other_names_is_left_alone() -> None:
    assert decided(row(500, links=2)) == []


def test_a_tier_that_is_no_longer_configured_is_left_alone() -> None:
    assert decided(row(500, "tape")) == []


def test_heat_halves_with_every_half_life() -> None:
    score = score_of(100, at=NOW)
    assert [round(heat(score, at=NOW + lives), 6) for lives in range(4)] == [100, 50, 25, 12.5]
    assert heat(NEVER, at=NOW) == 0


def test_a_hundred_accesses_are_a_hundred() -> None:
    score = NEVER
    for number in range(100):
        score = score_after(score, accesses=1, at=NOW + number * 1e-5)
    assert heat(score, at=NOW + 1e-3) == pytest.approx(100, rel=1e-3)
    assert math.isfinite(score_after(score, accesses=1, at=NOW + 1e6))
    assert score_after(1e9, accesses=1, at=NOW) == 1e9


def test_files_go_up_and_down_by_their_use(configuration: Configuration) -> None:
    now = [1_800_000_000.0]
    with TierManager(configuration, clock=lambda: now[0]) as manager:
        for name, accesses in (("hot", 100), ("warm", 10), ("cold", 9)):
            place_file(manager, name, 1000, seed=1)
            for _ in range(accesses - 1):
                manager.open(name).close()
        done = manager.migrate()
        assert (done.moved, done.refused, done.considered) == (2, (), 3)
        where = {name: manager.find(name).tier for name in ("hot", "warm", "cold")}
        assert where == {"hot": "nvme", "warm": "ssd", "cold": "hdd"}
        assert manager.migrate().moved == 0
        # Two half-lives: 25 accesses' worth, and 2.5.
        now[0] += 2 * configuration.half_life_s
        assert manager.migrate().moved == 2
        where = {name: manager.find(name).tier for name in ("hot", "warm", "cold")}
        assert where == {"hot": "ssd", "warm": "hdd", "cold": "hdd"}


def test_a_dry_run_moves_nothing(manager: TierManager) -> None:
    place_file(manager, "file", 1000, seed=1)
    for _ in range(99):
        manager.open("file").close()
    with manager.plan() as plan:
        assert [(each.name, each.source, each.destination) for each in plan.moves()] == [("file", "hdd", "nvme")]
    assert manager.find("file").tier == "hdd"


def test_full_tiers_are_emptied_before_they_are_filled(tmp_path: Path) -> None:
    made = configuration_of(tmp_path, headroom=0.0)
    tiers = (
        replace(made.tiers[0], capacity_bytes=64 * KIB),
        replace(made.tiers[1], capacity_bytes=64 * KIB),
        made.tiers[2],
    )
    with TierManager(replace(made, tiers=tiers)) as manager:
        place_file(manager, "was hot", 64 * KIB, seed=1, tier="nvme")
        place_file(manager, "was warm", 64 * KIB, seed=2, tier="ssd")
        place_file(manager, "is hot", 64 * KIB, seed=3)
        for name, accesses in (("is hot", 200), ("was hot", 20)):
            for _ in range(accesses):
                manager.open(name).close()
        assert manager.migrate().refused == ()
        where = {name: manager.find(name).tier for name in ("was hot", "was warm", "is hot")}
        assert where == {"was hot": "ssd", "was warm": "hdd", "is hot": "nvme"}


def test_pins_hold_against_the_policy(manager: TierManager) -> None:
    place_file(manager, "file", 1000, seed=1)
    assert manager.pin("file", "nvme") == "nvme"
    assert manager.migrate().moved == 1
    assert manager.migrate().moved == 0
    assert manager.find("file").tier == "nvme"
    manager.unpin("file")
    assert manager.migrate().moved == 1
    assert manager.find("file").tier == "hdd"


def test_a_file_that_cannot_move_keeps_no_other_from_moving(manager: TierManager) -> None:
    for name in ("first", "second"):
        place_file(manager, name, 1000, seed=1)
        manager.pin(name, "nvme")
    with manager.open("first", "r+"):
        done = manager.migrate()
    assert (done.moved, [each.name for each in done.refused]) == (1, ["first"])
    assert manager.migrate().moved == 1


def test_a_new_file_goes_where_new_files_should(tmp_path: Path) -> None:
    made = configuration_of(tmp_path, landing="ssd")
    with TierManager(made) as manager:
        place_file(manager, "file", 100, seed=1)
        assert manager.find("file").tier == "ssd"
    # Not where there is no room.
    full = (made.tiers[0], replace(made.tiers[1], capacity_bytes=0), made.tiers[2])
    with TierManager(replace(made, tiers=full)) as manager:
        with manager.open("other", "a+") as file:
            os.pwrite(file.fileno(), b"x", 0)
        assert manager.find("other").tier == "hdd"
