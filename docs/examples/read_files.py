"""Files and memory: reads, writes, many ranges, many files, copies, and the route of the bytes."""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
from pathlib import Path

from gdrkit import cuda, gds

MIB = 1 << 20

with tempfile.TemporaryDirectory() as folder_name, cuda.Device(0) as device, device.allocate(MIB) as memory:
    folder = Path(folder_name)
    for index in range(4):
        (folder / f"part{index}").write_bytes(os.urandom(MIB // 4))

    # By default (direct="preferred"), gdrkit copies through pinned host memory if the direct path is not proven, and
    # warns once. This example ignores the warning.
    with warnings.catch_warnings(), gds.File(folder / "part0") as file:
        warnings.simplefilter("ignore", gds.FallbackWarning)
        result = file.read_into(memory, length_bytes=1000)
        print(result.bytes, "bytes by", result.route.value, "because", result.why_not_direct or "the path is proven")

    # start_readv() starts a transfer of several ranges and returns its future.
    with gds.File(folder / "part1", direct="never") as file:
        transfer: gds.Transfer = file.start_readv(memory, [(0, 4096), (8192, 4096)])
        assert transfer.result(timeout_s=10).range_bytes == (4096, 4096)
        # cached_share() is the fraction of the file's bytes that are in the page cache.
        assert 0 <= file.cached_share() <= 1

    # read_files() reads many whole files into one buffer. Each file starts where the previous one ends.
    lengths_bytes = [MIB // 4] * 4
    gds.read_files([folder / f"part{index}" for index in range(4)], memory, lengths_bytes).result()
    assert memory.read(length_bytes=16) == (folder / "part0").read_bytes()[:16]

    # In a coroutine, each transfer is awaited. If the coroutine is cancelled, the transfer is too.
    async def read_two_ranges() -> None:
        """Read two ranges at the same time."""
        async with gds.AsyncFile(folder / "part0", direct="never") as file:
            pending_reads = [file.read_into(memory, file_offset_bytes=begin, length_bytes=512) for begin in (0, 512)]
            assert [read_result.bytes for read_result in await asyncio.gather(*pending_reads)] == [512, 512]

    asyncio.run(read_two_ranges())

    # This read fails, because it requests more bytes than the file has. The error says how many bytes arrived.
    with gds.File(folder / "part2", direct="never") as file:
        try:
            file.read_into(memory, length_bytes=MIB)
        except gds.TransferFailed as error:
            print(error.reason.value, "after", error.partial_result.bytes, "bytes")

    # A durable write returns when the bytes are on the disk. copy_file() copies through GPU memory. With check=True, it
    # compares the copy with its source.
    with gds.File(folder / "written", "w", direct="never") as file:
        file.write_from(memory, length_bytes=MIB, durable=True)
    copy_result = gds.copy_file(folder / "written", folder / "copied", direct="never", check=True)
    assert copy_result.is_checked
    assert (folder / "copied").read_bytes() == (folder / "written").read_bytes()

    # describe_buffer() shows what a transfer knows about a buffer, here host memory.
    buffer = gds.describe_buffer(bytearray(100), writable=True)
    assert buffer.is_host
    buffer.release()
    # All transfers of host memory share one engine.
    assert gds.engine_for(gds.HOST) is gds.engine_for(gds.HOST)

    # A program can create an engine with other settings, for example for a comparison.
    gds.Engine(gds.EngineOptions(workers_count=1, buffers_count=2)).close()
gds.close_driver()
gds.close_engines()
