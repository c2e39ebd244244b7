"""What the kernel and the devices refuse: one clear error, and the file is where it was, as it was."""

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
from support.tier_world import configuration_of, contents, place_file

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
    """The fastest tier is a file system of its own."""
    with mounted("ext4", tmp_path / "nvme"):
        yield configuration_of(tmp_path)


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FaultyMount]:
    with FaultyMount(tmp_path / "fuse") as served:
        yield served


@pytest.fixture
def on_fuse(tmp_path: Path, fuse: FaultyMount) -> Configuration:
    """The fastest tier is a file system that fails as it is told."""
    made = configuration_of(tmp_path)
    return replace(made, tiers=(replace(made.tiers[0], directory=fuse.mount), *made.tiers[1:]))


def agreed(manager: TierManager) -> bool:
    return not [each for each in manager.check() if each.is_wrong] and not manager.catalogue.moves()


@ON_EXT4
def test_a_device_that_becomes_full(on_ext4: Configuration) -> None:
    with TierManager(on_ext4) as manager:
        data = place_file(manager, "file", 8 * MIB, seed=1)
        junk = on_ext4.tiers[0].directory / ".gdrkit-tiers" / "junk"

        def fill(phase: Phase, name: str, offset_bytes: int) -> None:
            # There was room when the migration began.
            if phase is Phase.COPY and offset_bytes == 4 * MIB:
                with contextlib.suppress(OSError), junk.open("wb", buffering=0) as file:
                    while file.write(bytes(MIB)):
                        pass

        with pytest.raises(ApiError) as raised:
            manager.move("file", "nvme", observe=fill)
        assert (raised.value.errno, raised.value.reason) == (errno.ENOSPC, Reason.NO_SPACE)
        assert "make room" in raised.value.what_to_do
        junk.unlink()
        assert agreed(manager)
        assert contents(manager, "file") == data
        manager.move("file", "nvme")


@ON_EXT4
def test_a_device_that_is_read_only(on_ext4: Configuration) -> None:
    nvme = on_ext4.tiers[0].directory
    with TierManager(on_ext4) as manager:
        kept, other = (
            place_file(manager, name, 1000, seed=1, tier=tier) for name, tier in (("a", "nvme"), ("b", "hdd"))
        )
        remount(nvme, "ro")
        for name, to in (("a", "hdd"), ("b", "nvme")):
            with pytest.raises(ApiError) as raised:
                manager.move(name, to)
            assert (raised.value.errno, raised.value.reason) == (errno.EROFS, Reason.NO_PERMISSION)
        assert (contents(manager, "a"), contents(manager, "b")) == (kept, other)
        remount(nvme, "rw")
        assert agreed(manager)


@ON_EXT4
def test_a_tier_that_was_always_read_only_can_be_read(on_ext4: Configuration) -> None:
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
def test_another_user_may_not() -> None:
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
        theirs.write_bytes(b"of root, and nobody else's to read")
        theirs.chmod(0o600)
        (root / "hdd" / "file").write_bytes(b"nobody's")
        os.chown(root / "hdd" / "file", 65534, 65534)
        said = run_program(program, str(root))
        assert said.stdout.splitlines() == ["theirs 13 no_permission", "file 13 no_permission", "[]"], said.stderr
        assert theirs.read_bytes().startswith(b"of root")


@needs(host.fuse)
@pytest.mark.parametrize("request_name", ["create", "write", "fsync", "read", "rename", "utimens"])
def test_a_destination_that_fails(on_fuse: Configuration, fuse: FaultyMount, request_name: str) -> None:
    with TierManager(on_fuse) as manager:
        data = place_file(manager, "file", 100_000, seed=1)
        fuse.fail(**{request_name: errno.EIO})
        with pytest.raises(ApiError) as raised:
            manager.move("file", "nvme")
        assert (raised.value.errno, raised.value.reason) == (errno.EIO, Reason.IO_ERROR)
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)
        fuse.fail()
        manager.check(repair=True)
        assert agreed(manager)
        manager.move("file", "nvme")
        assert contents(manager, "file") == data


@needs(host.fuse)
def test_a_destination_that_keeps_other_bytes(on_fuse: Configuration, fuse: FaultyMount) -> None:
    with TierManager(on_fuse) as manager:
        data = place_file(manager, "file", 100_000, seed=1)

        def lie(phase: Phase, name: str, offset_bytes: int) -> None:
            # Of the copy alone: the record of the migration is true.
            fuse.fail(**({"write": int(LIE)} if phase is Phase.COPY else {}))

        with pytest.raises(DataMismatch):
            manager.move("file", "nvme", observe=lie)
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)
        assert agreed(manager)


