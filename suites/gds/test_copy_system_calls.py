"""The system calls of a copy: the order of the fsync calls, and calls that fail."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest
from support.system_calls import SystemCall, run_with_intercepted_calls

from gdrkit import cuda, gds
from gdrkit.errors import ApiError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# The argument -1 of fchown(2) as an unsigned number of 32 bits. It leaves the owner or the group unchanged.
UNCHANGED_ID = 0xFFFF_FFFF


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for the copy. The file ``source`` is next to it."""
    (tmp_path / "source").write_bytes(bytes(64 * KIB))
    (tmp_path / "source").chmod(0o644)
    (tmp_path / "folder").mkdir()
    # The case observes the system calls of one thread and of the threads that it creates. The threads of the engine are
    # created here, so that they are not observed.
    gds.engine_for(gds.HOST)
    return tmp_path / "folder"


def run_copy(
    destination: Path, call_names: str, reply: Callable[[SystemCall], int | None], *, durable: bool = False
) -> None:
    """Copy the file ``source`` to `destination`. `reply` determines the results of the system calls in `call_names`."""
    source = destination.parent.parent / "source"
    run_with_intercepted_calls(
        lambda: gds.copy_file(source, destination, device_index=gds.HOST, direct="never", durable=durable),
        *call_names.split(),
        reply=reply,
    )


@pytest.mark.parametrize(("has_old_copy", "naming_calls"), [(False, ["linkat"]), (True, ["linkat", "renameat"])])
@pytest.mark.parametrize("durable", [False, True])
def test_durable_copy_syncs_data_then_name(
    folder: Path, naming_calls: list[str], *, has_old_copy: bool, durable: bool
) -> None:
    if has_old_copy:
        (folder / "copy").write_bytes(b"old")
    call_names: list[str] = []

    def record_name(call: SystemCall) -> None:
        is_folder_fsync = call.name == "fsync" and call.path == str(folder)
        call_names.append("fsync of the folder" if is_folder_fsync else call.name)

    run_copy(folder / "copy", "fsync linkat renameat", record_name, durable=durable)
    assert call_names == (["fsync", *naming_calls, "fsync of the folder"] if durable else naming_calls)


@needs(host.capability("CAP_SETUID"))
@pytest.mark.parametrize(
    ("refused_owners", "expected_gid", "expected_mode"),
    [([], 5678, 0o664), ([1234], 5678, 0o664), ([1234, UNCHANGED_ID], None, 0o604)],
)
def test_replaced_file_keeps_its_group(
    folder: Path, refused_owners: list[int], expected_gid: int | None, expected_mode: int
) -> None:
    copy = folder / "copy"
    copy.touch()
    os.chown(copy, 1234, 5678)
    copy.chmod(0o664)
    requested_ids: list[tuple[int, ...]] = []

    def refuse_owner(call: SystemCall) -> int | None:
        requested_ids.append(call.arguments[1:3])  # Arguments 1 and 2 of fchown(2) are the owner and the group.
        return -errno.EPERM if call.arguments[1] in refused_owners else None

    run_copy(copy, "fchown", refuse_owner)
    assert requested_ids == ([(1234, 5678), (UNCHANGED_ID, 5678)] if refused_owners else [(1234, 5678)])
    file_status = copy.stat()
    assert file_status.st_gid == (os.getegid() if expected_gid is None else expected_gid)
    assert stat.S_IMODE(file_status.st_mode) == expected_mode


