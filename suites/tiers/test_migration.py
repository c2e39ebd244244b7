"""One migration: the attributes that the copy keeps, files that stay, and readers and writers during the migration."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.tier_world import create_file, read_contents

from gdrkit import pattern
from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Phase
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from gdrkit.tiers import Configuration, TierManager


def get_path(configuration: Configuration, tier: str, name: str) -> Path:
    return configuration.tier(tier).directory / name


def move_and_get_error(manager: TierManager, name: str, destination: str, **options: object) -> ApiError:
    """Start a migration that must fail, and return its error.

    Check that the file is unchanged, and that the migration has left no copy and no reservation.
    """
    tier_before, contents_before = manager.find(name).tier, read_contents(manager, name)
    with pytest.raises(ApiError) as error_info:
        manager.move(name, destination, **options)  # type: ignore[arg-type] # the option is an observer.
    assert (manager.find(name).tier, read_contents(manager, name)) == (tier_before, contents_before)
    assert not [finding for finding in manager.check() if finding.needs_action]
    assert not manager.catalogue.reserved_move_ids()
    return error_info.value


@pytest.mark.qualify
@pytest.mark.parametrize("length_bytes", [0, 1, 4 * KIB, 4 * MIB, 4 * MIB + 1, 9 * MIB + 5])
def test_migrated_file_has_the_same_bytes(manager: TierManager, length_bytes: int) -> None:
    """A file that has moved to another tier has every byte, and no other tier has the file."""
    data = create_file(manager, "a/b/file", length_bytes, seed=1)
    manager.move("a/b/file", "nvme")
    assert read_contents(manager, "a/b/file") == data
    assert get_path(manager.configuration, "nvme", "a/b/file").read_bytes() == data
    assert not get_path(manager.configuration, "hdd", "a/b/file").exists()


def test_times_mode_and_owner_are_kept(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 100, seed=1)
    path = get_path(configuration, "hdd", "file")
    path.chmod(0o2641)
    os.utime(path, ns=(1_000_000_000_123_456_789, 1_100_000_000_987_654_321))
    if os.geteuid() == 0:
        os.chown(path, 1234, 5678)
        # chown(2) may have cleared the set-group-ID bit.
        path.chmod(0o2641)
    stat_before = path.stat()
    manager.move("file", "ssd")
    stat_after = get_path(configuration, "ssd", "file").stat()
    for field in ("st_mode", "st_uid", "st_gid", "st_size", "st_atime_ns", "st_mtime_ns"):
        assert getattr(stat_after, field) == getattr(stat_before, field), field


def test_mode_of_a_folder_is_kept(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "private/file", 100, seed=1)
    get_path(configuration, "hdd", "private").chmod(0o711)
    manager.move("private/file", "ssd")
    assert get_path(configuration, "ssd", "private").stat().st_mode & 0o7777 == 0o711


def test_extended_attributes_are_kept(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 100, seed=1)
    path = get_path(configuration, "hdd", "file")
    os.setxattr(path, "user.origin", b"\0\xff bytes")
    os.setxattr(path, "user.empty", b"")
    manager.move("file", "nvme")
    moved_path = get_path(configuration, "nvme", "file")
    assert {name: os.getxattr(moved_path, name) for name in os.listxattr(moved_path)} == {
        "user.origin": b"\0\xff bytes",
        "user.empty": b"",
    }


def test_holes_stay_holes(manager: TierManager, configuration: Configuration) -> None:
    data = pattern.payload(64 * KIB, seed=2)
    with manager.open("sparse", "a+") as file:
        os.pwrite(file.fileno(), data, 40 * MIB)
        os.ftruncate(file.fileno(), 100 * MIB)
    manager.move("sparse", "nvme")
    moved_path = get_path(configuration, "nvme", "sparse")
    assert moved_path.stat().st_size == 100 * MIB
    assert moved_path.stat().st_blocks * 512 <= 2 * len(data)
    with manager.open("sparse") as file:
        assert os.pread(file.fileno(), len(data) + 2, 40 * MIB - 1) == b"\0" + data + b"\0"


def test_file_with_two_hard_links_stays(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 100, seed=1)
    get_path(configuration, "hdd", "second").hardlink_to(get_path(configuration, "hdd", "file"))
    manager.check(repair=True)
    error = move_and_get_error(manager, "file", "nvme")
    assert (error.reason, error.arguments["links"]) == (Reason.NOT_SUPPORTED, 2)
    # The policy does not try to move the file either.
    for _ in range(200):
        manager.open("file").close()
    assert manager.migrate().refused == ()


def test_hard_link_during_a_migration_ends_it(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 100, seed=1)

    def create_hard_link(phase: Phase, name: str, offset_bytes: int) -> None:
        if phase is Phase.VERIFY and offset_bytes == 0:
            get_path(configuration, "hdd", "second").hardlink_to(get_path(configuration, "hdd", "file"))

    with pytest.raises(ApiError) as error_info:
        manager.move("file", "nvme", observe=create_hard_link)
    assert error_info.value.reason is Reason.BUSY
    assert get_path(configuration, "hdd", "file").stat().st_nlink == 2
    assert not get_path(configuration, "nvme", "file").exists()


# FORGET and DONE, the last two phases, follow the removal of the old file.
@pytest.mark.parametrize("phase", list(Phase)[:-2])
def test_failure_in_any_phase_leaves_the_file_in_its_tier(manager: TierManager, phase: Phase) -> None:
    create_file(manager, "folder/file", 100_000, seed=1)

    def fail_in_phase(current_phase: Phase, name: str, offset_bytes: int) -> None:
        if current_phase is phase:
            raise OSError(errno.EIO, "injected by the case")

    assert move_and_get_error(manager, "folder/file", "nvme", observe=fail_in_phase).errno == errno.EIO


@pytest.mark.parametrize("phase", [Phase.COPY, Phase.VERIFY, Phase.RENAME, Phase.RETIRE, Phase.CATALOGUE, Phase.REMOVE])
def test_open_for_writing_ends_the_migration(manager: TierManager, configuration: Configuration, phase: Phase) -> None:
    create_file(manager, "file", 100_000, seed=1)
    ctime_ns_before = get_path(configuration, "hdd", "file").stat().st_ctime_ns
    phases: list[Phase] = []

    def open_for_writing(current_phase: Phase, name: str, offset_bytes: int) -> None:
        phases.append(current_phase)
        if current_phase is phase and offset_bytes in {0, 100_000}:
            # Any program may open the file like this. Without O_NONBLOCK, the call would wait for the end of the
            # migration.
            possible_paths = [
                get_path(configuration, "hdd", "file"),
                *get_path(configuration, "hdd", ".gdrkit-tiers/retired").iterdir(),
            ]
            path = next(path for path in possible_paths if path.exists())
            with pytest.raises(BlockingIOError):
                os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    assert move_and_get_error(manager, "file", "nvme", observe=open_for_writing).reason is Reason.BUSY
    # Each step first checks for writers, so the migration fails in the phase in which the writer opened the file.
    assert phases[-1] is phase
    if phase is Phase.RETIRE:
        # A rename would have changed the ctime. So the migration has not renamed the file.
        assert get_path(configuration, "hdd", "file").stat().st_ctime_ns == ctime_ns_before
    manager.move("file", "nvme")


@pytest.mark.parametrize("phase", [Phase.RETIRE, Phase.REMOVE])
def test_last_check_finds_that_the_copy_is_gone(
    manager: TierManager, configuration: Configuration, phase: Phase
) -> None:
    """gdrkit removes the old file only if the copy still has the name of the file."""
    create_file(manager, "file", 1000, seed=1)
    phases: list[Phase] = []

    def rename_copy(current_phase: Phase, name: str, offset_bytes: int) -> None:
        phases.append(current_phase)
        if current_phase is phase:
            get_path(configuration, "nvme", "file").rename(get_path(configuration, "nvme", "elsewhere"))

    data = read_contents(manager, "file")
    with pytest.raises(ApiError) as error_info:
        manager.move("file", "nvme", observe=rename_copy)
    assert error_info.value.errno == errno.ENOENT
    assert phases[-1] is phase
    get_path(configuration, "nvme", "elsewhere").unlink()
    manager.check(repair=True)
    assert get_path(configuration, "hdd", "file").read_bytes() == read_contents(manager, "file") == data


def test_file_open_for_writing_stays(manager: TierManager, configuration: Configuration) -> None:
    data = create_file(manager, "file", 1000, seed=1)
    with get_path(configuration, "hdd", "file").open("r+b", buffering=0) as file:
        assert move_and_get_error(manager, "file", "nvme").reason is Reason.BUSY
        file.write(b"new")
    manager.move("file", "nvme")
    assert read_contents(manager, "file") == b"new" + data[3:]


def test_write_through_a_mapping_is_not_lost(manager: TierManager, configuration: Configuration) -> None:
    import mmap

    data = create_file(manager, "file", 4096, seed=1)
    with get_path(configuration, "hdd", "file").open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 4096)
    # The descriptor is closed, and the mapping still exists.
    assert move_and_get_error(manager, "file", "nvme").reason is Reason.BUSY
    mapping[:3] = b"new"
    mapping.close()
    manager.move("file", "nvme")
    assert read_contents(manager, "file") == b"new" + data[3:]


def test_file_replaced_during_a_migration_is_not_lost(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 1000, seed=1)
    draft_path = get_path(configuration, "hdd", "draft")
    draft_path.write_bytes(b"saved by rename")

    def replace_file(phase: Phase, name: str, offset_bytes: int) -> None:
        if phase is Phase.RETIRE:
            draft_path.replace(get_path(configuration, "hdd", "file"))

    with pytest.raises(ApiError) as error_info:
        manager.move("file", "nvme", observe=replace_file)
    assert error_info.value.reason is Reason.BUSY
    assert read_contents(manager, "file") == b"saved by rename"
    assert not get_path(configuration, "nvme", "file").exists()


def test_open_file_stays_readable_after_migrations(manager: TierManager) -> None:
    data = create_file(manager, "file", 100_000, seed=1)
    with manager.open("file") as file:
        manager.move("file", "nvme")
        manager.move("file", "ssd")
        assert os.pread(file.fileno(), 100_000, 0) == data
        assert Path(file.path).read_bytes() == data


def test_reader_finds_the_file_in_every_phase(manager: TierManager) -> None:
    data = create_file(manager, "file", 100_000, seed=1)
    phases = []

    def read_file(phase: Phase, name: str, offset_bytes: int) -> None:
        assert read_contents(manager, "file") == data, phase
        phases.append(phase)

    manager.move("file", "nvme", observe=read_file)
    assert set(phases) == set(Phase)


def test_migration_to_a_full_tier_is_refused(configuration: Configuration) -> None:
    from dataclasses import replace

    from gdrkit.tiers import TierManager

    small_tier = replace(configuration.tiers[0], capacity_bytes=64 * KIB)
    with TierManager(replace(configuration, tiers=(small_tier, *configuration.tiers[1:]))) as manager:
        for name in ("first", "second"):
            create_file(manager, name, 40 * KIB, seed=1)
        manager.move("first", "nvme")
        assert move_and_get_error(manager, "second", "nvme").reason is Reason.NO_SPACE


@needs(host.fuse)
def test_attributes_without_support_refuse_the_migration(tmp_path: Path) -> None:
    from dataclasses import replace

    from support.faulty_fuse import FaultyMount
    from support.tier_world import make_configuration

    from gdrkit.tiers import TierManager

    with FaultyMount(tmp_path / "fuse") as fuse:
        configuration = make_configuration(tmp_path)
        tier_on_fuse = replace(configuration.tiers[0], directory=fuse.mount)
        with TierManager(replace(configuration, tiers=(tier_on_fuse, *configuration.tiers[1:]))) as manager:
            create_file(manager, "plain", 100, seed=1)
            create_file(manager, "labelled", 100, seed=2)
            os.setxattr(get_path(configuration, "hdd", "labelled"), "user.label", b"here")
            manager.move("plain", "nvme")
            error = move_and_get_error(manager, "labelled", "nvme")
            assert error.errno == errno.EOPNOTSUPP
            assert error.reason is Reason.NOT_SUPPORTED