@needs(host.fuse)
@pytest.mark.parametrize("request_name", ["open", "read", "rename"])
def test_a_source_that_fails(on_fuse: Configuration, fuse: FaultyMount, request_name: str) -> None:
    with TierManager(on_fuse) as manager:
        data = place_file(manager, "file", 100_000, seed=1, tier="nvme")
        fuse.fail(**{request_name: errno.EIO})
        with pytest.raises(ApiError) as raised:
            manager.move("file", "ssd")
        assert (raised.value.errno, raised.value.reason) == (errno.EIO, Reason.IO_ERROR)
        fuse.fail()
        assert agreed(manager)
        assert (manager.find("file").tier, contents(manager, "file")) == ("nvme", data)


@needs(host.fuse)
def test_a_device_that_fails_while_a_migration_is_taken_back(on_fuse: Configuration, fuse: FaultyMount) -> None:
    with TierManager(on_fuse) as manager:
        data = place_file(manager, "file", 100_000, seed=1)

        def fail(phase: Phase, name: str, offset_bytes: int) -> None:
            if phase is Phase.RETIRE:
                # libfuse renames what is open instead of removing it.
                fuse.fail(unlink=errno.EIO, rename=errno.EIO)
                raise OSError(errno.EIO, "the case says so")

        with pytest.raises(ApiError) as raised:
            manager.move("file", "nvme", observe=fail)
        assert "check --repair" in "".join(raised.value.__notes__)
        assert contents(manager, "file") == data
    fuse.fail()
    # The copy that could not be taken away has the name there until somebody looks.
    assert (fuse.below / "file").exists()
    with TierManager(on_fuse) as manager:
        assert not (fuse.below / "file").exists()
        assert agreed(manager)
        assert (manager.find("file").tier, contents(manager, "file")) == ("hdd", data)


@ON_EXT4
@pytest.mark.parametrize("has_files", [False, True])
def test_unmounted_tier_is_not_written_to(tmp_path: Path, *, has_files: bool) -> None:
    """Issue 15, A7: `tiers check` put its folder into the mount point of a file system that was not mounted."""
    made = configuration_of(tmp_path)
    nvme = made.tiers[0].directory
    nvme.rmdir()
    with mounted("ext4", nvme), TierManager(made) as manager:
        if has_files:
            place_file(manager, "file", 1000, seed=1, tier="nvme")
    for repair in (False, True):
        with TierManager(made) as manager:
            assert "is its file system mounted" in manager.status()[0].absent
            assert "absent" in {each.kind.value for each in manager.check(repair=repair)}
        assert list(nvme.iterdir()) == []
    # Made anew on purpose, as the message says.
    (nvme / ".gdrkit-tiers").mkdir()
    with TierManager(made) as manager:
        assert not manager.status()[0].absent
        assert place_file(manager, "other", 1000, seed=2, tier="nvme") == contents(manager, "other")


@ON_EXT4
def test_a_tier_that_is_not_mounted_misses_no_file(tmp_path: Path) -> None:
    made = configuration_of(tmp_path)
    with mounted("ext4", tmp_path / "disk"):
        there = replace(made, tiers=(replace(made.tiers[0], directory=tmp_path / "disk"), *made.tiers[1:]))
        with TierManager(there) as manager:
            data = place_file(manager, "file", 1000, seed=1, tier="nvme")
            manager.pin("file")
        # What is below a mount point when nothing is mounted: an empty folder.
        without = replace(made, tiers=(replace(made.tiers[0], directory=tmp_path / "nvme"), *made.tiers[1:]))
        with TierManager(without) as manager:
            assert "is its file system mounted" in manager.status()[0].absent
            assert "absent" in {each.kind.value for each in manager.check(repair=True)}
            with pytest.raises(SetupMissing):
                manager.move("file", "nvme")
        with TierManager(there) as manager:
            assert (contents(manager, "file"), manager.find("file").pinned) == (data, "nvme")


def test_no_tier_at_all_is_said(tmp_path: Path) -> None:
    made = configuration_of(tmp_path)
    gone = [replace(tier, directory=tmp_path / "nowhere" / tier.name) for tier in made.tiers]
    with pytest.raises(SetupMissing, match="mount it"):
        TierManager(replace(made, tiers=tuple(gone)))
