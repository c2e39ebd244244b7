"""Reads and writes between files and every kind of memory: sizes, unaligned offsets, many ranges and futures."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.gds import KINDS, forget, holding
from support.mounts import mounted

from gdrkit import gds, pattern
from gdrkit.harness.needs import cuda, host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device

EVERY_KIND = pytest.mark.parametrize("kind", KINDS, indirect=True)
ACCESS: tuple[gds.Access, ...] = ("automatic", "buffered", "direct")
SIZES = [
    pytest.param(1, 0, 0, id="1B"),
    pytest.param(1, 4095, 3, id="1B-at-4095"),
    pytest.param(4 * KIB, 0, 0, id="4KiB"),
    pytest.param(64 * KIB + 1, 511, 1, id="64KiB+1-odd"),
    pytest.param(256 * KIB + 1, 4096, 0, id="256KiB+1"),
    pytest.param(9 * MIB + 5, 4097, 7, id="9MiB+5-odd"),
]


@EVERY_KIND
@pytest.mark.parametrize(("length", "file_offset", "buffer_offset"), SIZES)
@pytest.mark.parametrize("state", ["cached", "cold"])
def test_read_returns_the_bytes_of_the_file(
    tmp_path: Path,
    seed: int,
    kind: str,
    owner: Device | None,
    length: int,
    file_offset: int,
    buffer_offset: int,
    state: str,
) -> None:
    data = pattern.payload(file_offset + length + 100, seed=seed)
    (tmp_path / "file").write_bytes(data)
    with (
        holding(kind, length + buffer_offset + 64, owner) as memory,
        gds.File(tmp_path / "file", direct="never") as file,
    ):
        for access in ACCESS:
            if state == "cold":
                forget(tmp_path / "file")
            memory.write(b"\xa5" * (length + buffer_offset + 64))
            file.access = access
            done = file.read_into(
                memory.buffer, file_offset_bytes=file_offset, length_bytes=length, buffer_offset_bytes=buffer_offset
            )
            assert (done.bytes, done.parts, done.route) == (length, (length,), gds.Route.ENGINE)
            contents = memory.content()
            assert contents[buffer_offset : buffer_offset + length] == data[file_offset : file_offset + length]
            assert set(contents[:buffer_offset] + contents[buffer_offset + length :]) == {0xA5}


@EVERY_KIND
@pytest.mark.parametrize(("length", "file_offset", "buffer_offset"), SIZES)
def test_write_stores_the_bytes_of_the_memory(
    tmp_path: Path, seed: int, kind: str, owner: Device | None, length: int, file_offset: int, buffer_offset: int
) -> None:
    path = tmp_path / "file"
    expected = bytearray(pattern.payload(file_offset + 100, seed=seed + 1))
    path.write_bytes(expected)
    expected.extend(bytes(max(file_offset + length - len(expected), 0)))
    with holding(kind, length + buffer_offset, owner) as memory, gds.File(path, "r+", direct="never") as file:
        for access in ACCESS:
            data = pattern.payload(length + buffer_offset, seed=seed)
            memory.write(data)
            file.access = access
            done = file.write_from(
                memory.buffer, file_offset_bytes=file_offset, length_bytes=length, buffer_offset_bytes=buffer_offset
            )
            assert (done.bytes, done.parts) == (length, (length,))
            expected[file_offset : file_offset + length] = data[buffer_offset:]
            assert path.read_bytes() == expected
            seed += 1
        file.sync()


@EVERY_KIND
def test_partly_cached_file_is_read_by_both_paths(tmp_path: Path, seed: int, kind: str, owner: Device | None) -> None:
    path, data = tmp_path / "file", pattern.payload(24 * MIB + 3, seed=seed)
    path.write_bytes(data)
    with gds.File(path, direct="never") as file, holding(kind, len(data), owner) as memory:
        # The whole file is cached, unless the machine is short of memory.
        assert file.cached_share() > 0.9
        forget(path, offset_bytes=4 * MIB, length_bytes=12 * MIB)
        cold_bytes = round((1 - file.cached_share()) * len(data))
        done = file.read_into(memory.buffer)
        assert done.bytes == len(data)
        assert memory.content() == data
        # Only uncached bytes were read by O_DIRECT, and most of them were.
        assert done.direct_io_bytes <= cold_bytes + 2 * MIB
        assert done.direct_io_bytes >= cold_bytes // 2


@needs(host.file_system("ext4"))
@EVERY_KIND
@pytest.mark.parametrize("length", [1, 4 * KIB, 256 * KIB])
def test_short_read_with_direct_access_bypasses_the_cache(
    tmp_path: Path, seed: int, kind: str, owner: Device | None, length: int
) -> None:
    """A short read used the page cache although the file was opened with access="direct"."""
    data = pattern.payload(MIB, seed=seed)
    ranges = [(offset, length) for offset in range(0, MIB - length, 7919)]
    total = len(ranges) * length
    with mounted("ext4", tmp_path / "disk") as disk:
        (disk / "file").write_bytes(data)
        with (
            gds.File(disk / "file", access="direct", direct="never") as file,
            holding(kind, max(length, total), owner) as memory,
        ):
            assert file.cached_share() == 1.0
            done = file.read_into(memory.buffer, file_offset_bytes=3, length_bytes=length)
            assert (done.bytes, done.direct_io_bytes) == (length, length)
            assert memory.content()[:length] == data[3 : 3 + length]
            done = file.readv(memory.buffer, ranges)
            assert (done.bytes, done.direct_io_bytes) == (total, total)
            assert memory.content()[:total] == b"".join(data[offset : offset + length] for offset, _ in ranges)
            file.access = "automatic"
            assert file.read_into(memory.buffer, length_bytes=length).direct_io_bytes == 0


@EVERY_KIND
def test_many_ranges_are_one_transfer(tmp_path: Path, seed: int, kind: str, owner: Device | None) -> None:
    chance = random.Random(seed)
    data = pattern.payload(6 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    ranges: list[tuple[int, int]] = []
    while sum(length for _, length in ranges) < 4 * MIB:
        length = chance.choice([0, 1, 4096, chance.randrange(700 * KIB)])
        ranges.append((chance.randrange(len(data) - length), length))
    expected = b"".join(data[offset : offset + length] for offset, length in ranges)
    with holding(kind, len(expected), owner) as memory:
        with gds.File(tmp_path / "file", direct="never") as file:
            done = file.readv(memory.buffer, ranges)
        assert done.parts == tuple(length for _, length in ranges)
        assert memory.content() == expected
        # The same parts of the memory are written into a new file, with gaps between them.
        with gds.File(tmp_path / "copy", "w", direct="never") as file:
            writes, at = [], 0
            for number, (_, length) in enumerate(ranges):
                writes.append((at + 5 * number, length, at))
                at += length
            assert file.writev(memory.buffer, writes).bytes == len(expected)
        copied = (tmp_path / "copy").read_bytes()
        for offset, length, at in writes:
            assert copied[offset : offset + length] == expected[at : at + length]


@EVERY_KIND
def test_futures_may_be_awaited_in_any_order(tmp_path: Path, seed: int, kind: str, owner: Device | None) -> None:
    data = pattern.payload(8 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    with gds.File(tmp_path / "file", direct="never") as file, holding(kind, len(data), owner) as memory:
        pending = [
            file.start_read_into(memory.buffer, file_offset_bytes=at, length_bytes=MIB, buffer_offset_bytes=at)
            for at in range(0, len(data), MIB)
        ]
        for each in reversed(pending):
            assert each.result().bytes == each.length_bytes == MIB
            assert each.done()
            assert each.exception() is None
            assert not each.cancel()
        assert memory.content() == data


def test_progress_is_reported_up_to_the_end(tmp_path: Path, seed: int) -> None:
    data = pattern.payload(4 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    progress: list[tuple[int, int]] = []
    memory = bytearray(len(data))
    with gds.File(tmp_path / "file") as file:
        file.read_into(memory, on_progress=lambda done, whole: progress.append((done, whole)))
        assert memory == data
        assert progress[-1] == (len(data), len(data))
        assert progress == sorted(progress)

        def stop(done: int, whole: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            file.read_into(memory, on_progress=stop)


@pytest.mark.parametrize("cls", [TimeoutError, FileNotFoundError, KeyboardInterrupt])
def test_exception_of_on_progress_cancels_the_transfer(tmp_path: Path, cls: type[BaseException]) -> None:
    (tmp_path / "file").write_bytes(bytes(4 * MIB))

    def stop(done: int, whole: int) -> None:
        raise cls

    with gds.File(tmp_path / "file") as file:
        pending = file.start_read_into(bytearray(4 * MIB))
        with pytest.raises(cls):
            pending.result(60, on_progress=stop)
        # The transfer is over and has released the memory.
        assert pending.buffer is None


def test_dropped_future_keeps_memory_and_file_until_it_ends(tmp_path: Path, seed: int) -> None:
    data = pattern.payload(16 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    memory = bytearray(len(data))
    with gds.File(tmp_path / "file") as file:
        file.start_read_into(memory)
    # The close of the file has waited for the transfer. BufferError: the transfer still holds the memory.
    assert memory == data
    memory.clear()


@needs(cuda.device(count_min=2))
def test_devices_transfer_at_the_same_time(tmp_path: Path, seed: int, devices: tuple[Device, ...]) -> None:
    data = pattern.payload(6 * MIB + 1, seed=seed)
    (tmp_path / "file").write_bytes(data)

    def there_and_back(number: int) -> None:
        path = tmp_path / f"copy{number}"
        device = devices[number % len(devices)]
        with device.allocate(len(data)) as memory:
            with gds.File(tmp_path / "file", direct="never") as file:
                file.read_into(memory)
            assert memory.read() == data
            with gds.File(path, "x", direct="never") as file:
                file.write_from(memory)
        assert path.read_bytes() == data

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(there_and_back, range(2 * len(devices))))


@EVERY_KIND
def test_many_whole_files_are_one_transfer(tmp_path: Path, seed: int, kind: str, owner: Device | None) -> None:
    sizes = [number * 4099 for number in range(60)]
    paths = [tmp_path / f"{number:02}" for number in range(60)]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        path.write_bytes(pattern.payload(size, seed=seed + number))
    with holding(kind, sum(sizes), owner) as memory:
        done = gds.read_files(paths, memory.buffer, sizes).result()
        assert done.parts == tuple(sizes)
        assert memory.content() == b"".join(path.read_bytes() for path in paths)


FORKED = """
import os, sys
from gdrkit import gds

def check():
    memory = bytearray(1 << 20)
    with gds.File(sys.argv[1]) as file:
        file.read_into(memory)
    assert memory == open(sys.argv[1], "rb").read()

check()
child = os.fork()
check()
gds.close_engines()
sys.exit(os.waitpid(child, 0)[1] if child else 0)
"""


def test_forked_child_creates_its_own_engines(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern.payload(MIB, seed=seed))
    # Python 3.12 and newer warn of a fork in a process with threads, and this case forks such a process on purpose.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(path)]
    subprocess.run(command, check=True, timeout=60)
