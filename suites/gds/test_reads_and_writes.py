"""Files into memory and back, whoever made the memory: every size, odd places, many ranges, futures; every byte."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.gds import KINDS, forget, holding

from gdrkit import gds, pattern
from gdrkit.harness.needs import cuda, needs
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
def test_what_is_in_the_file_is_in_the_memory(
    tmp_path: Path,
    seed: int,
    kind: str,
    where: Device | None,
    length: int,
    file_offset: int,
    buffer_offset: int,
    state: str,
) -> None:
    data = pattern.payload(file_offset + length + 100, seed=seed)
    (tmp_path / "file").write_bytes(data)
    with (
        holding(kind, length + buffer_offset + 64, where) as memory,
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
            found = memory.content()
            assert found[buffer_offset : buffer_offset + length] == data[file_offset : file_offset + length]
            assert set(found[:buffer_offset] + found[buffer_offset + length :]) == {0xA5}


@EVERY_KIND
@pytest.mark.parametrize(("length", "file_offset", "buffer_offset"), SIZES)
def test_what_is_in_the_memory_is_in_the_file(
    tmp_path: Path, seed: int, kind: str, where: Device | None, length: int, file_offset: int, buffer_offset: int
) -> None:
    path = tmp_path / "file"
    expected = bytearray(pattern.payload(file_offset + 100, seed=seed + 1))
    path.write_bytes(expected)
    expected.extend(bytes(max(file_offset + length - len(expected), 0)))
    with holding(kind, length + buffer_offset, where) as memory, gds.File(path, "r+", direct="never") as file:
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
def test_a_file_that_is_half_cached(tmp_path: Path, seed: int, kind: str, where: Device | None) -> None:
    path, data = tmp_path / "file", pattern.payload(24 * MIB + 3, seed=seed)
    path.write_bytes(data)
    with gds.File(path, direct="never") as file, holding(kind, len(data), where) as memory:
        # All of it, unless the machine is short of memory.
        assert file.cached_share() > 0.9
        forget(path, offset_bytes=4 * MIB, length_bytes=12 * MIB)
        cold_bytes = round((1 - file.cached_share()) * len(data))
        done = file.read_into(memory.buffer)
        assert done.bytes == len(data)
        assert memory.content() == data
        # What was cached was not fetched from the disk again, and what was not did not push anything out.
        assert done.direct_io_bytes <= cold_bytes + 2 * MIB
        assert done.direct_io_bytes >= cold_bytes // 2


@EVERY_KIND
def test_many_ranges_are_one_transfer(tmp_path: Path, seed: int, kind: str, where: Device | None) -> None:
    chance = random.Random(seed)
    data = pattern.payload(6 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    ranges: list[tuple[int, int]] = []
    while sum(length for _, length in ranges) < 4 * MIB:
        length = chance.choice([0, 1, 4096, chance.randrange(700 * KIB)])
        ranges.append((chance.randrange(len(data) - length), length))
    expected = b"".join(data[offset : offset + length] for offset, length in ranges)
    with holding(kind, len(expected), where) as memory:
        with gds.File(tmp_path / "file", direct="never") as file:
            done = file.readv(memory.buffer, ranges)
        assert done.parts == tuple(length for _, length in ranges)
        assert memory.content() == expected
        # Back into a new file, each range from where it is in the memory.
        with gds.File(tmp_path / "copy", "w", direct="never") as file:
            places, at = [], 0
            for number, (_, length) in enumerate(ranges):
                places.append((at + 5 * number, length, at))
                at += length
            assert file.writev(memory.buffer, places).bytes == len(expected)
        copied = (tmp_path / "copy").read_bytes()
        for offset, length, at in places:
            assert copied[offset : offset + length] == expected[at : at + length]


@EVERY_KIND
def test_futures_end_in_any_order(tmp_path: Path, seed: int, kind: str, where: Device | None) -> None:
    data = pattern.payload(8 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    with gds.File(tmp_path / "file", direct="never") as file, holding(kind, len(data), where) as memory:
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


def test_progress_is_told_and_ends_with_all(tmp_path: Path, seed: int) -> None:
    data = pattern.payload(4 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    told: list[tuple[int, int]] = []
    target = bytearray(len(data))
    with gds.File(tmp_path / "file") as file:
        file.read_into(target, on_progress=lambda done, whole: told.append((done, whole)))
        assert target == data
        assert told[-1] == (len(data), len(data))
        assert told == sorted(told)

        def stop(done: int, whole: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            file.read_into(target, on_progress=stop)


def test_a_future_that_is_forgotten_keeps_memory_and_file_until_it_is_over(tmp_path: Path, seed: int) -> None:
    data = pattern.payload(16 * MIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    target = bytearray(len(data))
    with gds.File(tmp_path / "file") as file:
        file.start_read_into(target)
    # Closing the file waited for it.
    assert target == data
    target.clear()


@needs(cuda.device(count_min=2))
def test_several_devices_at_the_same_time(tmp_path: Path, seed: int, devices: tuple[Device, ...]) -> None:
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
def test_many_whole_files(tmp_path: Path, seed: int, kind: str, where: Device | None) -> None:
    sizes = [number * 4099 for number in range(60)]
    paths = [tmp_path / f"{number:02}" for number in range(60)]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        path.write_bytes(pattern.payload(size, seed=seed + number))
    with holding(kind, sum(sizes), where) as memory:
        done = gds.read_files(paths, memory.buffer, sizes).result()
        assert done.parts == tuple(sizes)
        assert memory.content() == b"".join(path.read_bytes() for path in paths)


FORKED = """
import os, sys
from gdrkit import gds

def check():
    target = bytearray(1 << 20)
    with gds.File(sys.argv[1]) as file:
        file.read_into(target)
    assert target == open(sys.argv[1], "rb").read()

check()
child = os.fork()
check()
gds.close_engines()
sys.exit(os.waitpid(child, 0)[1] if child else 0)
"""


def test_a_child_of_fork_makes_engines_of_its_own(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern.payload(MIB, seed=seed))
    # Newer Pythons warn of a fork beside threads, which is what this is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(path)]
    subprocess.run(command, check=True, timeout=60)
