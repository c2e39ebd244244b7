"""Transfers with disks that fail or are full, and with files that shrink: the errno, and the transferred bytes."""

from __future__ import annotations

import errno
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from gds.faulty_file import FaultyFile
from support.faulty_fuse import FaultyMount
from support.gds import HOST_AND_DEVICE, allocate_memory
from support.processes import wait_until

from gdrkit import gds, pattern
from gdrkit.errors import Api, Reason
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.cuda import Device

ON_HOST_AND_DEVICE = pytest.mark.parametrize("memory_kind", HOST_AND_DEVICE, indirect=True)
AUTOMATIC_AND_BUFFERED = pytest.mark.parametrize("access", ["automatic", "buffered"])
LENGTH_BYTES = 24 * MIB
# More bytes than all threads of an engine read at a time.
LONG_BYTES = 128 * MIB
# Offset of the byte that fails. It is in the middle of a page and of a chunk.
BAD_OFFSET = 9 * MIB + 5 * KIB + 7


@pytest.fixture
def faulty_file(request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> Iterator[FaultyFile]:
    """Yield a faulty file of `LENGTH_BYTES`, or of the length in the parameter of the case."""
    mount = tmp_path / "mount"
    mount.mkdir()
    with FaultyFile(mount, length_bytes=getattr(request, "param", LENGTH_BYTES), seed=seed) as opened_file:
        yield opened_file


@needs(host.fuse)
@ON_HOST_AND_DEVICE
@AUTOMATIC_AND_BUFFERED
def test_unreadable_byte_is_eio_after_the_bytes_before_it(
    faulty_file: FaultyFile, seed: int, memory_kind: str, owner_device: Device | None, access: gds.Access
) -> None:
    faulty_file.send(f"eio {BAD_OFFSET}")
    with (
        allocate_memory(memory_kind, LENGTH_BYTES, owner_device) as memory,
        gds.File(faulty_file.path, access=access, direct="never") as file,
    ):
        with pytest.raises(gds.TransferFailed) as error_info:
            file.read_into(memory.buffer)
        assert (error_info.value.errno, error_info.value.reason) == (errno.EIO, Reason.IO_ERROR)
        assert (error_info.value.api, error_info.value.operation) == (Api.KERNEL, "pread")
        assert error_info.value.partial_result.range_bytes == (BAD_OFFSET,)
        assert error_info.value.partial_result.bytes == BAD_OFFSET
        pattern.check(memory.read_all()[:BAD_OFFSET], seed=seed)
        # The file and the threads of the engine can still be used.
        next_mib_offset = (BAD_OFFSET + 1) // MIB * MIB + MIB
        assert file.read_into(memory.buffer, file_offset_bytes=next_mib_offset, length_bytes=MIB).bytes == MIB
        pattern.check(memory.read_all()[:MIB], seed=seed, offset_bytes=next_mib_offset)


@needs(host.fuse)
@ON_HOST_AND_DEVICE
def test_bytes_after_a_gap_are_not_counted(
    faulty_file: FaultyFile, seed: int, memory_kind: str, owner_device: Device | None
) -> None:
    faulty_file.send(f"eio {BAD_OFFSET}")
    faulty_file.send(f"gate {BAD_OFFSET} {BAD_OFFSET + 1}")
    with (
        allocate_memory(memory_kind, LENGTH_BYTES, owner_device) as memory,
        gds.File(faulty_file.path, direct="never") as file,
    ):
        transfer = file.start_read_into(memory.buffer)
        faulty_file.expect_line("waiting")
        # One thread is blocked at the bad byte. Meanwhile other threads read the bytes after it.
        wait_until(lambda: transfer.bytes_moved > BAD_OFFSET, "bytes after the gap", timeout_s=60)
        faulty_file.send("open")
        with pytest.raises(gds.TransferFailed) as error_info:
            transfer.result()
        assert (error_info.value.partial_result.bytes, error_info.value.partial_result.range_bytes) == (
            BAD_OFFSET,
            (BAD_OFFSET,),
        )
        pattern.check(memory.read_all()[:BAD_OFFSET], seed=seed)


@needs(host.fuse)
@ON_HOST_AND_DEVICE
def test_short_read_of_an_unreadable_byte_is_eio(
    faulty_file: FaultyFile, seed: int, memory_kind: str, owner_device: Device | None
) -> None:
    faulty_file.send(f"eio {BAD_OFFSET}")
    with (
        allocate_memory(memory_kind, 8 * KIB, owner_device) as memory,
        gds.File(faulty_file.path, direct="never") as file,
    ):
        with pytest.raises(gds.TransferFailed) as error_info:
            file.read_into(memory.buffer, file_offset_bytes=BAD_OFFSET - 100, length_bytes=4 * KIB)
        assert error_info.value.errno == errno.EIO
        assert error_info.value.partial_result.range_bytes == (100,)
        pattern.check(memory.read_all()[:100], seed=seed, offset_bytes=BAD_OFFSET - 100)


@needs(host.fuse)
@ON_HOST_AND_DEVICE
@AUTOMATIC_AND_BUFFERED
def test_unwritable_byte_is_eio_after_the_bytes_before_it(
    faulty_file: FaultyFile, seed: int, memory_kind: str, owner_device: Device | None, access: gds.Access
) -> None:
    faulty_file.send(f"eio {BAD_OFFSET}")
    data = pattern.payload(16 * MIB, seed=seed + 1)
    with allocate_memory(memory_kind, len(data), owner_device) as memory:
        memory.write(data)
        with gds.File(faulty_file.path, "r+", access=access, direct="never") as file:
            with pytest.raises(gds.TransferFailed) as error_info:
                file.write_from(memory.buffer)
            assert (error_info.value.errno, error_info.value.operation) == (errno.EIO, "pwrite")
            assert error_info.value.partial_result.range_bytes == (BAD_OFFSET,)
    with faulty_file.path.open("rb") as reopened_file:
        assert reopened_file.read(BAD_OFFSET) == data[:BAD_OFFSET]


@needs(host.fuse)
@ON_HOST_AND_DEVICE
@AUTOMATIC_AND_BUFFERED
def test_file_that_shrinks_during_a_read_is_end_of_file(
    faulty_file: FaultyFile, seed: int, memory_kind: str, owner_device: Device | None, access: gds.Access
) -> None:
    with (
        allocate_memory(memory_kind, LENGTH_BYTES, owner_device) as memory,
        gds.File(faulty_file.path, access=access, direct="never") as file,
    ):
        faulty_file.send(f"gate {BAD_OFFSET} {LENGTH_BYTES}")
        transfer = file.start_read_into(memory.buffer)
        faulty_file.expect_line("waiting")
        faulty_file.send(f"end {BAD_OFFSET}")
        faulty_file.send("open")
        with pytest.raises(gds.TransferFailed) as error_info:
            transfer.result()
        assert (error_info.value.reason, error_info.value.errno) == (Reason.END_OF_FILE, None)
        assert error_info.value.partial_result.range_bytes == (BAD_OFFSET,)
        memory_bytes = memory.read_all()
        pattern.check(memory_bytes[:BAD_OFFSET], seed=seed)
        assert set(memory_bytes[BAD_OFFSET:]) == {0xA5}


@needs(host.fuse)
@ON_HOST_AND_DEVICE
@AUTOMATIC_AND_BUFFERED
@pytest.mark.parametrize("faulty_file", [LONG_BYTES], indirect=True, ids=["long"])
def test_cancelled_read_reports_the_bytes_that_arrived(
    faulty_file: FaultyFile, seed: int, memory_kind: str, owner_device: Device | None, access: gds.Access
) -> None:
    with (
        allocate_memory(memory_kind, LONG_BYTES, owner_device) as memory,
        gds.File(faulty_file.path, access=access, direct="never") as file,
    ):
        faulty_file.send(f"gate 0 {LONG_BYTES}")
        transfer = file.start_read_into(memory.buffer)
        faulty_file.expect_line("waiting")
        with pytest.raises(TimeoutError):
            transfer.result(0.01)
        assert not transfer.done()
        assert transfer.cancel()
        faulty_file.send("open")
        with pytest.raises(gds.TransferFailed) as error_info:
            transfer.result()
        result = error_info.value.partial_result
        assert (error_info.value.reason, error_info.value.errno) == (Reason.CANCELLED, None)
        assert result.range_bytes == (result.bytes,)
        # The chunks in progress were completed, and no other chunk was started.
        assert 0 < result.bytes < LONG_BYTES
        pattern.check(memory.read_all()[: result.bytes], seed=seed)
        assert isinstance(transfer.exception(), gds.TransferFailed)
        assert file.read_into(memory.buffer, length_bytes=MIB).bytes == MIB


@needs(host.fuse)
def test_etimedout_of_a_disk_is_no_timeout_of_result(tmp_path: Path) -> None:
    with FaultyMount(tmp_path / "fuse") as faulty_mount:
        (faulty_mount.backing_folder / "data").write_bytes(bytes(MIB))
        with gds.File(faulty_mount.mount / "data", access="buffered", direct="never") as file:
            faulty_mount.set_faults(read=errno.ETIMEDOUT)
            # A TimeoutError would mean that the transfer continues.
            with pytest.raises(gds.TransferFailed) as error_info:
                file.start_read_into(bytearray(MIB)).result(60)
            error: object = error_info.value
            assert error_info.value.errno == errno.ETIMEDOUT
            assert isinstance(error, OSError)
            assert not isinstance(error, TimeoutError)


@needs(host.capability("CAP_SYS_ADMIN"))
@ON_HOST_AND_DEVICE
@AUTOMATIC_AND_BUFFERED
def test_full_disk_is_enospc_after_the_written_bytes(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None, access: gds.Access
) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "gdrkit-small", str(mount)], check=True)
    try:
        data = pattern.payload(20 * MIB, seed=seed)
        with (
            allocate_memory(memory_kind, len(data), owner_device) as memory,
            gds.File(mount / "file", "x", access=access, direct="never") as file,
        ):
            memory.write(data)
            with pytest.raises(gds.TransferFailed) as error_info:
                file.write_from(memory.buffer)
            assert (error_info.value.errno, error_info.value.reason) == (errno.ENOSPC, Reason.NO_SPACE)
            written_bytes = error_info.value.partial_result.bytes
            assert error_info.value.partial_result.range_bytes == (written_bytes,)
            assert written_bytes <= 8 * MIB
            with (mount / "file").open("rb+") as reopened_file:
                assert reopened_file.read(written_bytes) == data[:written_bytes]
                reopened_file.truncate(0)
            # When the disk has free space again, the same file can be written.
            assert file.write_from(memory.buffer, length_bytes=6 * MIB).bytes == 6 * MIB
            assert (mount / "file").read_bytes() == data[: 6 * MIB]
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@needs(host.fuse)
@pytest.mark.parametrize("read_length_bytes", [4 * KIB, MIB])
def test_other_threads_run_during_a_read(faulty_file: FaultyFile, seed: int, read_length_bytes: int) -> None:
    faulty_file.send(f"gate 0 {LENGTH_BYTES}")
    memory = bytearray(read_length_bytes)
    with gds.File(faulty_file.path) as file, ThreadPoolExecutor(1) as pool:
        read_future = pool.submit(file.read_into, memory)
        # If the reading thread held the GIL, this thread could not run here.
        faulty_file.expect_line("waiting")
        assert not read_future.done()
        faulty_file.send("open")
        assert read_future.result().bytes == read_length_bytes
    pattern.check(memory, seed=seed)