@pytest.mark.parametrize("error_number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS])
def test_file_system_without_tmpfile_gets_a_hidden_name(folder: Path, error_number: int) -> None:
    name_lists: list[list[str]] = []

    def refuse_tmpfile(call: SystemCall) -> int | None:
        if call.name == "renameat":
            name_lists.append([path.name for path in folder.iterdir()])
        return -error_number if call.name == "openat" and call.arguments[2] & os.O_TMPFILE == os.O_TMPFILE else None

    run_copy(folder / "copy", "openat renameat", refuse_tmpfile)
    ((temporary_name,),) = name_lists
    assert temporary_name.startswith(".gdrkit-")
    assert temporary_name.endswith(".part")
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert (folder / "copy").read_bytes() == bytes(64 * KIB)


@pytest.mark.parametrize(
    ("call_name", "error_number"),
    [
        ("openat", errno.EACCES),
        ("openat", errno.ENOSPC),
        ("fchmod", errno.EPERM),
        ("fsync", errno.EIO),
        ("linkat", errno.ENOSPC),
        ("renameat", errno.EIO),
    ],
)
def test_failed_call_leaves_the_old_file(folder: Path, call_name: str, error_number: int) -> None:
    copy = folder / "copy"
    copy.write_bytes(b"old")
    copy.chmod(0o640)

    def fail_call(call: SystemCall) -> int | None:
        # Argument 2 of openat(2) has the flags. Only the open of the copy has O_TMPFILE.
        return -error_number if call_name != "openat" or call.arguments[2] & os.O_TMPFILE == os.O_TMPFILE else None

    with pytest.raises(ApiError) as error_info:
        run_copy(copy, call_name, fail_call, durable=True)
    assert (error_info.value.operation, error_info.value.errno) == ("create", error_number)
    assert error_info.value.arguments == {"path": str(copy)}
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert copy.read_bytes() == b"old"


def test_name_that_appears_during_a_copy_is_replaced(folder: Path) -> None:
    call_names: list[str] = []

    def create_destination(call: SystemCall) -> None:
        if not call_names:
            (folder / "copy").write_bytes(b"of another program")
        call_names.append(call.name)

    run_copy(folder / "copy", "linkat renameat", create_destination)
    assert call_names == ["linkat", "linkat", "renameat"]
    assert [path.name for path in folder.iterdir()] == ["copy"]
    assert (folder / "copy").read_bytes() == bytes(64 * KIB)


def test_failed_truncate_of_a_sparse_copy_is_an_error(folder: Path) -> None:
    source = folder.parent / "source"
    os.truncate(source, MIB)
    with pytest.raises(ApiError) as error_info:
        run_copy(folder / "copy", "ftruncate", lambda _call: -errno.EFBIG)
    assert (error_info.value.operation, error_info.value.errno) == ("ftruncate", errno.EFBIG)
    assert error_info.value.arguments == {"path": str(folder / "copy")}
    assert list(folder.iterdir()) == []


def test_empty_file_that_cannot_be_read_is_an_error(folder: Path) -> None:
    source = folder.parent / "source"
    os.truncate(source, 0)
    with pytest.raises(ApiError) as error_info:
        run_copy(folder / "copy", "pread64", lambda _call: -errno.EIO)
    assert (error_info.value.operation, error_info.value.errno) == ("read", errno.EIO)
    assert error_info.value.arguments == {"path": str(source)}
    assert list(folder.iterdir()) == []


def test_hole_without_data_is_copied_unread(folder: Path) -> None:
    source = folder.parent / "source"
    os.truncate(source, 0)
    os.truncate(source, MIB)
    # The copy reads only the last byte, to check that the file has the size that stat(2) reports. It does not need that
    # byte, so it succeeds although the read fails.
    read_offsets: list[int] = []

    def fail_read(call: SystemCall) -> int:
        read_offsets.append(call.arguments[3])  # Argument 3 of pread64(2) is the offset.
        return -errno.EIO

    run_copy(folder / "copy", "pread64", fail_read)
    assert read_offsets == [MIB - 1]
    assert (folder / "copy").read_bytes() == bytes(MIB)


@needs(cuda_needs.device())
def test_bytes_pass_through_the_first_device_by_default(folder: Path) -> None:
    free_bytes: list[int] = []
    with cuda.Device(0) as device:
        free_bytes_before = device.memory_info().free_bytes

        def record_free_bytes(_done_bytes: int, _total_bytes: int) -> None:
            free_bytes.append(device.memory_info().free_bytes)

        (folder.parent / "source").write_bytes(bytes(8 * MIB))
        gds.copy_file(folder.parent / "source", folder / "copy", direct="never", on_progress=record_free_bytes)
        # The copy allocates two chunks, each as large as the file.
        assert min(free_bytes) <= free_bytes_before - 2 * 8 * MIB
        assert (folder / "copy").read_bytes() == bytes(8 * MIB)
