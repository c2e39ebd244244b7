"""Effects of a copy by gdrkit on the file system: modes, owners, special files, holes, names, durability and signals.

Version 0.1.0 had these defects. Each defect has a case:

- a copy of a setuid program was a setuid program of root
- other users could read a private file during the copy
- a device node was replaced by a file
- --sync did not sync the folder
- the copy of a procfs file was empty
- the holes of a sparse file were filled
- partial files stayed after a failure
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gds.faulty_file import FaultyFile
from support.faulty_fuse import FaultyMount
from support.mounts import mount_image_copy, mount_new_file_system
from support.other_user import folder_for_all_users, run_program
from support.processes import wait_until

from gdrkit import gds, pattern
from gdrkit.errors import ApiError, UsageError
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S = 60
# User and group id to which become_unprivileged() changes.
UNPRIVILEGED_UID = 65534
FILE_SYSTEMS = [
    pytest.param(file_system, id=file_system, marks=needs(host.file_system(file_system)))
    for file_system in ("ext4", "xfs")
]


def list_file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wait_until_empty(folder: Path) -> None:
    """Wait until the folder has no files.

    If a program deletes a file on FUSE while the file is open, libfuse renames it, and deletes it after the kernel has
    told libfuse that the file was closed. The kernel does this a short time after close() has returned.
    """
    wait_until(lambda: not list_file_names(folder), f"{folder} to become empty")


def copy_file(source: Path, destination: Path, **options: object) -> gds.CopyResult:
    return gds.copy_file(source, destination, device_index=gds.HOST, **options)  # type: ignore[arg-type] # any option.


def make_copy_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "gdrkit", "copy", *map(str, arguments), "--host"]


@pytest.fixture
def mount_without_tmpfile(tmp_path: Path) -> Iterator[FaultyMount]:
    """Yield a mount of a file system that, like NFS, does not support O_TMPFILE."""
    with FaultyMount(tmp_path / "fuse") as mount:
        with pytest.raises(OSError, match="not supported"):
            os.open(mount.mount, os.O_TMPFILE | os.O_RDWR)
        yield mount


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("mode", [0o4755, 0o2750, 0o1644, 0o600, 0o400, 0o666])
def test_mode_of_a_copy_is_that_of_cp(tmp_path: Path, mode: int, umask: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"#!/bin/sh\n")
    source.chmod(mode)
    # The command of gdrkit ends with the option --host. Here it comes after the paths, so it is cut off first.
    for tool_command in (["cp"], make_copy_command()[:-1]):
        folder = tmp_path / Path(tool_command[0]).name
        folder.mkdir()
        (folder / "old").write_bytes(b"")
        (folder / "old").chmod(0o640)
        for name in ("new", "old"):
            host_options = ["--host"] if len(tool_command) > 1 else []
            subprocess.run([*tool_command, str(source), str(folder / name), *host_options], check=True, umask=umask)
    cp_modes, gdrkit_modes = (
        [stat.S_IMODE((folder / name).stat().st_mode) for name in ("new", "old")]
        for folder in (tmp_path / "cp", tmp_path / Path(sys.executable).name)
    )
    assert gdrkit_modes == cp_modes


@needs(host.capability("CAP_SETUID"))
def test_copy_of_a_setuid_program_is_not_setuid(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"#!/bin/sh\n")
    os.chown(source, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    source.chmod(0o6755)
    copy_file(source, tmp_path / "copy")
    file_status = (tmp_path / "copy").stat()
    assert (stat.S_IMODE(file_status.st_mode), file_status.st_uid) == (0o755, os.geteuid())


@needs(host.capability("CAP_SETUID"))
def test_replaced_file_keeps_its_owner(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"1234")
    old_copy = tmp_path / "old"
    old_copy.touch(mode=0o640)
    os.chown(old_copy, 1234, 5678)
    copy_file(tmp_path / "source", old_copy)
    file_status = old_copy.stat()
    assert (file_status.st_uid, file_status.st_gid, stat.S_IMODE(file_status.st_mode)) == (1234, 5678, 0o640)


@needs(host.capability("CAP_SETUID"))
def test_group_bits_are_dropped_with_another_group() -> None:
    program = """
