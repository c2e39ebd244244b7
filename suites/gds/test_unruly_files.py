"""Disks that fail or are full, and files that shrink during a read: the errno, and the bytes that arrived."""

from __future__ import annotations

import errno
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from gds.faulty_file import FaultyFile
from support.faulty_fuse import FaultyMount
from support.gds import PLACES, holding
from support.processes import wait_until

from gdrkit import gds, pattern
from gdrkit.errors import Api, Reason
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.cuda import Device

EVERY_KIND = pytest.mark.parametrize("kind", PLACES, indirect=True)
EVERY_ACCESS = pytest.mark.parametrize("access", ["automatic", "buffered"])
LENGTH = 24 * MIB
# More bytes than all threads of an engine read at a time.
LONG = 128 * MIB
# An offset inside a page, and inside a chunk.
BAD = 9 * MIB + 5 * KIB + 7


@pytest.fixture
def faulty(request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> Iterator[FaultyFile]:
    mount = tmp_path / "mount"
    mount.mkdir()
    with FaultyFile(mount, length_bytes=getattr(request, "param", LENGTH), seed=seed) as files:
        yield files


@needs(host.fuse)
@EVERY_KIND
@EVERY_ACCESS
def test_unreadable_byte_is_eio_after_the_bytes_before_it(
    faulty: FaultyFile, seed: int, kind: str, owner: Device | None, access: gds.Access
) -> None:
    faulty.send(f"eio {BAD}")
    with holding(kind, LENGTH, owner) as memory, gds.File(faulty.path, access=access, direct="never") as file:
        with pytest.raises(gds.TransferFailed) as failed:
            file.read_into(memory.buffer)
        assert (failed.value.errno, failed.value.reason) == (errno.EIO, Reason.IO_ERROR)
        assert (failed.value.api, failed.value.operation) == (Api.KERNEL, "pread")
        assert failed.value.transferred.parts == (BAD,)
        assert failed.value.transferred.bytes == BAD
        pattern.check(memory.content()[:BAD], seed=seed)
        # The same file and the same threads still work.
        offset = (BAD + 1) // MIB * MIB + MIB
        assert file.read_into(memory.buffer, file_offset_bytes=offset, length_bytes=MIB).bytes == MIB
        pattern.check(memory.content()[:MIB], seed=seed, offset_bytes=offset)


@needs(host.fuse)
@EVERY_KIND
def test_bytes_after_a_gap_are_not_counted(faulty: FaultyFile, seed: int, kind: str, owner: Device | None) -> None:
    faulty.send(f"eio {BAD}")
    faulty.send(f"gate {BAD} {BAD + 1}")
    with holding(kind, LENGTH, owner) as memory, gds.File(faulty.path, direct="never") as file:
        pending = file.start_read_into(memory.buffer)
        faulty.expect_line("waiting")
        # Other threads continue to read. Their bytes are after the byte that will never arrive.
        wait_until(lambda: pending.bytes_moved > BAD, "bytes after the gap", timeout_s=60)
        faulty.send("open")
        with pytest.raises(gds.TransferFailed) as failed:
            pending.result()
        assert (failed.value.transferred.bytes, failed.value.transferred.parts) == (BAD, (BAD,))
        pattern.check(memory.content()[:BAD], seed=seed)


@needs(host.fuse)
@EVERY_KIND
def test_short_read_of_an_unreadable_byte_is_eio(
    faulty: FaultyFile, seed: int, kind: str, owner: Device | None
) -> None:
    faulty.send(f"eio {BAD}")
    with holding(kind, 8 * KIB, owner) as memory, gds.File(faulty.path, direct="never") as file:
        with pytest.raises(gds.TransferFailed) as failed:
            file.read_into(memory.buffer, file_offset_bytes=BAD - 100, length_bytes=4 * KIB)
        assert failed.value.errno == errno.EIO
        assert failed.value.transferred.parts == (100,)
        pattern.check(memory.content()[:100], seed=seed, offset_bytes=BAD - 100)


@needs(host.fuse)
@EVERY_KIND
@EVERY_ACCESS
def test_unwritable_byte_is_eio_after_the_bytes_before_it(
    faulty: FaultyFile, seed: int, kind: str, owner: Device | None, access: gds.Access
) -> None:
    faulty.send(f"eio {BAD}")
    data = pattern.payload(16 * MIB, seed=seed + 1)
    with holding(kind, len(data), owner) as memory:
        memory.write(data)
        with gds.File(faulty.path, "r+", access=access, direct="never") as file:
            with pytest.raises(gds.TransferFailed) as failed:
                file.write_from(memory.buffer)
            assert (failed.value.errno, failed.value.operation) == (errno.EIO, "pwrite")
            assert failed.value.transferred.parts == (BAD,)
    with faulty.path.open("rb") as reopened:
        assert reopened.read(BAD) == data[:BAD]


@needs(host.fuse)
@EVERY_KIND
@EVERY_ACCESS
def test_file_that_shrinks_during_a_read_is_end_of_file(
    faulty: FaultyFile, seed: int, kind: str, owner: Device | None, access: gds.Access
) -> None:
    with holding(kind, LENGTH, owner) as memory, gds.File(faulty.path, access=access, direct="never") as file:
        faulty.send(f"gate {BAD} {LENGTH}")
        pending = file.start_read_into(memory.buffer)
        faulty.expect_line("waiting")
        faulty.send(f"end {BAD}")
        faulty.send("open")
        with pytest.raises(gds.TransferFailed) as failed:
            pending.result()
        assert (failed.value.reason, failed.value.errno) == (Reason.END_OF_FILE, None)
        assert failed.value.transferred.parts == (BAD,)
        contents = memory.content()
        pattern.check(contents[:BAD], seed=seed)
        assert set(contents[BAD:]) == {0xA5}


@needs(host.fuse)
@EVERY_KIND
@EVERY_ACCESS
@pytest.mark.parametrize("faulty", [LONG], indirect=True, ids=["long"])
def test_cancelled_read_reports_the_bytes_that_arrived(
    faulty: FaultyFile, seed: int, kind: str, owner: Device | None, access: gds.Access
) -> None:
    with holding(kind, LONG, owner) as memory, gds.File(faulty.path, access=access, direct="never") as file:
        faulty.send(f"gate 0 {LONG}")
        pending = file.start_read_into(memory.buffer)
        faulty.expect_line("waiting")
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        assert not pending.done()
        assert pending.cancel()
        faulty.send("open")
        with pytest.raises(gds.TransferFailed) as failed:
            pending.result()
        done = failed.value.transferred
        assert (failed.value.reason, failed.value.errno) == (Reason.CANCELLED, None)
        assert done.parts == (done.bytes,)
        # The chunks in progress were completed, and no other chunk was started.
        assert 0 < done.bytes < LONG
        pattern.check(memory.content()[: done.bytes], seed=seed)
        assert isinstance(pending.exception(), gds.TransferFailed)
        assert file.read_into(memory.buffer, length_bytes=MIB).bytes == MIB


@needs(host.fuse)
def test_etimedout_of_a_disk_is_no_timeout_of_result(tmp_path: Path) -> None:
    with FaultyMount(tmp_path / "fuse") as folder:
        (folder.below / "data").write_bytes(bytes(MIB))
        with gds.File(folder.mount / "data", access="buffered", direct="never") as file:
            folder.fail(read=errno.ETIMEDOUT)
            # A TimeoutError would mean that the transfer continues.
            with pytest.raises(gds.TransferFailed) as failed:
                file.start_read_into(bytearray(MIB)).result(60)
            error: object = failed.value
            assert failed.value.errno == errno.ETIMEDOUT
            assert isinstance(error, OSError)
            assert not isinstance(error, TimeoutError)


@needs(host.capability("CAP_SYS_ADMIN"))
@EVERY_KIND
@EVERY_ACCESS
def test_full_disk_is_enospc_after_the_written_bytes(
    tmp_path: Path, seed: int, kind: str, owner: Device | None, access: gds.Access
) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "gdrkit-small", str(mount)], check=True)
    try:
        data = pattern.payload(20 * MIB, seed=seed)
        with (
            holding(kind, len(data), owner) as memory,
            gds.File(mount / "file", "x", access=access, direct="never") as file,
        ):
            memory.write(data)
            with pytest.raises(gds.TransferFailed) as failed:
                file.write_from(memory.buffer)
            assert (failed.value.errno, failed.value.reason) == (errno.ENOSPC, Reason.NO_SPACE)
            count = failed.value.transferred.bytes
            assert failed.value.transferred.parts == (count,)
            assert count <= 8 * MIB
            with (mount / "file").open("rb+") as reopened:
                assert reopened.read(count) == data[:count]
                reopened.truncate(0)
            # As soon as there is free space, the same file can be written.
            assert file.write_from(memory.buffer, length_bytes=6 * MIB).bytes == 6 * MIB
            assert (mount / "file").read_bytes() == data[: 6 * MIB]
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@needs(host.fuse)
@pytest.mark.parametrize("length", [4 * KIB, MIB])
def test_other_threads_run_during_a_read(faulty: FaultyFile, seed: int, length: int) -> None:
    faulty.send(f"gate 0 {LENGTH}")
    memory = bytearray(length)
    with gds.File(faulty.path) as file, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(file.read_into, memory)
        # The line would never arrive if the reading thread kept the interpreter lock.
        faulty.expect_line("waiting")
        assert not reading.done()
        faulty.send("open")
        assert reading.result().bytes == length
    pattern.check(memory, seed=seed)
