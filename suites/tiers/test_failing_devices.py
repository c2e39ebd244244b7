"""A migration that a system call, a device or a missing tier ends is one clear error, and the file is unchanged."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.faulty_fuse import LIE, FaultyMount
from support.mounts import mounted, remount
from support.other_user import open_folder, run_program
from support.tier_world import configuration_of, contents, create_file

from gdrkit.errors import ApiError, DataMismatch, Reason, SetupMissing
from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Configuration, Phase, TierManager
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ON_EXT4 = needs(host.file_system("ext4"))


@pytest.fixture
def on_ext4(tmp_path: Path) -> Iterator[Configuration]:
    """Return a configuration whose fastest tier is an ext4 file system of its own."""
    with mounted("ext4", tmp_path / "nvme"):
        yield configuration_of(tmp_path)


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FaultyMount]:
    with FaultyMount(tmp_path / "fuse") as mount:
        yield mount


@pytest.fixture
def on_fuse(tmp_path: Path, fuse: FaultyMount) -> Configuration:
    """Return a configuration whose fastest tier is on the FUSE mount, whose requests can be made to fail."""
    configuration = configuration_of(tmp_path)
    fastest = replace(configuration.tiers[0], directory=fuse.mount)
    return replace(configuration, tiers=(fastest, *configuration.tiers[1:]))


def is_consistent(manager: TierManager) -> bool:
    """Return whether the catalogue agrees with the disks and no migration is in progress."""
    return not [each for each in manager.check() if each.is_wrong] and not manager.catalogue.moves()


@ON_EXT4
def test_device_that_fills_up_is_no_space(on_ext4: Configuration) -> None:
    with TierManager(on_ext4) as manager:
        data = create_file(manager, "file", 8 * MIB, seed=1)
        junk = on_ext4.tiers[0].directory / ".gdrkit-tiers" / "junk"

        def fill(phase: Phase, name: str, offset_bytes: int) -> None:
            # There was enough space when the migration began.
            if phase is Phase.COPY and offset_bytes == 4 * MIB:
                with contextlib.suppress(OSError), junk.open("wb", buffering=0) as file:
                    while file.write(bytes(MIB)):
                        pass

        with pytest.raises(ApiError) as raised:
            manager.move("file", "nvme", observe=fill)
        assert (raised.value.errno, raised.value.reason) == (errno.ENOSPC, Reason.NO_SPACE)
        assert "free space" in raised.value.what_to_do
        junk.unlink()
        assert is_consistent(manager)
        assert contents(manager, "file") == data
        manager.move("file", "nvme")


@ON_EXT4
def test_read_only_device_refuses_migrations(on_ext4: Configuration) -> None:
    nvme = on_ext4.tiers[0].directory
    with TierManager(on_ext4) as manager:
        on_nvme, on_hdd = (
            create_file(manager, name, 1000, seed=1, tier=tier) for name, tier in (("a", "nvme"), ("b", "hdd"))
        )
        remount(nvme, "ro")
        for name, to in (("a", "hdd"), ("b", "nvme")):
            with pytest.raises(ApiError) as raised:
                manager.move(name, to)
            assert (raised.value.errno, raised.value.reason) == (errno.EROFS, Reason.NO_PERMISSION)
        assert (contents(manager, "a"), contents(manager, "b")) == (on_nvme, on_hdd)
        remount(nvme, "rw")
        assert is_consistent(manager)


@ON_EXT4
def test_read_only_tier_can_be_read(on_ext4: Configuration) -> None:
    nvme = on_ext4.tiers[0].directory
    (nvme / "file").write_bytes(b"here")
    remount(nvme, "ro")
    with TierManager(on_ext4) as manager:
        assert contents(manager, "file") == b"here"
        with pytest.raises(ApiError) as raised:
            manager.move("file", "hdd")
        assert raised.value.errno == errno.EROFS
    remount(nvme, "rw")


@needs(host.capability("CAP_SETUID"))
def test_other_users_files_are_not_migrated() -> None:
    program = """
import sys
from pathlib import Path
from support.other_user import become_unprivileged
from support.tier_world import configuration_of
from gdrkit.errors import ApiError
from gdrkit.tiers import TierManager
configuration = configuration_of(Path(sys.argv[1]))
become_unprivileged()
with TierManager(configuration) as manager:
    for name, to in (("theirs", "ssd"), ("file", "nvme")):
        try:
            manager.move(name, to)
        except ApiError as error:
            print(name, error.errno, error.reason.value)
    print([each.kind.value for each in manager.check()])
