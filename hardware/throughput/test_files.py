"""Throughput of file transfers to and from device memory by chunk size, with a check of every byte.

The cases compare three methods: gdrkit's copy engine; pread or pwrite with a CUDA copy, as in a program without gdrkit;
and a direct transfer, if a trial read shows that direct transfers work. A cached file is in the page cache of the
kernel. A cold file is removed from the page cache before each round. ``suites/bench`` also compares these methods with
kvikio.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.file_movers import FileTransferMethods
from support.gds import CACHED_SHARE_MAX, cached_share, drop_from_cache

from gdrkit import gds, pattern
from gdrkit.harness.needs import cuda, needs
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.rates import Meter

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence

FILE_BYTES = 256 * MIB
# In the cases below, the parameter length_bytes is the size of a chunk.
CACHED_CHUNK_BYTES = [pytest.param(size * KIB, id=f"{size}KiB") for size in (64, 1024, 16384, 262144)]
COLD_CHUNK_BYTES = [pytest.param(size * KIB, id=f"{size}KiB") for size in (1024, 262144)]


@pytest.fixture
def path() -> Iterator[Path]:
    """A path for a file on the disk of the temporary files."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-throughput-", dir=DISK_FOLDER) as folder:
        yield Path(folder).resolve() / "file"
        gds.close_engines()
        gds.close_driver()


def measure_read(
    meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, *, chunk_bytes: int, is_cold: bool
) -> None:
    """Measure how fast each method reads a file into device memory in chunks, and check the bytes."""
    length_bytes = meter.choose_length(FILE_BYTES)
    chunk_bytes = min(chunk_bytes, length_bytes)
    path.write_bytes(pattern.payload(length_bytes, seed=seed))
    with contextlib.ExitStack() as stack, device.allocate(length_bytes) as memory:
        stack.callback(gds.close_engines)
        methods, why_not_direct = FileTransferMethods(path, memory, device, chunk_bytes, stack).get_methods(
            is_write=False
        )
        evidence["not_direct"] = why_not_direct

        def prepare() -> None:
            memory.fill(0)
            if is_cold:
                drop_from_cache(path)

        def check() -> None:
            pattern.check(memory.read(), seed=seed)

        for method_name, transfer in methods.items():
            meter.record_path(f"GPU{device.index}", name=method_name)
            prepare()
            transfer()
            check()
        prepare()
        if is_cold and cached_share(path) > CACHED_SHARE_MAX:
            evidence.unproven(f"the file system of {DISK_FOLDER} keeps data in the page cache, so that no file is cold")
            return
        meter.measure_methods(methods, moved_bytes=length_bytes, prepare=prepare, check=check)


@needs(cuda.device())
@pytest.mark.parametrize("length_bytes", CACHED_CHUNK_BYTES)
def test_cached_read(
    meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, length_bytes: int
) -> None:
    measure_read(meter, device, path, seed, evidence, chunk_bytes=length_bytes, is_cold=False)


@needs(cuda.device())
@pytest.mark.parametrize("length_bytes", COLD_CHUNK_BYTES)
def test_cold_read(meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, length_bytes: int) -> None:
    measure_read(meter, device, path, seed, evidence, chunk_bytes=length_bytes, is_cold=True)


@needs(cuda.device())
@pytest.mark.parametrize("length_bytes", COLD_CHUNK_BYTES)
@pytest.mark.parametrize("durable", [False, True], ids=["into_the_cache", "durable"])
def test_write(
    meter: Meter, device: Device, path: Path, seed: int, evidence: Evidence, length_bytes: int, *, durable: bool
) -> None:
    file_bytes = meter.choose_length(FILE_BYTES)
    path.write_bytes(bytes(file_bytes))
    with contextlib.ExitStack() as stack, device.allocate(file_bytes) as memory:
        stack.callback(gds.close_engines)
        chunk_bytes = min(length_bytes, file_bytes)
        methods, why_not_direct = FileTransferMethods(
            path, memory, device, chunk_bytes, stack, durable=durable
        ).get_methods(is_write=True)
        evidence["not_direct"] = why_not_direct
        payload_by_seed = {
            payload_seed: pattern.payload(file_bytes, seed=payload_seed) for payload_seed in (seed, seed ^ 1)
        }
        seeds = list(payload_by_seed)  # seeds[0] is the seed of the current write.

        def prepare() -> None:
            # The file still has the bytes of the previous write, so this write gets other bytes.
            seeds.reverse()
            memory.write(payload_by_seed[seeds[0]])

        for method_name, transfer in methods.items():
            meter.record_path(f"GPU{device.index}", name=method_name)
            prepare()
            transfer()
            pattern.check(path.read_bytes(), seed=seeds[0])
        path.write_bytes(bytes(file_bytes))
        meter.measure_methods(methods, moved_bytes=file_bytes, prepare=prepare)
        # The check is only at the end, because it reads the file into the page cache, which would affect the next
        # write.
        pattern.check(path.read_bytes(), seed=seeds[0])
