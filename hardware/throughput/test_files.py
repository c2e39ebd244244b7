"""File transfers to and from device memory by size, with a check of every byte.

The cases compare three methods in turn: a direct transfer if it is proven, gdrkit's copy engine, and pread with a copy
as in a program without gdrkit. A cached file is in the page cache. A cold file is dropped from it before each round.
``suites/bench`` also has kvikio.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.file_movers import FileMovers
from support.gds import RESIDENT_MOST, cached_share, forget

from gdrkit import gds, pattern
from gdrkit.harness.needs import cuda, needs
from gdrkit.harness.needs.cufile import DISK
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.rates import Meter

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence

FILE_BYTES = 256 * MIB
CACHED = [pytest.param(size * KIB, id=f"{size}KiB") for size in (64, 1024, 16384, 262144)]
COLD = [pytest.param(size * KIB, id=f"{size}KiB") for size in (1024, 262144)]


@pytest.fixture
def path() -> Iterator[Path]:
    """A path for a file on the disk of the temporary files."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-throughput-", dir=DISK) as folder:
        yield Path(folder).resolve() / "file"
        gds.close_engines()
        gds.close_driver()


def read(
    meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, *, chunk_bytes: int, is_cold: bool
) -> None:
    """Read a whole file into memory by each method."""
    length_bytes = meter.length(FILE_BYTES)
    chunk_bytes = min(chunk_bytes, length_bytes)
    path.write_bytes(pattern.payload(length_bytes, seed=seed))
    with contextlib.ExitStack() as stack, device.allocate(length_bytes) as memory:
        stack.callback(gds.close_engines)
        movers, why = FileMovers(path, memory, device, chunk_bytes, stack).all(write=False)
        evidence["not_direct"] = why

        def prepare() -> None:
            memory.fill(0)
            if is_cold:
                forget(path)

        def check() -> None:
            pattern.check(memory.read(), seed=seed)

        for name, move in movers.items():
            meter.record_path(f"GPU{device.index}", name=name)
            prepare()
            move()
            check()
        prepare()
        if is_cold and cached_share(path) > RESIDENT_MOST:
            evidence.unproven(f"the file system of {DISK} keeps data in the page cache, so that no file is cold")
            return
        meter.compare(movers, moved_bytes=length_bytes, prepare=prepare, check=check)


@needs(cuda.device())
@pytest.mark.parametrize("length_bytes", CACHED)
def test_cached_read(
    meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, length_bytes: int
) -> None:
    read(meter, device, path, seed, evidence, chunk_bytes=length_bytes, is_cold=False)


@needs(cuda.device())
@pytest.mark.parametrize("length_bytes", COLD)
def test_cold_read(meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, length_bytes: int) -> None:
    read(meter, device, path, seed, evidence, chunk_bytes=length_bytes, is_cold=True)


@needs(cuda.device())
@pytest.mark.parametrize("length_bytes", COLD)
@pytest.mark.parametrize("durable", [False, True], ids=["into_the_cache", "durable"])
def test_write(
    meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, length_bytes: int, *, durable: bool
) -> None:
    whole_bytes = meter.length(FILE_BYTES)
    path.write_bytes(bytes(whole_bytes))
    with contextlib.ExitStack() as stack, device.allocate(whole_bytes) as memory:
        stack.callback(gds.close_engines)
        chunk_bytes = min(length_bytes, whole_bytes)
        movers, why = FileMovers(path, memory, device, chunk_bytes, stack, durable=durable).all(write=True)
        evidence["not_direct"] = why
        data = {each: pattern.payload(whole_bytes, seed=each) for each in (seed, seed ^ 1)}
        seeds = list(data)

        def prepare() -> None:
            # The bytes differ from those of the previous write, which the file still has.
            seeds.reverse()
            memory.write(data[seeds[0]])

        for name, move in movers.items():
            meter.record_path(f"GPU{device.index}", name=name)
            prepare()
            move()
            pattern.check(path.read_bytes(), seed=seeds[0])
        path.write_bytes(bytes(whole_bytes))
        meter.compare(movers, moved_bytes=whole_bytes, prepare=prepare)
        # The check is only at the end, because reading the file would put it into the page cache of the next write.
        pattern.check(path.read_bytes(), seed=seeds[0])
