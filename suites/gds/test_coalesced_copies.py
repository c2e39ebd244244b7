"""Long reads into device memory use coalesced copies.

Several threads read chunks of the file into one pinned buffer, and one copy moves the buffer to the device.
"""

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

LENGTH_BYTES = 24 * MIB + 5
# With the first options, coalesced copies are off, and a copy moves at most one chunk of 1 MiB. With the second
# options, a copy moves up to 4 MiB.
CHUNK_OPTIONS = EngineOptions(chunk_bytes=MIB, coalesced_bytes=MIB)
COALESCED_OPTIONS = EngineOptions(chunk_bytes=MIB, coalesced_bytes=4 * MIB, coalesced_count=2, slice_bytes=300 * KIB)


@pytest.fixture
def memory(device: Device) -> Iterator[CudaMemory]:
    """Yield device memory for the whole file."""
    with device.allocate(LENGTH_BYTES) as memory:
        yield memory


def count_copies(options: EngineOptions, path: Path, memory: CudaMemory) -> int:
    """Read the whole file and return the number of copies to the device."""
    engine = Engine(options)
    file = native.OpenFile(os.open(path, os.O_RDONLY))
    try:
        copy_count_before = ledger.read_call_counts(Api.CUDA).get("cuMemcpyHtoDAsync_v2", 0)
        job = engine.submit(
            write=False,
            device_index=0,
            files=[file],
            extents=[0, 0, memory.address, LENGTH_BYTES],  # File index, file offset, device address, length.
            access="buffered",
        )
        job.wait(-1)  # -1 means no timeout.
        assert job.progress()["bytes"] == LENGTH_BYTES
        return ledger.read_call_counts(Api.CUDA)["cuMemcpyHtoDAsync_v2"] - copy_count_before
    finally:
        file.close()
        engine.close()


def test_coalesced_read_makes_fewer_copies_than_chunks(tmp_path: Path, seed: int, memory: CudaMemory) -> None:
    data = pattern.payload(LENGTH_BYTES, seed=seed)
    (tmp_path / "file").write_bytes(data)
    chunk_copy_count = count_copies(CHUNK_OPTIONS, tmp_path / "file", memory)
    assert memory.read(length_bytes=LENGTH_BYTES) == data
    memory.fill(0)
    coalesced_copy_count = count_copies(COALESCED_OPTIONS, tmp_path / "file", memory)
    assert memory.read(length_bytes=LENGTH_BYTES) == data
    assert chunk_copy_count >= LENGTH_BYTES // MIB
    assert coalesced_copy_count < chunk_copy_count / 1.5