import sys
from pathlib import Path
from support.other_user import become_unprivileged
from gdrkit import gds
gds.engine_for(gds.HOST)
become_unprivileged()
folder = Path(sys.argv[1])
gds.copy_file(folder / "source", folder / "old", device_index=gds.HOST)
"""
    # The program runs as an unprivileged user, which cannot give the copy the group of the old file. So the copy must
    # not give the group bits of the old file to another group.
    with folder_for_all_users() as folder:
        folder.chmod(0o777)
        (folder / "source").write_bytes(b"1234")
        (folder / "old").touch()
        (folder / "old").chmod(0o664)
        os.chown(folder / "old", 1234, 5678)
        process = run_program(program, str(folder))
        file_status = (folder / "old").stat()
        assert (file_status.st_uid, stat.S_IMODE(file_status.st_mode)) == (UNPRIVILEGED_UID, 0o604), process.stderr


def test_partial_copy_has_no_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(MIB))
    source.chmod(0o600)
    name_lists_during_copy: list[list[str]] = []
    copy_file(
        source,
        tmp_path / "copy",
        on_progress=lambda _done_bytes, _total_bytes: name_lists_during_copy.append(list_file_names(tmp_path)),
    )
    assert name_lists_during_copy
    assert all(names == ["source"] for names in name_lists_during_copy)


@needs(host.fuse)
@pytest.mark.parametrize("has_old_copy", [False, True])
def test_partial_copy_is_private_without_tmpfile(
    tmp_path: Path, mount_without_tmpfile: FaultyMount, *, has_old_copy: bool
) -> None:
    source, folder = tmp_path / "source", mount_without_tmpfile.mount
    source.write_bytes(bytes(MIB))
    source.chmod(0o644 if has_old_copy else 0o600)
    if has_old_copy:
        (folder / "copy").touch(mode=0o600)
    modes_during_copy: list[int] = []

    def record_modes(_done_bytes: int, _total_bytes: int) -> None:
        modes_during_copy.extend(stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir())

    copy_file(source, folder / "copy", on_progress=record_modes)
    assert set(modes_during_copy) == {0o600}
    assert list_file_names(folder) == ["copy"]
    assert (folder / "copy").read_bytes() == bytes(MIB)


def test_special_file_as_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"1234")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, file_type in (("fifo", "a FIFO"), ("socket", "a socket")):
            status_before = (tmp_path / name).lstat()
            with pytest.raises(UsageError, match=f"is {file_type}; a regular file is required"):
                copy_file(tmp_path / "source", tmp_path / name)
            assert os.path.samestat((tmp_path / name).lstat(), status_before)


@needs(host.capability("CAP_SYS_ADMIN"))
def test_device_node_is_not_replaced_by_a_copy(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"1234")
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    arguments = make_copy_command(tmp_path / "source", tmp_path / "null")
    process = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "is a character device" in process.stderr
    assert stat.S_ISCHR((tmp_path / "null").lstat().st_mode)


def test_symbolic_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"1234")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("folder/target")
    copy_file(tmp_path / "source", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "target").read_bytes() == b"1234"


def test_symbolic_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="is a symbolic link to nowhere, which does not exist"):
        copy_file(tmp_path / "source", tmp_path / "link")
    assert list_file_names(tmp_path) == ["link", "source"]


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/sys/kernel/ostype", "/sys/devices/system/cpu/online"])
def test_file_without_a_size_is_read_to_its_end(tmp_path: Path, path: str, *, is_checked: bool) -> None:
    result = copy_file(Path(path), tmp_path / "copy", check=is_checked)
    data = (tmp_path / "copy").read_bytes()
    assert data.splitlines()[0] == Path(path).read_bytes().splitlines()[0]
    assert result.bytes == len(data) == sum(result.read.routes.values())
    assert "does not report the size" in result.read.why_not_direct


def test_file_of_one_byte_that_is_a_hole_stays_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.touch()
    os.truncate(source, 1)
    result = copy_file(source, tmp_path / "copy")
    assert (result.bytes, result.hole_bytes, (tmp_path / "copy").read_bytes()) == (1, 1, b"\0")


def test_holes_of_a_sparse_file_stay_holes(tmp_path: Path, seed: int) -> None:
    source, range_data = tmp_path / "source", pattern.payload(64 * KIB, seed=seed)
    with source.open("wb") as file:
        for offset in (4 * MIB, 5 * MIB, 40 * MIB):
            os.pwrite(file.fileno(), range_data, offset)
        os.ftruncate(file.fileno(), 100 * MIB + 1)
    progress: list[tuple[int, int]] = []
    result = copy_file(
        source,
        tmp_path / "copy",
        check=True,
        on_progress=lambda done_bytes, total_bytes: progress.append((done_bytes, total_bytes)),
    )
    # The file system may allocate up to twice the bytes of the three data ranges.
    assert (tmp_path / "copy").stat().st_blocks * 512 <= 2 * 3 * len(range_data)
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (result.bytes, result.hole_bytes) == (100 * MIB + 1, 100 * MIB + 1 - sum(result.read.routes.values()))
    assert progress == sorted(progress)
    assert progress[-1] == (100 * MIB + 1, 100 * MIB + 1)


def test_ranges_of_a_sparse_file_span_chunks(tmp_path: Path, seed: int) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for index in range(40):
            os.pwrite(file.fileno(), pattern.payload(20 * KIB, seed=seed + index), index * 64 * KIB)
    copy_file(source, tmp_path / "copy", chunk_bytes=50_001)
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_longest_name_can_be_copied_to(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"1234")
    for _ in ("new", "replaced"):
        copy_file(tmp_path / "source", tmp_path / ("n" * 255))
    assert (tmp_path / ("n" * 255)).read_bytes() == b"1234"


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
@pytest.mark.parametrize("has_old_copy", [False, True])
def test_synced_copy_survives_a_power_loss(tmp_path: Path, seed: int, file_system: str, *, has_old_copy: bool) -> None:
    data = pattern.payload(300 * KIB + 5, seed=seed)
    source = tmp_path / "source"
    source.write_bytes(data)
    with mount_new_file_system(file_system, tmp_path / "disk") as disk:
        if has_old_copy:
            (disk / "copy").write_bytes(b"old")
        subprocess.run(["sync"], check=True)
        subprocess.run([*make_copy_command(source, disk / "copy"), "--sync"], check=True)
        with mount_image_copy(file_system, disk, tmp_path / "disk-after-power-loss") as disk_after_power_loss:
            assert (disk_after_power_loss / "copy").read_bytes() == data
            assert stat.S_IMODE((disk_after_power_loss / "copy").stat().st_mode) == 0o644


@needs(host.fuse)
def test_failed_sync_leaves_no_copy(tmp_path: Path, mount_without_tmpfile: FaultyMount) -> None:
    source, folder = tmp_path / "source", mount_without_tmpfile.mount
    source.write_bytes(b"1234")
    mount_without_tmpfile.set_faults(fsync=errno.EIO)
    with pytest.raises(ApiError) as error_info:
        copy_file(source, folder / "copy", durable=True)
    assert error_info.value.errno == errno.EIO
    process = subprocess.run(
        [*make_copy_command(source, folder / "copy"), "--sync"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert "EIO" in process.stderr
    wait_until_empty(folder)
    copy_file(source, folder / "copy")
    assert (folder / "copy").read_bytes() == b"1234"


@needs(host.fuse)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("has_tmpfile", [False, True])
def test_signal_leaves_no_partial_copy(
    tmp_path: Path, seed: int, signal_number: signal.Signals, *, has_tmpfile: bool
) -> None:
    (tmp_path / "mount").mkdir()
    with contextlib.ExitStack() as stack:
        folder = tmp_path / "folder"
        if has_tmpfile:
            folder.mkdir()
        else:
            folder = stack.enter_context(FaultyMount(tmp_path / "fuse")).mount
        faulty_file = stack.enter_context(FaultyFile(tmp_path / "mount", length_bytes=4 * MIB, seed=seed))
        faulty_file.send(f"gate {2 * MIB} {4 * MIB}")
        # A child inherits ignored signals, and a shell starts background processes with SIGINT ignored. So this process
        # sets the default action before it starts the child, and restores the previous action at the end.
        stack.callback(signal.signal, signal_number, signal.signal(signal_number, signal.SIG_DFL))
        process = stack.enter_context(
            subprocess.Popen(make_copy_command(faulty_file.path, folder / "copy"), stderr=subprocess.PIPE, text=True)
        )
        faulty_file.expect_line("waiting")
        process.send_signal(signal_number)
        faulty_file.send("open")
        stderr = process.communicate(timeout=_TIMEOUT_S)[1]
        assert process.returncode == (130 if signal_number is signal.SIGINT else -signal_number), stderr
        assert "Traceback" not in stderr
        wait_until_empty(folder)


@needs(host.fuse)
def test_killed_copy_leaves_nothing(tmp_path: Path, seed: int) -> None:
    for name in ("mount", "folder"):
        (tmp_path / name).mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * MIB, seed=seed) as faulty_file:
        faulty_file.send(f"gate {2 * MIB} {4 * MIB}")
        with subprocess.Popen(make_copy_command(faulty_file.path, tmp_path / "folder" / "copy")) as process:
            faulty_file.expect_line("waiting")
            process.kill()
            faulty_file.send("open")
            assert process.wait(_TIMEOUT_S) == -signal.SIGKILL
    assert list_file_names(tmp_path / "folder") == []
