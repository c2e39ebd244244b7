"""Reads and writes between files and every kind of memory: sizes, unaligned offsets, many ranges, and futures."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.gds import MEMORY_KINDS, allocate_memory, count_engine_threads, drop_from_cache
from support.mounts import mount_new_file_system

from gdrkit import gds, pattern
from gdrkit.harness.needs import cuda, host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device

EVERY_MEMORY_KIND = pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
ACCESS_MODES: tuple[gds.Access, ...] = ("automatic", "buffered", "direct")
# Length, offset in the file and offset in the buffer, in bytes.
SIZES = [
    pytest.param(1, 0, 0, id="1B"),
    pytest.param(1, 4095, 3, id="1B-at-4095"),
    pytest.param(4 * KIB, 0, 0, id="4KiB"),
    pytest.param(64 * KIB + 1, 511, 1, id="64KiB+1-odd"),
    pytest.param(256 * KIB + 1, 4096, 0, id="256KiB+1"),
    pytest.param(9 * MIB + 5, 4097, 7, id="9MiB+5-odd"),
]


@EVERY_MEMORY_KIND
@pytest.mark.parametrize(("length_bytes", "file_offset_bytes", "buffer_offset_bytes"), SIZES)
@pytest.mark.parametrize("cache_state", ["cached", "cold"])
def test_read_returns_the_bytes_of_the_file(
    tmp_path: Path,
    seed: int,
    memory_kind: str,
    owner_device: Device | None,
    length_bytes: int,
    file_offset_bytes: int,
    buffer_offset_bytes: int,
    cache_state: str,
) -> None:
    data = pattern.payload(file_offset_bytes + length_bytes + 100, seed=seed)
    (tmp_path / "file").write_bytes(data)
    with (
        allocate_memory(memory_kind, length_bytes + buffer_offset_bytes + 64, owner_device) as memory,
        gds.File(tmp_path / "file", direct="never") as file,
    ):
        for access in ACCESS_MODES:
            if cache_state == "cold":
                drop_from_cache(tmp_path / "file")
            memory.write(b"\xa5" * (length_bytes + buffer_offset_bytes + 64))
            file.access = access
            result = file.read_into(
                memory.buffer,
                file_offset_bytes=file_offset_bytes,
                length_bytes=length_bytes,
                buffer_offset_bytes=buffer_offset_bytes,
            )
            assert (result.bytes, result.range_bytes, result.route) == (length_bytes, (length_bytes,), gds.Route.ENGINE)
            memory_bytes = memory.read_all()
            assert (
                memory_bytes[buffer_offset_bytes : buffer_offset_bytes + length_bytes]
                == data[file_offset_bytes : file_offset_bytes + length_bytes]
            )
            assert set(memory_bytes[:buffer_offset_bytes] + memory_bytes[buffer_offset_bytes + length_bytes :]) == {
                0xA5
            }


def test_short_transfer_needs_no_thread_of_the_engine(tmp_path: Path) -> None:
    gds.close_engines()
    memory = bytearray(5 * MIB)
    with gds.File(tmp_path / "file", "w") as file:
        assert file.write_from(memory, length_bytes=4 * MIB).bytes == 4 * MIB
        assert file.read_into(memory, length_bytes=256 * KIB).bytes == 256 * KIB
        assert not count_engine_threads()
        assert file.write_from(memory, length_bytes=4 * MIB, durable=True).bytes == 4 * MIB
        assert count_engine_threads()


@EVERY_MEMORY_KIND
@pytest.mark.parametrize(("length_bytes", "file_offset_bytes", "buffer_offset_bytes"), SIZES)
def test_write_stores_the_bytes_of_the_memory(
    tmp_path: Path,
    seed: int,
    memory_kind: str,
    owner_device: Device | None,
    length_bytes: int,
    file_offset_bytes: int,
    buffer_offset_bytes: int,
) -> None:
    path = tmp_path / "file"
    expected_bytes = bytearray(pattern.payload(file_offset_bytes + 100, seed=seed + 1))
    path.write_bytes(expected_bytes)
    expected_bytes.extend(bytes(max(file_offset_bytes + length_bytes - len(expected_bytes), 0)))
    with (
        allocate_memory(memory_kind, length_bytes + buffer_offset_bytes, owner_device) as memory,
        gds.File(path, "r+", direct="never") as file,
    ):
        for access in ACCESS_MODES:
            data = pattern.payload(length_bytes + buffer_offset_bytes, seed=seed)
            memory.write(data)
            file.access = access
            result = file.write_from(
                memory.buffer,
                file_offset_bytes=file_offset_bytes,
                length_bytes=length_bytes,
                buffer_offset_bytes=buffer_offset_bytes,
            )
            assert (result.bytes, result.range_bytes) == (length_bytes, (length_bytes,))
            expected_bytes[file_offset_bytes : file_offset_bytes + length_bytes] = data[buffer_offset_bytes:]
            assert path.read_bytes() == expected_bytes
            seed += 1  # The next write has other bytes.
        file.sync()


@EVERY_MEMORY_KIND
def test_partly_cached_file_is_read_by_both_paths(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None
) -> None:
    path, data = tmp_path / "file", pattern.payload(24 * MIB + 3, seed=seed)
    path.write_bytes(data)
    with gds.File(path, direct="never") as file, allocate_memory(memory_kind, len(data), owner_device) as memory:
        # The whole file is cached, unless the machine is short of memory.
        assert file.cached_share() > 0.9
        drop_from_cache(path, offset_bytes=4 * MIB, length_bytes=12 * MIB)
        cold_bytes = round((1 - file.cached_share()) * len(data))
        result = file.read_into(memory.buffer)
        assert result.bytes == len(data)
        assert memory.read_all() == data
        # O_DIRECT read only the uncached bytes (with a tolerance of 2 MiB), and at least half of them.
        assert result.direct_io_bytes <= cold_bytes + 2 * MIB
        assert result.direct_io_bytes >= cold_bytes // 2


@EVERY_MEMORY_KIND
def test_readahead_keeps_no_cold_file_in_the_cache_path(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None
) -> None:
    """An older version read a cold file of 16 GB through the cache after a program had read its first 30 KB.

    The readahead of the kernel was always ahead of the engine, so that each next range looked cached.
    """
    path, data = tmp_path / "file", pattern.payload(96 * MIB, seed=seed)
    path.write_bytes(data)
    with gds.File(path, direct="never") as file, allocate_memory(memory_kind, len(data), owner_device) as memory:
        drop_from_cache(path)
        assert os.pread(file.fileno(), 30_000, 0) + os.pread(file.fileno(), 8, 30_000) == data[:30_008]
        result = file.read_into(memory.buffer)
        assert memory.read_all() == data
        assert result.direct_io_bytes > len(data) // 2


@needs(host.file_system("ext4"))
@EVERY_MEMORY_KIND
@pytest.mark.parametrize("length_bytes", [1, 4 * KIB, 256 * KIB])
def test_short_read_with_direct_access_bypasses_the_cache(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None, length_bytes: int
) -> None:
    """An older version used the page cache for short reads, even for a file with access="direct"."""
    data = pattern.payload(MIB, seed=seed)
    # The step is a prime number, so that the offsets are not multiples of a block.
    ranges = [(offset_bytes, length_bytes) for offset_bytes in range(0, MIB - length_bytes, 7919)]
    total_bytes = len(ranges) * length_bytes
    with mount_new_file_system("ext4", tmp_path / "disk") as disk:
        (disk / "file").write_bytes(data)
        with (
            gds.File(disk / "file", access="direct", direct="never") as file,
            allocate_memory(memory_kind, max(length_bytes, total_bytes), owner_device) as memory,
        ):
            assert file.cached_share() == 1.0
            result = file.read_into(memory.buffer, file_offset_bytes=3, length_bytes=length_bytes)
            assert (result.bytes, result.direct_io_bytes) == (length_bytes, length_bytes)
            assert memory.read_all()[:length_bytes] == data[3 : 3 + length_bytes]
            result = file.readv(memory.buffer, ranges)
            assert (result.bytes, result.direct_io_bytes) == (total_bytes, total_bytes)
            assert memory.read_all()[:total_bytes] == b"".join(
                data[offset_bytes : offset_bytes + length_bytes] for offset_bytes, _ in ranges
            )
            file.access = "automatic"
            assert file.read_into(memory.buffer, length_bytes=length_bytes).direct_io_bytes == 0


@EVERY_MEMORY_KIND
def test_many_ranges_are_one_transfer(tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None) -> None:
    generator = random.Random(seed)
    data = pattern.payload(6 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    ranges: list[tuple[int, int]] = []
    while sum(length_bytes for _, length_bytes in ranges) < 4 * MIB:
        length_bytes = generator.choice([0, 1, 4096, generator.randrange(700 * KIB)])
        ranges.append((generator.randrange(len(data) - length_bytes), length_bytes))
    expected_bytes = b"".join(data[offset_bytes : offset_bytes + length_bytes] for offset_bytes, length_bytes in ranges)
    with allocate_memory(memory_kind, len(expected_bytes), owner_device) as memory:
        with gds.File(tmp_path / "file", direct="never") as file:
            result = file.readv(memory.buffer, ranges)
        assert result.range_bytes == tuple(length_bytes for _, length_bytes in ranges)
        assert memory.read_all() == expected_bytes
        # The same ranges of the memory are written into a new file, with gaps of 5 bytes between them. A write range is
        # (offset in the file, length, offset in the buffer).
        with gds.File(tmp_path / "copy", "w", direct="never") as file:
            write_ranges, buffer_offset_bytes = [], 0
            for index, (_, length_bytes) in enumerate(ranges):
                write_ranges.append((buffer_offset_bytes + 5 * index, length_bytes, buffer_offset_bytes))
                buffer_offset_bytes += length_bytes
            assert file.writev(memory.buffer, write_ranges).bytes == len(expected_bytes)
        written_bytes = (tmp_path / "copy").read_bytes()
        for offset_bytes, length_bytes, buffer_offset_bytes in write_ranges:
            assert (
                written_bytes[offset_bytes : offset_bytes + length_bytes]
                == expected_bytes[buffer_offset_bytes : buffer_offset_bytes + length_bytes]
            )


@EVERY_MEMORY_KIND
def test_futures_may_be_awaited_in_any_order(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None
) -> None:
    data = pattern.payload(8 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    with (
        gds.File(tmp_path / "file", direct="never") as file,
        allocate_memory(memory_kind, len(data), owner_device) as memory,
    ):
        pending_transfers = [
            file.start_read_into(
                memory.buffer, file_offset_bytes=offset_bytes, length_bytes=MIB, buffer_offset_bytes=offset_bytes
            )
            for offset_bytes in range(0, len(data), MIB)
        ]
        for transfer in reversed(pending_transfers):
            assert transfer.result().bytes == transfer.length_bytes == MIB
            assert transfer.done()
            assert transfer.exception() is None
            assert not transfer.cancel()
        assert memory.read_all() == data


def test_progress_is_reported_up_to_the_end(tmp_path: Path, seed: int) -> None:
    data = pattern.payload(4 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    progress: list[tuple[int, int]] = []
    memory = bytearray(len(data))
    with gds.File(tmp_path / "file") as file:
        file.read_into(memory, on_progress=lambda done_bytes, total_bytes: progress.append((done_bytes, total_bytes)))
        assert memory == data
        assert progress[-1] == (len(data), len(data))
        assert progress == sorted(progress)

        def stop(done_bytes: int, total_bytes: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            file.read_into(memory, on_progress=stop)


@pytest.mark.parametrize("exception_type", [TimeoutError, FileNotFoundError, KeyboardInterrupt])
def test_exception_of_on_progress_cancels_the_transfer(tmp_path: Path, exception_type: type[BaseException]) -> None:
    (tmp_path / "file").write_bytes(bytes(4 * MIB))

    def stop(done_bytes: int, total_bytes: int) -> None:
        raise exception_type

    with gds.File(tmp_path / "file") as file:
        transfer = file.start_read_into(bytearray(4 * MIB))
        with pytest.raises(exception_type):
            transfer.result(60, on_progress=stop)
        # The transfer has ended and has released the memory.
        assert transfer.buffer is None


def test_dropped_future_keeps_memory_and_file_until_it_ends(tmp_path: Path, seed: int) -> None:
    data = pattern.payload(16 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    memory = bytearray(len(data))
    with gds.File(tmp_path / "file") as file:
        file.start_read_into(memory)
    # The close of the file has waited for the transfer. If the transfer still held the memory, clear() would raise
    # BufferError.
    assert memory == data
    memory.clear()


@needs(cuda.device(count_min=2))
def test_devices_transfer_at_the_same_time(tmp_path: Path, seed: int, devices: tuple[Device, ...]) -> None:
    data = pattern.payload(6 * MIB + 1, seed=seed)
    (tmp_path / "file").write_bytes(data)

    def copy_through_device(copy_index: int) -> None:
        path = tmp_path / f"copy{copy_index}"
        device = devices[copy_index % len(devices)]
        with device.allocate(len(data)) as memory:
            with gds.File(tmp_path / "file", direct="never") as file:
                file.read_into(memory)
            assert memory.read() == data
            with gds.File(path, "x", direct="never") as file:
                file.write_from(memory)
        assert path.read_bytes() == data

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copy_through_device, range(2 * len(devices))))


@EVERY_MEMORY_KIND
def test_many_whole_files_are_one_transfer(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None
) -> None:
    sizes = [index * 4099 for index in range(60)]
    paths = [tmp_path / f"{index:02}" for index in range(60)]
    for index, (path, size_bytes) in enumerate(zip(paths, sizes, strict=True)):
        path.write_bytes(pattern.payload(size_bytes, seed=seed + index))
    with allocate_memory(memory_kind, sum(sizes), owner_device) as memory:
        result = gds.read_files(paths, memory.buffer, sizes).result()
        assert result.range_bytes == tuple(sizes)
        assert memory.read_all() == b"".join(path.read_bytes() for path in paths)


# A program that reads a file before a fork, and after the fork in the parent and in the child.
FORKING_PROGRAM = """
import os, sys
from gdrkit import gds

def read_and_compare():
    memory = bytearray(1 << 20)
    with gds.File(sys.argv[1]) as file:
        file.read_into(memory)
    assert memory == open(sys.argv[1], "rb").read()

read_and_compare()
child_pid = os.fork()
read_and_compare()
gds.close_engines()
sys.exit(os.waitpid(child_pid, 0)[1] if child_pid else 0)
"""


def test_forked_child_creates_its_own_engines(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern.payload(MIB, seed=seed))
    # Python 3.12 and newer warn of a fork in a process with threads. This case forks such a process on purpose.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING_PROGRAM, str(path)]
    subprocess.run(command, check=True, timeout=60)