"""
    with open_folder() as root:
        configuration = configuration_of(root)
        for tier in configuration.tiers[1:]:
            os.chown(tier.directory, 65534, 65534)
        (root / "catalogue").mkdir()
        os.chown(root / "catalogue", 65534, 65534)
        theirs = root / "hdd" / "theirs"
        theirs.write_bytes(b"readable by root only")
        theirs.chmod(0o600)
        (root / "hdd" / "file").write_bytes(b"of uid 65534")
        os.chown(root / "hdd" / "file", 65534, 65534)
        done = run_program(program, str(root))
        assert done.stdout.splitlines() == ["theirs 13 no_permission", "file 13 no_permission", "[]"], done.stderr
        assert theirs.read_bytes() == b"readable by root only"


@needs(host.fuse)
@pytest.mark.parametrize("request_name", ["create", "write", "fsync", "read", "rename", "utimens"])
def test_failing_destination_leaves_the_file_in_its_tier(
    on_fuse: Configuration, fuse: FaultyMount, request_name: str
) -> None:
    with TierManager(on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1)
        fuse.fail(**{request_name: errno.EIO})
        with pytest.raises(ApiError) as raised:
            manager.move("file", "nvme")
        assert (raised.value.errno, raised.value.reason) == (errno.EIO, Reason.IO_ERROR)
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)
        fuse.fail()
        manager.check(repair=True)
        assert is_consistent(manager)
        manager.move("file", "nvme")
        assert contents(manager, "file") == data


@needs(host.fuse)
def test_destination_that_stores_other_bytes_is_found(on_fuse: Configuration, fuse: FaultyMount) -> None:
    with TierManager(on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1)

        def lie(phase: Phase, name: str, offset_bytes: int) -> None:
            # Only the writes of the copy lie; the record of the migration is stored as written.
            fuse.fail(**({"write": int(LIE)} if phase is Phase.COPY else {}))

        with pytest.raises(DataMismatch):
            manager.move("file", "nvme", observe=lie)
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)
        assert is_consistent(manager)


@needs(host.fuse)
@pytest.mark.parametrize("request_name", ["open", "read", "rename"])
def test_failing_source_leaves_the_file_in_its_tier(
    on_fuse: Configuration, fuse: FaultyMount, request_name: str
) -> None:
    with TierManager(on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1, tier="nvme")
        fuse.fail(**{request_name: errno.EIO})
        with pytest.raises(ApiError) as raised:
            manager.move("file", "ssd")
        assert (raised.value.errno, raised.value.reason) == (errno.EIO, Reason.IO_ERROR)
        fuse.fail()
        assert is_consistent(manager)
        assert (manager.find("file").tier, contents(manager, "file")) == ("nvme", data)


@needs(host.fuse)
def test_failed_undo_is_completed_by_a_recovery(on_fuse: Configuration, fuse: FaultyMount) -> None:
    with TierManager(on_fuse) as manager:
        data = create_file(manager, "file", 100_000, seed=1)

        def fail(phase: Phase, name: str, offset_bytes: int) -> None:
            if phase is Phase.RETIRE:
                # libfuse renames a file that is open instead of removing it.
                fuse.fail(unlink=errno.EIO, rename=errno.EIO)
                raise OSError(errno.EIO, "injected by the case")

        with pytest.raises(ApiError) as raised:
            manager.move("file", "nvme", observe=fail)
        assert "check --repair" in "".join(raised.value.__notes__)
        assert contents(manager, "file") == data
    fuse.fail()
    # The copy that could not be removed has the name until the next recovery.
    assert (fuse.below / "file").exists()
    with TierManager(on_fuse) as manager:
        assert not (fuse.below / "file").exists()
        assert is_consistent(manager)
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)


@ON_EXT4
@pytest.mark.parametrize("has_files", [False, True])
def test_unmounted_tier_is_not_written_to(tmp_path: Path, *, has_files: bool) -> None:
    """Issue 15, A7: `tiers check` created its folder in the mount point of a file system that was not mounted."""
    configuration = configuration_of(tmp_path)
    nvme = configuration.tiers[0].directory
    nvme.rmdir()
    with mounted("ext4", nvme), TierManager(configuration) as manager:
        if has_files:
            create_file(manager, "file", 1000, seed=1, tier="nvme")
    for repair in (False, True):
        with TierManager(configuration) as manager:
            assert "is its file system mounted" in manager.status()[0].absent
            assert "absent" in {each.kind.value for each in manager.check(repair=repair)}
        assert list(nvme.iterdir()) == []
    # The message names this command, by which the user confirms that the folder was recreated on purpose.
    (nvme / ".gdrkit-tiers").mkdir()
    with TierManager(configuration) as manager:
        assert not manager.status()[0].absent
        assert create_file(manager, "other", 1000, seed=2, tier="nvme") == contents(manager, "other")


@ON_EXT4
def test_files_of_an_unmounted_tier_are_not_missing(tmp_path: Path) -> None:
    configuration = configuration_of(tmp_path)
    fastest, *others = configuration.tiers
    with mounted("ext4", tmp_path / "disk"):
        mounted_tier = replace(configuration, tiers=(replace(fastest, directory=tmp_path / "disk"), *others))
        with TierManager(mounted_tier) as manager:
            data = create_file(manager, "file", 1000, seed=1, tier="nvme")
            manager.pin("file")
        # An unmounted file system leaves the empty folder of its mount point.
        unmounted_tier = replace(configuration, tiers=(replace(fastest, directory=tmp_path / "nvme"), *others))
        with TierManager(unmounted_tier) as manager:
            assert "is its file system mounted" in manager.status()[0].absent
            assert "absent" in {each.kind.value for each in manager.check(repair=True)}
            with pytest.raises(SetupMissing):
                manager.move("file", "nvme")
        with TierManager(mounted_tier) as manager:
            assert (contents(manager, "file"), manager.find("file").pinned) == (data, "nvme")


def test_missing_tiers_are_setup_missing(tmp_path: Path) -> None:
    configuration = configuration_of(tmp_path)
    missing = [replace(tier, directory=tmp_path / "nowhere" / tier.name) for tier in configuration.tiers]
    with pytest.raises(SetupMissing, match="mount its file system"):
        TierManager(replace(configuration, tiers=tuple(missing)))
