"""Each open of a file in a tier by another program is counted exactly once, and no other open is counted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.file_opener import FileOpener
from support.mounts import mount_new_file_system
from support.tier_world import TIER_NAMES, create_file, make_configuration

from gdrkit.harness.needs import host, needs
from gdrkit.host import OpenReports
from gdrkit.tiers import TierManager
from gdrkit.tiers.opens import OpenWatcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.tiers import Configuration

pytestmark = needs(host.open_reports)


@pytest.fixture
def opener() -> Iterator[FileOpener]:
    """Yield another program, which opens files when a case requests it."""
    with FileOpener() as program:
        yield program


def watch_all_tiers(manager: TierManager) -> OpenWatcher:
    """Start a watcher of the opens in all tiers, and return it."""
    watcher = OpenWatcher([manager.folder(name) for name in TIER_NAMES], manager.access_counter)
    assert (watcher.watched, watcher.unwatched) == (TIER_NAMES, {})
    return watcher


def count_accesses(manager: TierManager, name: str) -> int:
    return manager.find(name).accesses


def test_opens_by_other_programs_are_counted_once(
    manager: TierManager, configuration: Configuration, opener: FileOpener
) -> None:
    nvme, hdd = configuration.tier("nvme").directory, configuration.tier("hdd").directory
    names = ("file", "folder/sub/page", os.fsdecode(b"not \xff UTF-8"))
    for name in names:
        create_file(manager, name, 100, seed=1, tier="nvme")
    accesses_before = {name: count_accesses(manager, name) for name in names}
    (hdd.parent / "outside").write_bytes(b"")
    with watch_all_tiers(manager):
        opener.open_files([nvme], {names[0]: 120, names[1]: 3, names[2]: 1})
        opener.open_files([hdd.parent], {"outside": 5})
        # manager.open() itself counts its open, and the watcher does not. Other opens by this process, and opens of
        # gdrkit's own files, do not count.
        manager.open("file").close()
        (nvme / "file").read_bytes()
        opener.open_files([nvme], {".gdrkit-tiers/tier.json": 2})
    assert [count_accesses(manager, name) - accesses_before[name] for name in names] == [121, 3, 1]
    assert manager.catalogue.find(".gdrkit-tiers/tier.json") is None


def test_open_by_another_gdrkit_process_is_counted_once(
    manager: TierManager, configuration: Configuration, opener: FileOpener
) -> None:
    create_file(manager, "file", 100, seed=1)
    accesses_before = count_accesses(manager, "file")
    with watch_all_tiers(manager):
        opener.open_by_name(configuration, "file", count=7)
    # The other process has not written its counts to the catalogue yet.
    assert count_accesses(manager, "file") == accesses_before
    opener.end()
    assert count_accesses(manager, "file") == accesses_before + 7


def test_new_file_of_another_program_is_known(
    manager: TierManager, configuration: Configuration, opener: FileOpener
) -> None:
    path = configuration.tier("ssd").directory / "new"
    removed_path = configuration.tier("ssd").directory / "gone"
    for new_path in (path, removed_path):
        new_path.write_bytes(b"x")
    with watch_all_tiers(manager):
        opener.open_files([path.parent], {"new": 4, "gone": 1})
        removed_path.unlink()
    manager.access_counter.flush()
    entry = manager.catalogue.find("new")
    assert entry is not None
    assert (entry.tier, entry.size_bytes, entry.accesses) == ("ssd", 1, 4)
    assert manager.catalogue.find("gone") is None


def test_renamed_folder_is_known_after_a_refresh(
    manager: TierManager, configuration: Configuration, opener: FileOpener
) -> None:
    hdd = configuration.tier("hdd").directory
    create_file(manager, "old/file", 100, seed=1)
    with watch_all_tiers(manager) as watcher:
        opener.open_files([hdd], {"old/file": 1})
        (hdd / "old").rename(hdd / "new")
        watcher.refresh()
        opener.open_files([hdd], {"new/file": 2})
    assert count_accesses(manager, "new/file") == 2


def test_open_through_another_mount_is_counted(
    manager: TierManager, configuration: Configuration, opener: FileOpener, tmp_path: Path
) -> None:
    create_file(manager, "folder/file", 100, seed=1)
    accesses_before = count_accesses(manager, "folder/file")
    (bind_mount := tmp_path / "bind").mkdir()
    subprocess.run(["mount", "--bind", configuration.tier("hdd").directory / "folder", bind_mount], check=True)
    try:
        with watch_all_tiers(manager):
            opener.open_files([bind_mount], {"file": 3})
    finally:
        subprocess.run(["umount", bind_mount], check=True)
    assert count_accesses(manager, "folder/file") == accesses_before + 3


@pytest.mark.parametrize(
    "file_system", [pytest.param(name, marks=needs(host.file_system(name))) for name in ("ext4", "xfs")]
)
def test_tier_with_its_own_file_system_is_watched(tmp_path: Path, opener: FileOpener, file_system: str) -> None:
    with mount_new_file_system(file_system, tmp_path / "nvme"), TierManager(make_configuration(tmp_path)) as manager:
        create_file(manager, "file", 100, seed=1, tier="nvme")
        accesses_before = count_accesses(manager, "file")
        with watch_all_tiers(manager):
            opener.open_files([tmp_path / "nvme"], {"file": 2})
        assert count_accesses(manager, "file") == accesses_before + 2


def test_dropped_reports_are_noticed(tmp_path: Path) -> None:
    queue_limit = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text())
    paths = [tmp_path / str(index) for index in range(50)]
    for path in paths:
        path.write_bytes(b"")
    folder_fd = os.open(tmp_path, os.O_RDONLY)
    with OpenReports() as reports:
        reports.add_file_system(folder_fd)
        # The kernel merges the reports of one process, so each round of opens needs a process of its own.
        for _ in range(queue_limit // len(paths) + 2):
            child_pid = os.fork()
            if child_pid == 0:
                for path in paths:
                    os.close(os.open(path, os.O_RDONLY))
                os._exit(0)
            os.waitpid(child_pid, 0)
        while reports.read():
            pass
        assert reports.overflow_count >= 1
    os.close(folder_fd)
