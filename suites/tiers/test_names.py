"""A name cannot lead out of a tier, and gdrkit does not touch symbolic links and special files in a tier."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.tier_world import create_file, read_contents

from gdrkit.errors import ApiError, Reason, UsageError
from gdrkit.tiers import FindingKind, Phase

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.tiers import Configuration, TierManager

INVALID_NAMES = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    "a//b",
    "a/",
    "a/./b",
    "a\0b",
    "x" * 256,
    "lost+found/x",
]


@pytest.mark.parametrize("name", [*INVALID_NAMES, "lost+found/x", ".gdrkit-tiers/tier.json", "a/" * 2048 + "b"])
@pytest.mark.parametrize("mode", ["r", "a+"])
def test_invalid_name_is_refused(manager: TierManager, name: str, mode: str) -> None:
    with pytest.raises(UsageError) as error_info:
        manager.open(name, mode)
    assert error_info.value.reason is Reason.BAD_ARGUMENT


@pytest.mark.parametrize(
    "name", ["a", "a b", "...", ".hidden", "ä/ö", "line\nbreak", os.fsdecode(b"\xff\xfe"), "x" * 255]
)
def test_unusual_name_is_accepted(manager: TierManager, name: str) -> None:
    data = create_file(manager, name, 100, seed=1)
    manager.move(name, "nvme")
    assert read_contents(manager, name) == data
    assert not manager.check()


@pytest.fixture
def folder_outside(tmp_path: Path) -> Path:
    """Return a folder outside the tiers, with one file."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(b"not in a tier")
    return folder


@pytest.mark.parametrize("name", ["link/file", "file-link"])
@pytest.mark.parametrize("mode", ["r", "r+", "a+"])
def test_symbolic_link_is_not_followed(
    manager: TierManager, configuration: Configuration, folder_outside: Path, name: str, mode: str
) -> None:
    for tier in configuration.tiers:
        (tier.directory / "link").symlink_to(folder_outside)
        (tier.directory / "file-link").symlink_to(folder_outside / "file")
    with pytest.raises(ApiError):
        manager.open(name, mode)
    with pytest.raises(ApiError):
        manager.move(name, "nvme")
    assert {finding.kind for finding in manager.check()} == {FindingKind.FOREIGN}
    assert (folder_outside / "file").read_bytes() == b"not in a tier"


@pytest.mark.parametrize("phase", [Phase.COPY, Phase.RENAME, Phase.FOLDER, Phase.RETIRE])
@pytest.mark.parametrize("tier", ["hdd", "nvme"])
def test_folder_replaced_by_a_link_is_not_followed(
    manager: TierManager, configuration: Configuration, folder_outside: Path, phase: Phase, tier: str
) -> None:
    data = create_file(manager, "folder/file", 1000, seed=1)
    # The creation of this file also creates the folder in nvme.
    create_file(manager, "folder/other", 1000, seed=2, tier="nvme")
    folder = configuration.tier(tier).directory / "folder"

    def replace_folder_by_link(current_phase: Phase, name: str, offset_bytes: int) -> None:
        if current_phase is phase and offset_bytes in {0, 1000} and not folder.is_symlink():
            folder.rename(folder.with_name("real"))
            folder.symlink_to(folder_outside)

    with pytest.raises(ApiError):
        manager.move("folder/file", "nvme", observe=replace_folder_by_link)
    assert sorted(path.name for path in folder_outside.iterdir()) == ["file"]
    assert (folder_outside / "file").read_bytes() == b"not in a tier"
    folder.unlink()
    folder.with_name("real").rename(folder)
    manager.check(repair=True)
    assert read_contents(manager, "folder/file") == data
    assert not manager.check()


@pytest.mark.parametrize("file_type", ["fifo", "folder", "socket"])
def test_special_file_is_not_touched(manager: TierManager, configuration: Configuration, file_type: str) -> None:
    import socket

    path = configuration.tier("hdd").directory / "special"
    with socket.socket(socket.AF_UNIX) as listener:
        if file_type == "socket":
            listener.bind(str(path))
        elif file_type == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
    for mode in ("r", "r+"):
        with pytest.raises(ApiError):
            manager.open("special", mode)
    assert {finding.kind for finding in manager.check()} <= {FindingKind.FOREIGN}


def test_closed_manager_raises_closed_resource(configuration: Configuration) -> None:
    from gdrkit.errors import ClosedResource
    from gdrkit.tiers import TierManager

    manager = TierManager(configuration)
    manager.close()
    manager.close()
    with pytest.raises(ClosedResource):
        manager.open("file")
    with pytest.raises(ClosedResource):
        manager.status()
