"""Tests of migrations: the return value, locks, all fields of the errors, and other files in the place of the file."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING

import pytest
from support.system_calls import SystemCall, run_with_intercepted_calls
from support.tier_world import create_file, read_contents, select_errors

from gdrkit.errors import Api, ApiError, DataMismatch, GdrkitError, Reason
from gdrkit.tiers import Phase
from gdrkit.tiers.copying import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.tiers import Configuration, TierManager

# Number of hexadecimal digits of the id of a migration.
MIGRATION_ID_DIGIT_COUNT = 32


@pytest.fixture
def hdd(configuration: Configuration) -> Path:
    """Return the folder of the slowest tier, in which new files are created."""
    return configuration.tier("hdd").directory


@pytest.fixture
def nvme(configuration: Configuration) -> Path:
    """Return the folder of the fastest tier, the destination of every migration in this module."""
    return configuration.tier("nvme").directory


def get_migration_error(manager: TierManager, phase: Phase, action: Callable[[], object]) -> GdrkitError:
    """Migrate the file ``file``, call `action` at the beginning of `phase`, and return the error of the migration."""

    def observe(current_phase: Phase, _name: str, offset_bytes: int) -> None:
        # VERIFY is also observed before each further chunk.
        if current_phase is phase and not (phase is Phase.VERIFY and offset_bytes):
            action()

    with pytest.raises((ApiError, DataMismatch)) as error_info:
        manager.move("file", "nvme", observe=observe)
    return error_info.value


def write_to_copy(nvme: Path, data: bytes, offset_bytes: int) -> None:
    """Write bytes into the copy of the migration that is in progress."""
    (copy_path,) = (nvme / ".gdrkit-tiers/incoming").iterdir()
    with copy_path.open("r+b") as file:
        os.pwrite(file.fileno(), data, offset_bytes)


def raise_io_error() -> None:
    """Raise the error of a failing device."""
    raise OSError(errno.EIO, "injected by the case")


@pytest.mark.parametrize("size_bytes", [0, 1, 5000])
def test_move_returns_the_allocated_bytes(manager: TierManager, hdd: Path, size_bytes: int) -> None:
    create_file(manager, "file", size_bytes, seed=1)
    allocated_bytes = (hdd / "file").stat().st_blocks * 512
    assert manager.move("file", "nvme") == allocated_bytes
    assert manager.move("file", "nvme") == 0


def test_migration_takes_its_locks_in_order(manager: TierManager, hdd: Path, nvme: Path) -> None:
    create_file(manager, "file", 1000, seed=1)
    # Path and operation of each call of flock(2).
    flock_calls: list[tuple[str, int]] = []

    def record_lock(call: SystemCall) -> None:
        folder, _, name = call.path.rpartition("/")
        # The name of a copy or of a record contains the id of the migration, which is random.
        flock_calls.append((folder if len(name) >= MIGRATION_ID_DIGIT_COUNT else call.path, call.arguments[1]))

    run_with_intercepted_calls(lambda: manager.move("file", "nvme"), "flock", reply=record_lock)
    gdrkit_folder = nvme / ".gdrkit-tiers"
    assert flock_calls[:-1] == [
        (str(hdd / "file"), fcntl.LOCK_EX | fcntl.LOCK_NB),
        (str(gdrkit_folder / "lock"), fcntl.LOCK_SH),
        (str(gdrkit_folder / "incoming"), fcntl.LOCK_EX),
        (str(gdrkit_folder / "moves"), fcntl.LOCK_EX),
    ]
    assert flock_calls[-1][1] == fcntl.LOCK_UN


def test_file_moved_by_another_program_is_found(manager: TierManager, hdd: Path, nvme: Path) -> None:
    data = create_file(manager, "file", 1000, seed=1)
    (hdd / "file").rename(hdd.parent / "ssd" / "file")
    manager.move("file", "nvme")
    assert (nvme / "file").read_bytes() == data


@pytest.mark.parametrize("offset_bytes", [0, 999, CHUNK_BYTES + 7, CHUNK_BYTES + 999])
def test_changed_byte_in_the_copy_is_a_data_mismatch(manager: TierManager, nvme: Path, offset_bytes: int) -> None:
    size_bytes = offset_bytes // CHUNK_BYTES * CHUNK_BYTES + 1000
    data = create_file(manager, "file", size_bytes, seed=1)
    wrong_byte = bytes([data[offset_bytes] ^ 1])
    error = get_migration_error(manager, Phase.SYNC, lambda: write_to_copy(nvme, wrong_byte, offset_bytes))
    assert isinstance(error, DataMismatch)
    assert (error.first_offset_bytes, error.length_bytes) == (offset_bytes, size_bytes)
    assert error.expected == data[offset_bytes : offset_bytes + 16]
    assert error.actual == wrong_byte + error.expected[1:]
    assert read_contents(manager, "file") == data


def test_byte_that_is_read_wrong_only_once_is_an_io_error(manager: TierManager, nvme: Path) -> None:
    data = create_file(manager, "file", CHUNK_BYTES + 1000, seed=1)
    # The case corrupts a byte of the copy before the first chunk is verified, and restores the byte before the second.
    replacement_bytes = iter([bytes([data[5] ^ 1]), data[5:6]])

    def observe(phase: Phase, _name: str, _offset_bytes: int) -> None:
        replacement_byte = next(replacement_bytes, None) if phase is Phase.VERIFY else None
        if replacement_byte is not None:
            write_to_copy(nvme, replacement_byte, 5)

    with pytest.raises(ApiError, match="a second comparison finds no difference") as error_info:
        manager.move("file", "nvme", observe=observe)
    assert (error_info.value.errno, error_info.value.reason) == (errno.EIO, Reason.IO_ERROR)
    assert read_contents(manager, "file") == data


@pytest.mark.parametrize("phase", [Phase.FORGET, Phase.DONE])
def test_failure_after_the_removal_notes_the_new_tier(
    manager: TierManager, hdd: Path, nvme: Path, phase: Phase
) -> None:
    data = create_file(manager, "file", 1000, seed=1)
    error = get_migration_error(manager, phase, raise_io_error)
    assert error.__notes__ == ["'file' was moved to nvme, although a later step failed"]
    assert (nvme / "file").read_bytes() == data
    assert not (hdd / "file").exists()
    manager.check(repair=True)
    assert not select_errors(manager.check())
    assert (manager.find("file").tier, read_contents(manager, "file")) == ("nvme", data)


# FORGET and DONE, the last two phases, follow the removal.
@pytest.mark.parametrize("phase", list(Phase)[:-2])
def test_failure_before_the_removal_has_no_note(manager: TierManager, phase: Phase) -> None:
    create_file(manager, "file", 1000, seed=1)
    error = get_migration_error(manager, phase, raise_io_error)
    assert isinstance(error, ApiError)
    assert not hasattr(error, "__notes__")
    assert (error.api, error.operation, error.errno, error.reason) == (
        Api.KERNEL,
        "migrate",
        errno.EIO,
        Reason.IO_ERROR,
    )
    assert error.arguments == {"name": "file", "source": "hdd", "destination": "nvme"}


def test_hard_link_error_has_every_field(manager: TierManager, hdd: Path) -> None:
    create_file(manager, "file", 1000, seed=1)
    for name in ("second", "third"):
        (hdd / name).hardlink_to(hdd / "file")
    with pytest.raises(ApiError) as error_info:
        manager.move("file", "nvme")
    error = error_info.value
    assert (error.api, error.operation, error.status, error.status_name) == (Api.NONE, "migrate", None, "hard links")
    assert (error.errno, error.reason) == (None, Reason.NOT_SUPPORTED)
    assert error.arguments == {"name": "file", "links": 3}
    assert "remove the other names" in error.what_to_do


@pytest.mark.parametrize("phase", [Phase.RETIRE, Phase.REMOVE])
def test_missing_copy_error_has_every_field(manager: TierManager, nvme: Path, phase: Phase) -> None:
    create_file(manager, "file", 1000, seed=1)
    error = get_migration_error(manager, phase, (nvme / "file").unlink)
    assert isinstance(error, ApiError)
    assert (error.operation, error.errno, error.arguments) == (
        "migrate",
        errno.ENOENT,
        {"name": "file", "tier": "nvme"},
    )


def test_symbolic_link_in_place_of_the_file_is_busy(manager: TierManager, hdd: Path, nvme: Path) -> None:
    data = create_file(manager, "file", 1000, seed=1)

    def replace_by_symbolic_link() -> None:
        (hdd / "file").rename(hdd / "other")
        (hdd / "file").symlink_to(hdd / "other")

    error = get_migration_error(manager, Phase.RETIRE, replace_by_symbolic_link)
    assert isinstance(error, ApiError)
    assert (error.operation, error.reason, error.arguments) == ("migrate", Reason.BUSY, {"name": "file"})
    assert (hdd / "file").is_symlink()
    assert (hdd / "other").read_bytes() == data
    assert not (nvme / "file").exists()


def test_symbolic_link_in_place_of_the_copy_stays(manager: TierManager, hdd: Path, nvme: Path) -> None:
    data = create_file(manager, "file", 1000, seed=1)

    def replace_by_symbolic_link() -> None:
        (nvme / "file").rename(nvme / "elsewhere")
        (nvme / "file").symlink_to(nvme / "elsewhere")
        raise_io_error()

    error = get_migration_error(manager, Phase.FOLDER, replace_by_symbolic_link)
    (note,) = error.__notes__
    assert "unlink(name='file') failed: File exists (EEXIST)" in note
    assert "another file has the name" in note
    assert (nvme / "file").is_symlink()
    assert (hdd / "file").read_bytes() == data
