"""The system calls of a copy: the order of the fsync calls, and calls that fail."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest
from support.system_calls import SystemCall, run_observed

from gdrkit import cuda, gds
from gdrkit.errors import ApiError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NO_ID = 0xFFFF_FFFF


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for the copy. The file ``source`` is next to it."""
    (tmp_path / "source").write_bytes(bytes(64 * KIB))
    (tmp_path / "source").chmod(0o644)
    (tmp_path / "folder").mkdir()
    # The threads of the engine live longer than a copy, so the observed thread must not create them.
    gds.engine_for(gds.HOST)
    return tmp_path / "folder"


def run_copy(
    destination: Path, calls: str, reply: Callable[[SystemCall], int | None], *, durable: bool = False
) -> None:
    """Copy the file ``source`` to a path in the folder. `reply` returns the results of the named system calls."""
    source = destination.parent.parent / "source"
    run_observed(
        lambda: gds.copy_file(source, destination, device_index=gds.HOST, direct="never", durable=durable),
        *calls.split(),
        reply=reply,
    )


@pytest.mark.parametrize(("is_replaced", "naming"), [(False, ["linkat"]), (True, ["linkat", "renameat"])])
@pytest.mark.parametrize("durable", [False, True])
def test_durable_copy_syncs_data_then_name(
    folder: Path, naming: list[str], *, is_replaced: bool, durable: bool
) -> None:
    if is_replaced:
        (folder / "copy").write_bytes(b"old")
    calls: list[str] = []

    def record(call: SystemCall) -> None:
        is_of_folder = call.name == "fsync" and call.path == str(folder)
        calls.append("fsync of the folder" if is_of_folder else call.name)

    run_copy(folder / "copy", "fsync linkat renameat", record, durable=durable)
    assert calls == (["fsync", *naming, "fsync of the folder"] if durable else naming)


@needs(host.capability("CAP_SETUID"))
@pytest.mark.parametrize(
    ("refused", "group", "mode"), [([], 5678, 0o664), ([1234], 5678, 0o664), ([1234, NO_ID], None, 0o604)]
)
def test_replaced_file_keeps_its_group(folder: Path, refused: list[int], group: int | None, mode: int) -> None:
    copy = folder / "copy"
    copy.touch()
    os.chown(copy, 1234, 5678)
    copy.chmod(0o664)
    calls: list[tuple[int, ...]] = []

    def refuse(call: SystemCall) -> int | None:
        calls.append(call.arguments[1:3])
        return -errno.EPERM if call.arguments[1] in refused else None

    run_copy(copy, "fchown", refuse)
    assert calls == ([(1234, 5678), (NO_ID, 5678)] if refused else [(1234, 5678)])
    info = copy.stat()
    assert info.st_gid == (os.getegid() if group is None else group)
    assert stat.S_IMODE(info.st_mode) == mode


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS])
def test_file_system_without_tmpfile_gets_a_hidden_name(folder: Path, number: int) -> None:
    names: list[list[str]] = []

    def refuse(call: SystemCall) -> int | None:
        if call.name == "renameat":
            names.append([each.name for each in folder.iterdir()])
        return -number if call.name == "openat" and call.arguments[2] & os.O_TMPFILE == os.O_TMPFILE else None

    run_copy(folder / "copy", "openat renameat", refuse)
    ((name,),) = names
    assert name.startswith(".gdrkit-")
    assert name.endswith(".part")
    assert [each.name for each in folder.iterdir()] == ["copy"]
    assert (folder / "copy").read_bytes() == bytes(64 * KIB)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("openat", errno.EACCES),
        ("openat", errno.ENOSPC),
        ("fchmod", errno.EPERM),
        ("fsync", errno.EIO),
        ("linkat", errno.ENOSPC),
        ("renameat", errno.EIO),
    ],
)
def test_failed_call_leaves_the_old_file(folder: Path, name: str, number: int) -> None:
    copy = folder / "copy"
    copy.write_bytes(b"old")
    copy.chmod(0o640)

    def fail(call: SystemCall) -> int | None:
        return -number if name != "openat" or call.arguments[2] & os.O_TMPFILE == os.O_TMPFILE else None

    with pytest.raises(ApiError) as raised:
        run_copy(copy, name, fail, durable=True)
    assert (raised.value.operation, raised.value.errno) == ("create", number)
    assert raised.value.arguments == {"path": str(copy)}
    assert [each.name for each in folder.iterdir()] == ["copy"]
    assert copy.read_bytes() == b"old"


def test_name_that_appears_during_a_copy_is_replaced(folder: Path) -> None:
    calls: list[str] = []

    def create(call: SystemCall) -> None:
        if not calls:
            (folder / "copy").write_bytes(b"of another program")
        calls.append(call.name)

    run_copy(folder / "copy", "linkat renameat", create)
    assert calls == ["linkat", "linkat", "renameat"]
    assert [each.name for each in folder.iterdir()] == ["copy"]
    assert (folder / "copy").read_bytes() == bytes(64 * KIB)


def test_failed_truncate_of_a_sparse_copy_is_an_error(folder: Path) -> None:
    source = folder.parent / "source"
    os.truncate(source, MIB)
    with pytest.raises(ApiError) as raised:
        run_copy(folder / "copy", "ftruncate", lambda _call: -errno.EFBIG)
    assert (raised.value.operation, raised.value.errno) == ("ftruncate", errno.EFBIG)
    assert raised.value.arguments == {"path": str(folder / "copy")}
    assert list(folder.iterdir()) == []


def test_empty_file_that_cannot_be_read_is_an_error(folder: Path) -> None:
    source = folder.parent / "source"
    os.truncate(source, 0)
    with pytest.raises(ApiError) as raised:
        run_copy(folder / "copy", "pread64", lambda _call: -errno.EIO)
    assert (raised.value.operation, raised.value.errno) == ("read", errno.EIO)
    assert raised.value.arguments == {"path": str(source)}
    assert list(folder.iterdir()) == []


def test_hole_without_data_is_copied_unread(folder: Path) -> None:
    source = folder.parent / "source"
    os.truncate(source, 0)
    os.truncate(source, MIB)
    # The only read checks whether the stated size is true.
    reads: list[int] = []

    def fail(call: SystemCall) -> int:
        reads.append(call.arguments[3])
        return -errno.EIO

    run_copy(folder / "copy", "pread64", fail)
    assert reads == [MIB - 1]
    assert (folder / "copy").read_bytes() == bytes(MIB)


@needs(cuda_needs.device())
def test_bytes_pass_through_the_first_device_by_default(folder: Path) -> None:
    free: list[int] = []
    with cuda.Device(0) as device:
        before = device.memory_info().free_bytes

        def observe(_done: int, _whole: int) -> None:
            free.append(device.memory_info().free_bytes)

        (folder.parent / "source").write_bytes(bytes(8 * MIB))
        gds.copy_file(folder.parent / "source", folder / "copy", direct="never", on_progress=observe)
        assert min(free) <= before - 2 * 8 * MIB
        assert (folder / "copy").read_bytes() == bytes(8 * MIB)
