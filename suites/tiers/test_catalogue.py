"""A catalogue that is lost, damaged, locked or behind: the files are found all the same, and the disks say where."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.tier_world import contents, place_file

from gdrkit.errors import Api, ApiError, Reason
from gdrkit.tiers import Configuration, Finding, Kind, Phase, TierManager
from gdrkit.tiers.heat import heat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def database(configuration: Configuration) -> Path:
    return max(configuration.catalogue.glob("catalogue-*.sqlite"))


def kinds(findings: list[Finding]) -> list[Kind]:
    return sorted((each.kind for each in findings), key=lambda kind: kind.value)


@contextmanager
def locked(configuration: Configuration) -> Iterator[None]:
    """Another process writes, and does not come to an end."""
    with closing(sqlite3.connect(database(configuration), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_a_lost_catalogue_is_made_anew(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        files = {
            tier: place_file(manager, f"folder/{tier}", 1000, seed=1, tier=tier) for tier in ("nvme", "ssd", "hdd")
        }
        manager.pin("folder/ssd", "nvme")
    shutil.rmtree(configuration.catalogue)
    with TierManager(configuration) as manager:
        assert manager.catalogue.was_rebuilt
        assert {tier: manager.find(f"folder/{tier}").tier for tier in files} == {tier: tier for tier in files}
        assert {tier: contents(manager, f"folder/{tier}") for tier in files} == files
        # A pin is somebody's will and stays; heat is forgotten, and nothing moves for that.
        with manager.plan() as plan:
            assert [(each.name, each.destination) for each in plan.moves()] == [("folder/ssd", "nvme")]


def test_a_catalogue_that_is_lost_under_a_manager_is_made_anew(
    manager: TierManager, configuration: Configuration
) -> None:
    data = place_file(manager, "file", 1000, seed=1, tier="nvme")
    shutil.rmtree(configuration.catalogue)
    configuration.catalogue.mkdir()
    assert contents(manager, "file") == data
    assert manager.find("file").tier == "nvme"
    assert not manager.check()


@pytest.mark.parametrize("begin", [0, 20])
def test_a_catalogue_that_is_no_database_is_made_anew(configuration: Configuration, begin: int) -> None:
    with TierManager(configuration) as manager:
        data = place_file(manager, "file", 1000, seed=1, tier="ssd")
    with database(configuration).open("r+b") as file:
        file.seek(begin)
        file.write(b"no database at all " * 10)
    with TierManager(configuration) as manager:
        assert manager.catalogue.was_rebuilt
        assert contents(manager, "file") == data
        assert not manager.check()


def test_an_empty_catalogue_is_made_anew(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        place_file(manager, "file", 1000, seed=1, tier="ssd")
    database(configuration).write_bytes(b"")
    with TierManager(configuration) as manager:
        assert manager.find("file").tier == "ssd"


def test_a_catalogue_from_before_routes_were_kept_is_used_with_all_that_it_has(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        place_file(manager, "file", 1000, seed=1)
        manager.pin("file", "hdd")
    with closing(sqlite3.connect(database(configuration))) as former:
        former.execute("DROP TABLE routes")
    with TierManager(configuration) as manager:
        assert manager.find("file").pinned == "hdd"
        assert all(tier.route.why for tier in manager.status())


def test_damage_inside_is_found_and_mended(configuration: Configuration) -> None:
    files = {f"file-{number}": bytes([number]) * 100 for number in range(200)}
    for name, data in files.items():
        (configuration.tiers[1].directory / name).write_bytes(data)
    TierManager(configuration).close()
    path = database(configuration)
    pages = path.stat().st_size // 4096
    with path.open("r+b") as file:
        # What is read when it is opened is in the first pages, the files in those behind.
        file.seek(4096 * 7)
        file.write(b"\xa5" * 4096 * (pages - 7))
    with TierManager(configuration) as manager:
        assert kinds(manager.check()) == [Kind.DAMAGED]
        assert contents(manager, "file-7") == files["file-7"]
        assert [each.mended for each in manager.check(repair=True) if each.kind is Kind.DAMAGED] == [True]
        assert not manager.check()
        assert {name: contents(manager, name) for name in files} == files


def test_reading_does_not_wait_for_a_locked_catalogue(configuration: Configuration) -> None:
    with TierManager(replace(configuration, timeout_ms=50)) as manager:
        data = place_file(manager, "file", 1000, seed=1, tier="ssd")
        with locked(configuration):
            for _ in range(300):
                assert contents(manager, "file") == data
        # The accesses are not lost: they come when it is free.
        assert manager.find("file").accesses == 301


def test_a_migration_waits_for_a_locked_catalogue_and_then_says_so(configuration: Configuration) -> None:
    with TierManager(replace(configuration, timeout_ms=50)) as manager:
        data = place_file(manager, "file", 1000, seed=1)
        with locked(configuration), pytest.raises(ApiError) as raised:
            manager.move("file", "nvme")
        error = raised.value
        assert (error.api, error.reason, error.status_name) == (Api.SQLITE, Reason.BUSY, "SQLITE_BUSY")
        assert "another process" in error.what_to_do
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)


def test_a_catalogue_that_is_locked_at_the_end_of_a_migration(configuration: Configuration) -> None:
    with TierManager(replace(configuration, timeout_ms=50)) as manager:
        data = place_file(manager, "file", 1000, seed=1)
        other = sqlite3.connect(database(configuration), isolation_level=None)

        def lock(phase: Phase, name: str, offset_bytes: int) -> None:
            if phase is Phase.CATALOGUE:
                other.execute("BEGIN IMMEDIATE")

        with closing(other), pytest.raises(ApiError) as raised:
            manager.move("file", "nvme", observe=lock)
        assert raised.value.reason is Reason.BUSY
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)
        manager.check(repair=True)
        assert not manager.check()


def test_a_clock_that_goes_back_makes_no_file_hotter(configuration: Configuration) -> None:
    day = 86400.0
    now = [1_800_000_000.0]

    def hot(manager: TierManager, name: str) -> float:
        return heat(manager.find(name).score, at=manager.catalogue.now())

    with TierManager(configuration, clock=lambda: now[0]) as manager:
        place_file(manager, "file", 100, seed=1)
        for _ in range(49):
            manager.open("file").close()
        assert hot(manager, "file") == pytest.approx(50)
        now[0] += 7 * day
        assert hot(manager, "file") == pytest.approx(25)
        manager.open("file").close()
        assert hot(manager, "file") == pytest.approx(26)
        now[0] -= 365 * day
        assert hot(manager, "file") == pytest.approx(26)
        manager.open("file").close()
        assert hot(manager, "file") == pytest.approx(27)
    # Nor when it is another process that sees the old time; and from there on files cool as ever.
    with TierManager(configuration, clock=lambda: now[0]) as manager:
        assert hot(manager, "file") == pytest.approx(27)
        now[0] += 7 * day
        assert hot(manager, "file") == pytest.approx(13.5)


def test_another_half_life_leaves_the_heat_as_it_is(configuration: Configuration) -> None:
    now = [1_800_000_000.0]
    with TierManager(configuration, clock=lambda: now[0]) as manager:
        place_file(manager, "file", 100, seed=1)
        for _ in range(15):
            manager.open("file").close()
    with TierManager(replace(configuration, half_life_s=3600.0), clock=lambda: now[0]) as manager:
        assert heat(manager.find("file").score, at=manager.catalogue.now()) == pytest.approx(16)
        now[0] += 3600
        assert heat(manager.find("file").score, at=manager.catalogue.now()) == pytest.approx(8)


def test_one_name_in_two_tiers_is_said_and_nothing_is_removed(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        data = place_file(manager, "file", 1000, seed=1)
        twin = configuration.tiers[0].directory / "file"
        twin.write_bytes(b"somebody else's")
        (found,) = manager.check()
        assert (found.kind, found.tier) == (Kind.TWICE, "hdd")
        assert "nvme" in found.text
        assert contents(manager, "file") == data
        with pytest.raises(ApiError) as raised:
            manager.move("file", "nvme")
        assert raised.value.reason is Reason.CONFLICT
        assert kinds(manager.check(repair=True)) == [Kind.TWICE]
        assert (twin.read_bytes(), contents(manager, "file")) == (b"somebody else's", data)
        # It moves where nothing is in the way.
        manager.move("file", "ssd")
        twin.unlink()
        assert not manager.check()


def test_what_was_done_past_gdrkit_is_learned(manager: TierManager, configuration: Configuration) -> None:
    nvme, ssd, hdd = (tier.directory for tier in configuration.tiers)
    for name in ("moved", "removed", "grown"):
        place_file(manager, name, 1000, seed=1)
    (ssd / "put").write_bytes(b"there")
    (hdd / "moved").rename(nvme / "moved")
    (hdd / "removed").unlink()
    with (hdd / "grown").open("ab") as file:
        file.write(b"more")
    wanted = [Kind.CHANGED, Kind.ELSEWHERE, Kind.MISSING, Kind.UNKNOWN]
    assert kinds(manager.check()) == wanted
    assert kinds(manager.check(repair=True)) == wanted
    assert not manager.check()
    assert (manager.find("moved").tier, manager.find("put").tier) == ("nvme", "ssd")
    assert manager.find("grown").size_bytes == 1004
    with pytest.raises(ApiError) as raised:
        manager.find("removed")
    assert raised.value.errno == 2


def test_a_file_that_was_moved_past_gdrkit_is_migrated_from_where_it_is(
    manager: TierManager, configuration: Configuration
) -> None:
    data = place_file(manager, "file", 1000, seed=1)
    (configuration.tiers[2].directory / "file").rename(configuration.tiers[1].directory / "file")
    manager.move("file", "nvme")
    assert (manager.find("file").tier, contents(manager, "file")) == ("nvme", data)
    assert not manager.check()


def test_totals_are_those_of_the_disks(manager: TierManager, configuration: Configuration) -> None:
    for number in range(10):
        place_file(manager, f"f{number}", 5000 * number, seed=number, tier=("nvme", "ssd", "hdd")[number % 3])
    manager.remove("f4")
    with manager.open("f5", "r+") as file:
        import os

        os.ftruncate(file.fileno(), 3)
    for tier in manager.status():
        files = [path for path in (configuration.tier(tier.name).directory).iterdir() if path.is_file()]
        assert tier.files == len(files)
        assert tier.size_bytes == sum(path.stat().st_size for path in files)
        assert tier.allocated_bytes == sum(path.stat().st_blocks * 512 for path in files)


def test_a_retired_file_that_nobody_knows_is_kept_and_said(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        place_file(manager, "file", 1000, seed=1)
    own = configuration.tiers[2].directory / ".gdrkit-tiers"
    (own / "retired" / "0123").write_bytes(b"the last of its kind")
    with TierManager(configuration) as manager:
        assert kinds(list(manager.found_at_start)) == [Kind.KEPT]
        assert kinds(manager.check()) == [Kind.KEPT]
    assert (own / "kept" / "0123").read_bytes() == b"the last of its kind"
