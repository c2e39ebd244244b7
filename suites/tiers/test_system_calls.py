"""The system calls of a migration of a file to another storage tier: order of the fsync calls, locks, and failures."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.system_calls import SystemCall, run_with_intercepted_calls
from support.tier_world import create_file, read_contents, select_errors

from gdrkit import evidence, pattern
from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Phase
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.tiers import Configuration, TierManager

# The result that replaces a system call: a number of at least 0, or a negative errno. The kernel does not execute the
# call then. With None, the kernel executes the call.
Reply = int | None
# The two system calls by which os.preadv() of Python may read, separated by a blank.
READ_CALLS = "preadv preadv2"


def run_move(manager: TierManager, name: str, *, reply: Callable[[SystemCall], Reply], call_names: str) -> None:
    """Move a file to the fastest tier. `reply` gives the results of the system calls that `call_names` lists."""
    run_with_intercepted_calls(lambda: manager.move(name, "nvme"), *call_names.split(), reply=reply)


def require_failed_move(
    manager: TierManager, name: str, *, reply: Callable[[SystemCall], Reply], call_names: str
) -> ApiError:
    """Start a migration that must fail, and return its error.

    The parameters are the same as in :func:`run_move`. Check that the file is unchanged, and that the migration has
    left no copy and no reservation.
    """
    data = read_contents(manager, name)
    with pytest.raises(ApiError) as error_info:
        run_move(manager, name, reply=reply, call_names=call_names)
    assert (manager.find(name).tier, read_contents(manager, name)) == ("hdd", data)
    assert not select_errors(manager.check())
    assert not manager.catalogue.reserved_move_ids()
    return error_info.value


def trace_move(manager: TierManager, root: Path, name: str) -> list[str]:
    """Move a file, and return its phases and fsync(2) calls in their order, without the calls for the catalogue.

    Paths are relative to `root`.
    """
    trace: list[str] = []

    def record_fsync(call: SystemCall) -> None:
        if call.path.startswith(str(root)):
            path = Path(call.path).relative_to(root)
            # The name of a copy or of a record contains the id of the migration, which is random.
            path_with_placeholder = path.with_name("ID") if path.parent.name in {"incoming", "moves"} else path
            trace.append(f"fsync {path_with_placeholder}")

    def observe(phase: Phase, _name: str, offset_bytes: int) -> None:
        trace.append(f"{phase.value} {offset_bytes}")

    run_with_intercepted_calls(lambda: manager.move(name, "nvme", observe=observe), "fsync", reply=record_fsync)
    return [entry for entry in trace if "catalogue/" not in entry]


def test_each_step_is_synced_before_the_next(manager: TierManager, configuration: Configuration) -> None:
    size_bytes = 4 * MIB + 5
    create_file(manager, "a/file", size_bytes, seed=1)
    (configuration.tier("nvme").directory / "a").mkdir()
    gdrkit_folder = ".gdrkit-tiers"
    assert trace_move(manager, configuration.catalogue.parent, "a/file") == [
        "record 0",
        *(f"fsync nvme/{gdrkit_folder}/{name}" for name in ("moves/ID", "moves", "incoming")),
        *(f"copy {offset}" for offset in (0, 4 * MIB, size_bytes)),
        f"attributes {size_bytes}",
        f"sync {size_bytes}",
        f"fsync nvme/{gdrkit_folder}/incoming/ID",
        *(f"verify {offset}" for offset in (0, 4 * MIB)),
        f"rename {size_bytes}",
        f"folder {size_bytes}",
        "fsync nvme/a",
        f"retire {size_bytes}",
        f"retired {size_bytes}",
        f"fsync hdd/{gdrkit_folder}/retired",
        "fsync hdd/a",
        f"catalogue {size_bytes}",
        f"remove {size_bytes}",
        f"fsync hdd/{gdrkit_folder}/retired",
        f"forget {size_bytes}",
        f"fsync nvme/{gdrkit_folder}/moves",
        f"done {size_bytes}",
    ]


def test_undone_migration_is_synced(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "a/file", 1000, seed=1)
    synced_paths: list[str] = []

    def fail_after_retirement(phase: Phase, _name: str, _offset_bytes: int) -> None:
        synced_paths.clear()
        if phase is Phase.RETIRED:
            raise OSError(errno.EIO, "injected by the case")

    def move() -> None:
        manager.move("a/file", "nvme", observe=fail_after_retirement)

    with pytest.raises(ApiError):
        run_with_intercepted_calls(move, "fsync", reply=lambda call: synced_paths.append(call.path))
    hdd, nvme = (configuration.tier(tier).directory for tier in ("hdd", "nvme"))
    tier_paths = [Path(path) for path in synced_paths if configuration.catalogue not in Path(path).parents]
    assert tier_paths == [hdd / "a", hdd / ".gdrkit-tiers/retired", nvme / ".gdrkit-tiers/moves"]


def test_copy_is_read_from_the_disk_after_its_sync(manager: TierManager) -> None:
    create_file(manager, "file", 100 * KIB, seed=1)
    calls: list[tuple[str, tuple[int, ...]]] = []

    def record_call(call: SystemCall) -> None:
        if "/incoming/" in call.path:
            # The arguments of fadvise64 are: descriptor, offset, length, advice. preadv2 is recorded as preadv.
            calls.append((call.name.removesuffix("2"), call.arguments[1:4] if call.name == "fadvise64" else ()))

    run_move(manager, "file", reply=record_call, call_names=f"fsync fadvise64 {READ_CALLS}")
    assert calls == [("fsync", ()), ("fadvise64", (0, 0, os.POSIX_FADV_DONTNEED)), ("preadv", ())]


def test_copy_is_private_and_locked_in_every_phase(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 1000, seed=1)
    nvme = configuration.tier("nvme").directory
    copy_modes = set()
    locked_phases = []

    def observe(phase: Phase, _name: str, _offset_bytes: int) -> None:
        # The copy has a temporary name in `incoming`, and its final name after the rename.
        copy_paths = [*(nvme / ".gdrkit-tiers/incoming").iterdir(), *nvme.glob("file")]
        for path in copy_paths:
            if phase in {Phase.COPY, Phase.ATTRIBUTES}:
                copy_modes.add(path.stat().st_mode & 0o7777)
            with path.open("rb") as copy:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(copy, fcntl.LOCK_SH | fcntl.LOCK_NB)
                locked_phases.append(phase)

    manager.move("file", "nvme", observe=observe)
    assert copy_modes == {0o600}
    assert set(locked_phases) == set(Phase) - {Phase.RECORD}
    with (nvme / "file").open("rb") as copy:
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("failing_phase", [None, Phase.COPY, Phase.REMOVE])
def test_migration_leaves_no_descriptor_open(manager: TierManager, failing_phase: Phase | None) -> None:
    create_file(manager, "file", 1000, seed=1)
    # A first migration opens the descriptors that the manager keeps open.
    create_file(manager, "before", 1000, seed=1, tier="nvme")

    def fail_in_phase(phase: Phase, _name: str, _offset_bytes: int) -> None:
        if phase is failing_phase:
            raise OSError(errno.EIO, "injected by the case")

    descriptor_count_before = len(evidence.descriptor_targets())
    try:
        manager.move("file", "nvme", observe=fail_in_phase)
    except ApiError:
        assert failing_phase is not None
    assert len(evidence.descriptor_targets()) == descriptor_count_before


def test_file_that_moves_before_its_lock_is_found_again(manager: TierManager, configuration: Configuration) -> None:
    data = create_file(manager, "file", 1000, seed=1)
    hdd, ssd = (configuration.tier(tier).directory for tier in ("hdd", "ssd"))

    def move_away(call: SystemCall) -> None:
        if call.path == str(hdd / "file"):
            (hdd / "file").rename(ssd / "file")

    run_move(manager, "file", reply=move_away, call_names="flock")
    assert (read_contents(manager, "file"), (ssd / "file").exists()) == (data, False)
    assert (configuration.tier("nvme").directory / "file").read_bytes() == data


def test_file_replaced_before_its_lock_is_migrated(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 1000, seed=1)
    hdd = configuration.tier("hdd").directory
    (hdd / "new").write_bytes(b"saved by rename")

    def replace_file(call: SystemCall) -> None:
        if call.path == str(hdd / "file") and (hdd / "new").exists():
            (hdd / "new").rename(hdd / "file")

    run_move(manager, "file", reply=replace_file, call_names="flock")
    assert (configuration.tier("nvme").directory / "file").read_bytes() == b"saved by rename"
    assert not (hdd / "file").exists()


def is_copy(call: SystemCall) -> bool:
    """Return whether a call is on the copy of a migration."""
    return "/incoming/" in call.path


@pytest.mark.parametrize(
    ("call_names", "error_number", "reason"),
    [
        ("ftruncate", errno.EFBIG, Reason.NO_SPACE),
        ("fchmod", errno.EPERM, Reason.NO_PERMISSION),
        ("fsetxattr", errno.EOPNOTSUPP, Reason.NOT_SUPPORTED),
        ("fsetxattr", errno.ENOSPC, Reason.NO_SPACE),
        ("fsync", errno.EDQUOT, Reason.NO_SPACE),
        ("fsync", errno.EIO, Reason.IO_ERROR),
        (READ_CALLS, errno.EIO, Reason.IO_ERROR),
        ("flock", errno.ENOLCK, Reason.OTHER),
    ],
)
def test_failed_call_on_the_copy_ends_the_migration(
    manager: TierManager, configuration: Configuration, call_names: str, error_number: int, reason: Reason
) -> None:
    create_file(manager, "file", 1000, seed=1)
    os.setxattr(configuration.tier("hdd").directory / "file", "user.origin", b"here")
    error = require_failed_move(
        manager, "file", reply=lambda call: -error_number if is_copy(call) else None, call_names=call_names
    )
    assert (error.errno, error.reason, error.operation) == (error_number, reason, "migrate")
    assert error.arguments == {"name": "file", "source": "hdd", "destination": "nvme"}


@pytest.mark.parametrize(
    ("error_number", "is_moved"),
    [(errno.EOPNOTSUPP, True), (errno.ENOSYS, True), (errno.EIO, False), (errno.EACCES, False)],
)
def test_file_moves_if_attributes_are_unsupported(manager: TierManager, error_number: int, *, is_moved: bool) -> None:
    create_file(manager, "file", 1000, seed=1)
    if is_moved:
        run_move(manager, "file", reply=lambda _call: -error_number, call_names="flistxattr")
        assert manager.find("file").tier == "nvme"
    else:
        assert (
            require_failed_move(manager, "file", reply=lambda _call: -error_number, call_names="flistxattr").errno
            == error_number
        )


def test_file_moves_if_its_access_time_cannot_be_kept(manager: TierManager) -> None:
    data = create_file(manager, "file", 1000, seed=1)
    refused_flags = []

    def refuse_noatime(call: SystemCall) -> Reply:
        # The arguments of fcntl are: descriptor, command, and here the flags of the descriptor.
        if call.arguments[1] != fcntl.F_SETFL:
            return None
        refused_flags.append(call.arguments[2] & os.O_NOATIME)
        return -errno.EPERM

    run_move(manager, "file", reply=refuse_noatime, call_names="fcntl")
    assert refused_flags == [os.O_NOATIME]
    assert (manager.find("file").tier, read_contents(manager, "file")) == ("nvme", data)


def test_owner_is_set_only_if_it_differs(manager: TierManager, configuration: Configuration) -> None:
    create_file(manager, "file", 1000, seed=1)
    run_move(manager, "file", reply=lambda call: -errno.EPERM if is_copy(call) else None, call_names="fchown")
    assert manager.find("file").tier == "nvme"
    if os.geteuid() == 0:
        for owner in ((1234, 0), (0, 1234)):
            manager.move("file", "hdd")
            os.chown(configuration.tier("hdd").directory / "file", *owner)
            error = require_failed_move(
                manager, "file", reply=lambda call: -errno.EPERM if is_copy(call) else None, call_names="fchown"
            )
            assert error.reason is Reason.NO_PERMISSION
            manager.move("file", "nvme")


def test_file_that_ends_early_is_busy(manager: TierManager) -> None:
    create_file(manager, "file", 4 * MIB + 5, seed=1)

    def report_end_of_file(call: SystemCall) -> Reply:
        # The arguments of preadv are: descriptor, address of the iovecs, their number, file offset.
        return 0 if call.path.endswith("hdd/file") and call.arguments[3] == 4 * MIB else None

    error = require_failed_move(manager, "file", reply=report_end_of_file, call_names=READ_CALLS)
    assert (error.reason, error.operation, error.errno) == (Reason.BUSY, "read", errno.EBUSY)
    assert error.arguments == {"offset_bytes": 4 * MIB}


def test_short_reads_are_continued(manager: TierManager) -> None:
    data = create_file(manager, "file", 1000, seed=1)
    read_positions: list[tuple[bool, int]] = []

    def read_300_bytes(call: SystemCall) -> Reply:
        descriptor, iovecs_address, _, offset_bytes, *_ = call.arguments
        read_position = (is_copy(call), offset_bytes)
        if read_position in read_positions:
            return -errno.EIO  # Without an error, a migration that repeats a read would never end.
        read_positions.append(read_position)
        address, length_bytes = (ctypes.c_size_t * 2).from_address(iovecs_address)  # The fields of struct iovec.
        buffer = (ctypes.c_char * min(length_bytes, 300)).from_address(address)
        return os.preadv(descriptor, [buffer], offset_bytes)

    run_move(manager, "file", reply=read_300_bytes, call_names=READ_CALLS)
    assert read_positions == [
        (is_read_of_copy, offset_bytes) for is_read_of_copy in (False, True) for offset_bytes in (0, 300, 600, 900)
    ]
    assert (manager.find("file").tier, read_contents(manager, "file")) == ("nvme", data)


@needs(host.capability("CAP_SYS_ADMIN"))
@pytest.mark.parametrize("attribute", ["security.ima", "security.evm", "security.selinux"])
def test_label_of_the_old_location_is_not_copied(
    manager: TierManager, configuration: Configuration, attribute: str
) -> None:
    create_file(manager, "file", 1000, seed=1)
    path = configuration.tier("hdd").directory / "file"
    os.setxattr(path, attribute, b"\x01" + bytes(20))
    os.setxattr(path, "user.kept", b"yes")
    manager.move("file", "nvme")
    moved_path = configuration.tier("nvme").directory / "file"
    assert os.listxattr(moved_path) == ["user.kept"]


# Offsets in the holes of the file: at its start, directly before and after its data, and at its end.
@pytest.mark.parametrize("offset_bytes", [0, 12 * MIB - 1, 12 * MIB + 64 * KIB, 30 * MIB - 1])
def test_hole_with_data_in_the_copy_is_an_error(
    manager: TierManager, configuration: Configuration, offset_bytes: int
) -> None:
    with manager.open("sparse", "a+") as file:
        os.pwrite(file.fileno(), pattern.payload(64 * KIB, seed=1), 12 * MIB)
        os.ftruncate(file.fileno(), 30 * MIB)
    incoming_folder = configuration.tier("nvme").directory / ".gdrkit-tiers/incoming"

    def write_into_hole(phase: Phase, _name: str, _offset_bytes: int) -> None:
        if phase is Phase.SYNC:
            (copy_path,) = incoming_folder.iterdir()
            with copy_path.open("r+b") as file:
                os.pwrite(file.fileno(), b"x", offset_bytes)

    data = read_contents(manager, "sparse")
    with pytest.raises(ApiError) as error_info:
        manager.move("sparse", "nvme", observe=write_into_hole)
    error = error_info.value
    assert (error.errno, error.reason, error.operation) == (errno.EIO, Reason.IO_ERROR, "read")
    # The error names the offset of the chunk, which has at most 4 MiB.
    assert 0 <= offset_bytes - error.arguments["offset_bytes"] < 4 * MIB  # type: ignore[operator] # a number.
    assert read_contents(manager, "sparse") == data
    assert not select_errors(manager.check())


@pytest.mark.parametrize(("error_number", "is_moved"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_copy_without_seek_data_is_read_completely(manager: TierManager, error_number: int, *, is_moved: bool) -> None:
    with manager.open("sparse", "a+") as file:
        os.pwrite(file.fileno(), b"x", 9 * MIB)
        os.ftruncate(file.fileno(), 10 * MIB)

    def refuse_seek_data(call: SystemCall) -> Reply:
        # The arguments of lseek are: descriptor, offset, whence.
        return -error_number if is_copy(call) and call.arguments[2] == os.SEEK_DATA else None

    if is_moved:
        run_move(manager, "sparse", reply=refuse_seek_data, call_names="lseek")
        assert read_contents(manager, "sparse") == bytes(9 * MIB) + b"x" + bytes(MIB - 1)
    else:
        assert require_failed_move(manager, "sparse", reply=refuse_seek_data, call_names="lseek").errno == error_number
