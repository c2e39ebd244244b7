"""gdrkit finds files by the folders of the tiers if the catalogue is lost, damaged, locked or outdated."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.tier_world import create_file, read_contents

from gdrkit.errors import Api, ApiError, Reason
from gdrkit.tiers import Configuration, FindingKind, Phase, TierFinding, TierManager
from gdrkit.tiers.accesses import AccessCounter
from gdrkit.tiers.heat import heat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATABASE_PAGE_BYTES = 4096


def find_database(configuration: Configuration) -> Path:
    """Return the current database file of the catalogue: the file with the largest number in its name."""
    return max(configuration.catalogue.glob("catalogue-*.sqlite"))


def list_finding_kinds(findings: list[TierFinding]) -> list[FindingKind]:
    return sorted((finding.kind for finding in findings), key=lambda kind: kind.value)


@contextmanager
def lock_catalogue(configuration: Configuration) -> Iterator[None]:
    """Lock the catalogue during the block, like another process that is in a long write transaction."""
    with closing(sqlite3.connect(find_database(configuration), isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def test_lost_catalogue_is_rebuilt(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        data_by_tier = {
            tier: create_file(manager, f"folder/{tier}", 1000, seed=1, tier=tier) for tier in ("nvme", "ssd", "hdd")
        }
        manager.pin("folder/ssd", "nvme")
    shutil.rmtree(configuration.catalogue)
    with TierManager(configuration) as manager:
        assert manager.catalogue.was_rebuilt
        assert {tier: manager.find(f"folder/{tier}").tier for tier in data_by_tier} == {
            tier: tier for tier in data_by_tier
        }
        assert {tier: read_contents(manager, f"folder/{tier}") for tier in data_by_tier} == data_by_tier
        # A pin is also stored in the tier, so it is not lost. The heat of the files is lost, which moves no file.
        with manager.plan() as plan:
            assert [(move.name, move.destination) for move in plan.moves()] == [("folder/ssd", "nvme")]


@pytest.mark.parametrize("removed_by", ["gdrkit", "another_program"])
def test_pin_of_a_removed_file_is_not_kept(configuration: Configuration, removed_by: str) -> None:
    with TierManager(configuration) as manager:
        create_file(manager, "file", 1000, seed=1, tier="ssd")
        manager.pin("file", "nvme")
        if removed_by == "gdrkit":
            manager.remove("file")
        else:
            (configuration.tier("ssd").directory / "file").unlink()
            manager.check(repair=True)
        create_file(manager, "file", 1000, seed=2, tier="ssd")
    shutil.rmtree(configuration.catalogue)
    with TierManager(configuration) as manager:
        assert manager.find("file").pinned is None


def test_catalogue_lost_under_a_manager_is_rebuilt(manager: TierManager, configuration: Configuration) -> None:
    data = create_file(manager, "file", 1000, seed=1, tier="nvme")
    shutil.rmtree(configuration.catalogue)
    configuration.catalogue.mkdir()
    assert read_contents(manager, "file") == data
    assert manager.find("file").tier == "nvme"
    assert not manager.check()


@pytest.mark.parametrize("offset_bytes", [0, 20])
def test_catalogue_that_is_not_a_database_is_rebuilt(configuration: Configuration, offset_bytes: int) -> None:
    with TierManager(configuration) as manager:
        data = create_file(manager, "file", 1000, seed=1, tier="ssd")
    with find_database(configuration).open("r+b") as file:
        file.seek(offset_bytes)
        file.write(b"no database at all " * 10)
    with TierManager(configuration) as manager:
        assert manager.catalogue.was_rebuilt
        assert read_contents(manager, "file") == data
        assert not manager.check()


def test_empty_catalogue_is_rebuilt(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        create_file(manager, "file", 1000, seed=1, tier="ssd")
    find_database(configuration).write_bytes(b"")
    with TierManager(configuration) as manager:
        assert manager.find("file").tier == "ssd"


def test_catalogue_without_a_routes_table_is_used(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        create_file(manager, "file", 1000, seed=1)
        manager.pin("file", "hdd")
    # A catalogue of an earlier version of gdrkit has no table `routes`.
    with closing(sqlite3.connect(find_database(configuration))) as connection:
        connection.execute("DROP TABLE routes")
    with TierManager(configuration) as manager:
        assert manager.find("file").pinned == "hdd"
        assert all(tier.route.why for tier in manager.status())


def test_damage_inside_the_catalogue_is_found_and_repaired(configuration: Configuration) -> None:
    data_by_name = {f"file-{index}": bytes([index]) * 100 for index in range(200)}
    for name, data in data_by_name.items():
        (configuration.tier("ssd").directory / name).write_bytes(data)
    TierManager(configuration).close()
    database_path = find_database(configuration)
    page_count = database_path.stat().st_size // DATABASE_PAGE_BYTES
    with database_path.open("r+b") as file:
        # gdrkit reads the first seven pages when it opens the catalogue, so they must stay intact. The later pages
        # contain the rows of the files.
        file.seek(DATABASE_PAGE_BYTES * 7)
        file.write(b"\xa5" * DATABASE_PAGE_BYTES * (page_count - 7))
    with TierManager(configuration) as manager:
        assert list_finding_kinds(manager.check()) == [FindingKind.DAMAGED]
        assert read_contents(manager, "file-7") == data_by_name["file-7"]
        assert [finding.mended for finding in manager.check(repair=True) if finding.kind is FindingKind.DAMAGED] == [
            True
        ]
        assert not manager.check()
        assert {name: read_contents(manager, name) for name in data_by_name} == data_by_name


def test_read_does_not_wait_for_a_locked_catalogue(configuration: Configuration) -> None:
    with TierManager(replace(configuration, timeout_ms=50)) as manager:
        data = create_file(manager, "file", 1000, seed=1, tier="ssd")
        with lock_catalogue(configuration):
            for _ in range(300):
                assert read_contents(manager, "file") == data
        # No access is lost: gdrkit writes the counts when the catalogue is unlocked. create_file() is the first access.
        assert manager.find("file").accesses == 301


def test_migration_with_a_locked_catalogue_ends_busy(configuration: Configuration) -> None:
    with TierManager(replace(configuration, timeout_ms=50)) as manager:
        data = create_file(manager, "file", 1000, seed=1)
        with lock_catalogue(configuration), pytest.raises(ApiError) as error_info:
            manager.move("file", "nvme")
        error = error_info.value
        assert (error.api, error.reason, error.status_name) == (Api.SQLITE, Reason.BUSY, "SQLITE_BUSY")
        assert "another process" in error.what_to_do
        assert (manager.find("file").tier, read_contents(manager, "file")) == ("hdd", data)


def test_catalogue_locked_at_the_end_undoes_the_migration(configuration: Configuration) -> None:
    with TierManager(replace(configuration, timeout_ms=50)) as manager:
        data = create_file(manager, "file", 1000, seed=1)
        connection = sqlite3.connect(find_database(configuration), isolation_level=None)

        def lock_in_catalogue_phase(phase: Phase, name: str, offset_bytes: int) -> None:
            if phase is Phase.CATALOGUE:
                connection.execute("BEGIN IMMEDIATE")

        with closing(connection), pytest.raises(ApiError) as error_info:
            manager.move("file", "nvme", observe=lock_in_catalogue_phase)
        assert error_info.value.reason is Reason.BUSY
        assert (manager.find("file").tier, read_contents(manager, "file")) == ("hdd", data)
        manager.check(repair=True)
        assert not manager.check()


def test_clock_that_goes_back_makes_no_file_hotter(configuration: Configuration) -> None:
    day_s = 86400.0
    now_s = [1_800_000_000.0]

    def read_heat(manager: TierManager, name: str) -> float:
        return heat(manager.find(name).score, at_half_lives=manager.catalogue.now_half_lives())

    with TierManager(configuration, clock=lambda: now_s[0]) as manager:
        create_file(manager, "file", 100, seed=1)
        # create_file() is the first of 50 accesses. The default half-life of the heat is 7 days.
        for _ in range(49):
            manager.open("file").close()
        assert read_heat(manager, "file") == pytest.approx(50)
        now_s[0] += 7 * day_s
        assert read_heat(manager, "file") == pytest.approx(25)
        manager.open("file").close()
        assert read_heat(manager, "file") == pytest.approx(26)
        now_s[0] -= 365 * day_s
        assert read_heat(manager, "file") == pytest.approx(26)
        manager.open("file").close()
        assert read_heat(manager, "file") == pytest.approx(27)
    # A new manager, as in another process, starts with the earlier time and reads the same heat. From then on, the file
    # cools as usual.
    with TierManager(configuration, clock=lambda: now_s[0]) as manager:
        assert read_heat(manager, "file") == pytest.approx(27)
        now_s[0] += 7 * day_s
        assert read_heat(manager, "file") == pytest.approx(13.5)


def test_change_of_the_half_life_keeps_the_heat(configuration: Configuration) -> None:
    now_s = [1_800_000_000.0]
    with TierManager(configuration, clock=lambda: now_s[0]) as manager:
        create_file(manager, "file", 100, seed=1)
        # create_file() is the first of 16 accesses.
        for _ in range(15):
            manager.open("file").close()
    with TierManager(replace(configuration, half_life_s=3600.0), clock=lambda: now_s[0]) as manager:
        assert heat(manager.find("file").score, at_half_lives=manager.catalogue.now_half_lives()) == pytest.approx(16)
        now_s[0] += 3600
        assert heat(manager.find("file").score, at_half_lives=manager.catalogue.now_half_lives()) == pytest.approx(8)


def test_name_in_two_tiers_is_reported_and_both_files_stay(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        data = create_file(manager, "file", 1000, seed=1)
        path_in_nvme = configuration.tier("nvme").directory / "file"
        path_in_nvme.write_bytes(b"another program's")
        (finding,) = manager.check()
        assert (finding.kind, finding.tier) == (FindingKind.TWICE, "hdd")
        assert "nvme" in finding.text
        assert read_contents(manager, "file") == data
        with pytest.raises(ApiError) as error_info:
            manager.move("file", "nvme")
        assert error_info.value.reason is Reason.CONFLICT
        assert list_finding_kinds(manager.check(repair=True)) == [FindingKind.TWICE]
        assert (path_in_nvme.read_bytes(), read_contents(manager, "file")) == (b"another program's", data)
        # A tier in which no file has this name accepts the file.
        manager.move("file", "ssd")
        path_in_nvme.unlink()
        assert not manager.check()


def test_changes_outside_gdrkit_are_found_and_recorded(manager: TierManager, configuration: Configuration) -> None:
    nvme, ssd, hdd = (tier.directory for tier in configuration.tiers)
    for name in ("moved", "removed", "grown"):
        create_file(manager, name, 1000, seed=1)
    (ssd / "created").write_bytes(b"there")
    (hdd / "moved").rename(nvme / "moved")
    (hdd / "removed").unlink()
    with (hdd / "grown").open("ab") as file:
        file.write(b"more")
    expected_kinds = [FindingKind.CHANGED, FindingKind.ELSEWHERE, FindingKind.MISSING, FindingKind.UNKNOWN]
    assert list_finding_kinds(manager.check()) == expected_kinds
    assert list_finding_kinds(manager.check(repair=True)) == expected_kinds
    assert not manager.check()
    assert (manager.find("moved").tier, manager.find("created").tier) == ("nvme", "ssd")
    assert manager.find("grown").size_bytes == 1004
    with pytest.raises(ApiError) as error_info:
        manager.find("removed")
    assert error_info.value.errno == errno.ENOENT


def test_file_moved_outside_gdrkit_is_migrated(manager: TierManager, configuration: Configuration) -> None:
    data = create_file(manager, "file", 1000, seed=1)
    (configuration.tier("hdd").directory / "file").rename(configuration.tier("ssd").directory / "file")
    manager.move("file", "nvme")
    assert (manager.find("file").tier, read_contents(manager, "file")) == ("nvme", data)
    assert not manager.check()


def test_totals_equal_those_of_the_disks(manager: TierManager, configuration: Configuration) -> None:
    for index in range(10):
        create_file(manager, f"f{index}", 5000 * index, seed=index, tier=("nvme", "ssd", "hdd")[index % 3])
    manager.remove("f4")
    with manager.open("f5", "r+") as file:
        os.ftruncate(file.fileno(), 3)
    for tier in manager.status():
        file_paths = [path for path in (configuration.tier(tier.name).directory).iterdir() if path.is_file()]
        assert tier.files == len(file_paths)
        assert tier.size_bytes == sum(path.stat().st_size for path in file_paths)
        assert tier.allocated_bytes == sum(path.stat().st_blocks * 512 for path in file_paths)


def test_retired_file_without_a_record_is_kept_and_reported(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        create_file(manager, "file", 1000, seed=1)
    gdrkit_folder = configuration.tier("hdd").directory / ".gdrkit-tiers"
    (gdrkit_folder / "retired" / "0123").write_bytes(b"the last of its kind")
    with TierManager(configuration) as manager:
        assert list_finding_kinds(list(manager.recovery_findings)) == [FindingKind.KEPT]
        assert list_finding_kinds(manager.check()) == [FindingKind.KEPT]
    assert (gdrkit_folder / "kept" / "0123").read_bytes() == b"the last of its kind"


def test_catalogue_locked_for_new_files_counts_accesses_once(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        for name in ("known", "new"):
            create_file(manager, name, 100, seed=1)
        known_accesses = manager.find("known").accesses
        manager.catalogue.remove("new")
        with contextlib.ExitStack() as lock:

            def record_file(name: str) -> None:
                manager.find(name)
                lock.enter_context(lock_catalogue(configuration))

            with contextlib.closing(AccessCounter(manager.catalogue, record_file=record_file)) as access_counter:
                access_counter.count("known", 3)
                access_counter.count("new", 5)
                # The accesses to the known file are written. Then the catalogue is locked.
                access_counter.flush()
                lock.close()
                access_counter.flush()
        assert manager.find("known").accesses == known_accesses + 3
        assert manager.find("new").accesses == 5
