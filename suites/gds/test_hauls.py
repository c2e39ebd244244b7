"""Long reads go to a device in long copies, which threads load together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support import ledger

from gdrkit import pattern
from gdrkit.errors import Api
from gdrkit.gds import Engine, EngineOptions
from gdrkit.gds._native import native
from gdrkit.harness.needs import cuda, needs, software
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.cuda import CudaMemory, Device

pytestmark = needs(cuda.device(), software(Api.CUDA))

LENGTH = 24 * MIB + 5
PIECES = EngineOptions(piece_bytes=MIB, haul_bytes=MIB)
HAULS = EngineOptions(piece_bytes=MIB, haul_bytes=4 * MIB, hauls_count=2, load_bytes=300 * KIB)


@pytest.fixture
def memory(device: Device) -> Iterator[CudaMemory]:
    with device.allocate(LENGTH) as memory:
        yield memory


def copies_of(options: EngineOptions, path: Path, memory: CudaMemory) -> int:
    """How many copies the device makes of one read of all."""
    engine = Engine(options)
    fd = os.open(path, os.O_RDONLY)
    try:
        before = ledger.calls(Api.CUDA).get("cuMemcpyHtoDAsync_v2", 0)
        job = engine.submit(
            write=False,
            device_index=0,
            files=[native().OpenFile(fd)],
            extents=[0, 0, memory.address, LENGTH],
            access="buffered",
        )
        job.wait(-1)
        assert job.progress()["bytes"] == LENGTH
        return ledger.calls(Api.CUDA)["cuMemcpyHtoDAsync_v2"] - before
    finally:
        os.close(fd)
        engine.close()


def test_a_long_read_is_fewer_copies_than_pieces(tmp_path: Path, seed: int, memory: CudaMemory) -> None:
    data = pattern.payload(LENGTH, seed=seed)
    (tmp_path / "file").write_bytes(data)
    pieces = copies_of(PIECES, tmp_path / "file", memory)
    assert memory.read(length_bytes=LENGTH) == data
    memory.fill(0)
    hauls = copies_of(HAULS, tmp_path / "file", memory)
    assert memory.read(length_bytes=LENGTH) == data
    assert pieces >= LENGTH // MIB
    assert hauls < pieces / 1.5
