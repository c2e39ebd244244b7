"""A failed migration of a file between tiers raises one clear error, and leaves the file unchanged.

The causes are system calls and devices that fail, and tiers that are missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.faulty_fuse import WRONG_DATA, FaultyMount
from support.mounts import mount_new_file_system, remount
from support.other_user import folder_for_all_users, run_program
from support.tier_world import create_file, make_configuration, read_contents

from gdrkit.errors import ApiError, DataMismatch, Reason, SetupMissing
from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Configuration, Phase, TierManager
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# User and group id to which become_unprivileged() changes.
UNPRIVILEGED_UID = 65534
NEEDS_EXT4 = needs(host.file_system("ext4"))


@pytest.fixture
def configuration_on_ext4(tmp_path: Path) -> Iterator[Configuration]:
    """Return a configuration whose fastest tier is an ext4 file system of its own."""
    with mount_new_file_system("ext4", tmp_path / "nvme"):
        yield make_configuration(tmp_path)


@pytest.fixture
def fuse_mount(tmp_path: Path) -> Iterator[FaultyMount]:
    """Yield a FUSE mount whose requests can be made to fail."""
    with FaultyMount(tmp_path / "fuse") as mount:
        yield mount


@pytest.fixture
def configuration_on_fuse(tmp_path: Path, fuse_mount: FaultyMount) -> Configuration:
    """Return a configuration whose fastest tier is on the FUSE mount `fuse_mount`."""
    configuration = make_configuration(tmp_path)
    fastest_tier = replace(configuration.tiers[0], directory=fuse_mount.mount)
    return replace(configuration, tiers=(fastest_tier, *configuration.tiers[1:]))


def is_consistent(manager: TierManager) -> bool:
    """Return whether the catalogue agrees with the disks and no migration is in progress."""
    return (
        not [finding for finding in manager.check() if finding.needs_action]
        and not manager.catalogue.reserved_move_ids()
    )


@NEEDS_EXT4
def test_full_device_is_reported_as_no_space(configuration_on_ext4: Configuration) -> None:
    with TierManager(configuration_on_ext4) as manager:
        data = create_file(manager, "file", 8 * MIB, seed=1)
        large_file = configuration_on_ext4.tiers[0].directory / ".gdrkit-tiers" / "junk"

        def fill_device(phase: Phase, name: str, offset_bytes: int) -> None:
            # The migration checked the free space before this phase, so the copy itself meets the full device.
            if phase is Phase.COPY and offset_bytes == 4 * MIB:
                with contextlib.suppress(OSError), large_file.open("wb", buffering=0) as file:
                    while file.write(bytes(MIB)):
                        pass

        with pytest.raises(ApiError) as error_info:
            manager.move("file", "nvme", observe=fill_device)
        assert (error_info.value.errno, error_info.value.reason) == (errno.ENOSPC, Reason.NO_SPACE)
        assert "free space" in error_info.value.what_to_do
        large_file.unlink()
        assert is_consistent(manager)
        assert read_contents(manager, "file") == data
        manager.move("file", "nvme")


@NEEDS_EXT4
def test_read_only_device_refuses_migrations(configuration_on_ext4: Configuration) -> None:
    nvme_folder = configuration_on_ext4.tiers[0].directory
    with TierManager(configuration_on_ext4) as manager:
        nvme_data, hdd_data = (
            create_file(manager, name, 1000, seed=1, tier=tier) for name, tier in (("a", "nvme"), ("b", "hdd"))
        )
        remount(nvme_folder, "ro")
        for name, tier in (("a", "hdd"), ("b", "nvme")):
            with pytest.raises(ApiError) as error_info:
                manager.move(name, tier)
            assert (error_info.value.errno, error_info.value.reason) == (errno.EROFS, Reason.NO_PERMISSION)
        assert (read_contents(manager, "a"), read_contents(manager, "b")) == (nvme_data, hdd_data)
        remount(nvme_folder, "rw")
        assert is_consistent(manager)


@NEEDS_EXT4
def test_read_only_tier_can_be_read(configuration_on_ext4: Configuration) -> None:
    nvme_folder = configuration_on_ext4.tiers[0].directory
    (nvme_folder / "file").write_bytes(b"here")
    remount(nvme_folder, "ro")
    with TierManager(configuration_on_ext4) as manager:
        assert read_contents(manager, "file") == b"here"
        with pytest.raises(ApiError) as error_info:
            manager.move("file", "hdd")
        assert error_info.value.errno == errno.EROFS
    remount(nvme_folder, "rw")


@needs(host.capability("CAP_SETUID"))
def test_migration_without_permission_fails() -> None:
    program = """
import sys
from pathlib import Path
from support.other_user import become_unprivileged
from support.tier_world import make_configuration
from gdrkit.errors import ApiError
from gdrkit.tiers import TierManager
configuration = make_configuration(Path(sys.argv[1]))
become_unprivileged()
with TierManager(configuration) as manager:
    for name, destination in (("theirs", "ssd"), ("file", "nvme")):
        try:
            manager.move(name, destination)
        except ApiError as error:
            print(name, error.errno, error.reason.value)
    print([finding.kind.value for finding in manager.check()])
"""
    with folder_for_all_users() as root:
        configuration = make_configuration(root)
        # The fastest tier still belongs to root, so the unprivileged user cannot move a file to it.
        for tier in configuration.tiers[1:]:
            os.chown(tier.directory, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        (root / "catalogue").mkdir()
        os.chown(root / "catalogue", UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        root_file = root / "hdd" / "theirs"
        root_file.write_bytes(b"readable by root only")
        root_file.chmod(0o600)
        (root / "hdd" / "file").write_bytes(b"readable by every user")
        os.chown(root / "hdd" / "file", UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        completed_process = run_program(program, str(root))
        # 13 is EACCES.
        assert completed_process.stdout.splitlines() == ["theirs 13 no_permission", "file 13 no_permission", "[]"], (
            completed_process.stderr
        )
        assert root_file.read_bytes() == b"readable by root only"


@needs(host.fuse)
@pytest.mark.parametrize("request_name", ["create", "write", "fsync", "read", "rename", "utimens"])
def test_failing_destination_leaves_the_file_in_its_tier(
    configuration_on_fuse: Configuration, fuse_mount: FaultyMount, request_name: str
) -> None:
    with TierManager(configuration_on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1)
        fuse_mount.set_faults(**{request_name: errno.EIO})
        with pytest.raises(ApiError) as error_info:
            manager.move("file", "nvme")
        assert (error_info.value.errno, error_info.value.reason) == (errno.EIO, Reason.IO_ERROR)
        assert (manager.find("file").tier, read_contents(manager, "file")) == ("hdd", data)
        fuse_mount.set_faults()
        manager.check(repair=True)
        assert is_consistent(manager)
        manager.move("file", "nvme")
        assert read_contents(manager, "file") == data


@needs(host.fuse)
def test_wrong_data_in_the_destination_is_detected(
    configuration_on_fuse: Configuration, fuse_mount: FaultyMount
) -> None:
    with TierManager(configuration_on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1)

        def store_wrong_data(phase: Phase, name: str, offset_bytes: int) -> None:
            # The faulty disk corrupts only the data of the copy. It stores the record of the migration correctly.
            fuse_mount.set_faults(**({"write": WRONG_DATA} if phase is Phase.COPY else {}))

        with pytest.raises(DataMismatch):
            manager.move("file", "nvme", observe=store_wrong_data)
        assert (manager.find("file").tier, read_contents(manager, "file")) == ("hdd", data)
        assert is_consistent(manager)


@needs(host.fuse)
@pytest.mark.parametrize("request_name", ["open", "read", "rename"])
def test_failing_source_leaves_the_file_in_its_tier(
    configuration_on_fuse: Configuration, fuse_mount: FaultyMount, request_name: str
) -> None:
    with TierManager(configuration_on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1, tier="nvme")
        fuse_mount.set_faults(**{request_name: errno.EIO})
        with pytest.raises(ApiError) as error_info:
            manager.move("file", "ssd")
        assert (error_info.value.errno, error_info.value.reason) == (errno.EIO, Reason.IO_ERROR)
        fuse_mount.set_faults()
        assert is_consistent(manager)
        assert (manager.find("file").tier, read_contents(manager, "file")) == ("nvme", data)


@needs(host.fuse)
def test_failed_undo_is_completed_by_a_recovery(configuration_on_fuse: Configuration, fuse_mount: FaultyMount) -> None:
    with TierManager(configuration_on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1)

        def fail_retirement_and_undo(phase: Phase, name: str, offset_bytes: int) -> None:
            if phase is Phase.RETIRE:
                # For an unlink of an open file, libfuse sends a rename request instead.
                fuse_mount.set_faults(unlink=errno.EIO, rename=errno.EIO)
                raise OSError(errno.EIO, "injected by the case")

        with pytest.raises(ApiError) as error_info:
            manager.move("file", "nvme", observe=fail_retirement_and_undo)
        assert "check --repair" in "".join(error_info.value.__notes__)
        assert read_contents(manager, "file") == data
    fuse_mount.set_faults()
    # The copy could not be removed. It keeps the name of the file until the next recovery.
    assert (fuse_mount.backing_folder / "file").exists()
    with TierManager(configuration_on_fuse) as manager:
        assert not (fuse_mount.backing_folder / "file").exists()
        assert is_consistent(manager)
        assert (manager.find("file").tier, read_contents(manager, "file")) == ("hdd", data)


@NEEDS_EXT4
@pytest.mark.parametrize("has_files", [False, True])
def test_unmounted_tier_is_not_written_to(tmp_path: Path, *, has_files: bool) -> None:
    """If a tier is not mounted, gdrkit creates no folder .gdrkit-tiers in its empty mount point."""
    configuration = make_configuration(tmp_path)
    nvme_folder = configuration.tiers[0].directory
    nvme_folder.rmdir()
    with mount_new_file_system("ext4", nvme_folder), TierManager(configuration) as manager:
        if has_files:
            create_file(manager, "file", 1000, seed=1, tier="nvme")
    for repair in (False, True):
        with TierManager(configuration) as manager:
            assert "is its file system mounted" in manager.status()[0].absent
            assert "absent" in {finding.kind.value for finding in manager.check(repair=repair)}
        assert list(nvme_folder.iterdir()) == []
    # The text in `absent` advises the user to run this mkdir if the folder was recreated on purpose.
    (nvme_folder / ".gdrkit-tiers").mkdir()
    with TierManager(configuration) as manager:
        assert not manager.status()[0].absent
        assert create_file(manager, "other", 1000, seed=2, tier="nvme") == read_contents(manager, "other")


@NEEDS_EXT4
def test_files_of_an_unmounted_tier_are_not_missing(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path)
    fastest_tier, *other_tiers = configuration.tiers
    with mount_new_file_system("ext4", tmp_path / "disk"):
        mounted_configuration = replace(
            configuration, tiers=(replace(fastest_tier, directory=tmp_path / "disk"), *other_tiers)
        )
        with TierManager(mounted_configuration) as manager:
            data = create_file(manager, "file", 1000, seed=1, tier="nvme")
            manager.pin("file")
        # An unmounted file system leaves the empty folder of its mount point.
        unmounted_configuration = replace(
            configuration, tiers=(replace(fastest_tier, directory=tmp_path / "nvme"), *other_tiers)
        )
        with TierManager(unmounted_configuration) as manager:
            assert "is its file system mounted" in manager.status()[0].absent
            assert "absent" in {finding.kind.value for finding in manager.check(repair=True)}
            with pytest.raises(SetupMissing):
                manager.move("file", "nvme")
        with TierManager(mounted_configuration) as manager:
            assert (read_contents(manager, "file"), manager.find("file").pinned) == (data, "nvme")


def test_missing_tiers_raise_setup_missing(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path)
    missing_tiers = [replace(tier, directory=tmp_path / "nowhere" / tier.name) for tier in configuration.tiers]
    with pytest.raises(SetupMissing, match="mount its file system"):
        TierManager(replace(configuration, tiers=tuple(missing_tiers)))
