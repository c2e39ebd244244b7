"""Time of short transfers between files and host memory, compared with kvikio and with the system calls themselves.

All calls are measured in turn, so that the load of the machine affects all of them. kvikio runs without cuFile
(compatibility mode). One case measures only the start of a transfer, as processor time of the calling thread,
because other threads move the bytes. Another case compares awaited reads with pread(2) in threads of the event loop.
Without --benchmark-enable, each case runs only one round. GDRKIT_BENCH_STORAGE_FOLDER sets the folder of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench.interleaved import measure_interleaved
from bench.storage_speed import Kvikio, allocate_host_memory, create_random_file

from gdrkit import gds
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    import mmap
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from bench.interleaved import CallTimes

    from gdrkit.harness.evidence import Evidence

PAGE_BYTES = 4 * KIB
READS_COUNT = 1000
FILE_BYTES = READS_COUNT * PAGE_BYTES


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack
    gds.close_engines()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a file of random bytes, which is in the page cache."""
    path = Path(os.environ.get("GDRKIT_BENCH_STORAGE_FOLDER", tmp_path)) / "transfer_cost"
    create_random_file(path, FILE_BYTES)
    path.read_bytes()
    yield path
    path.unlink()


@pytest.fixture
def rounds_count(request: pytest.FixtureRequest) -> int:
    return 101 if request.config.getoption("--benchmark-enable") else 1


def record_times(evidence: Evidence, name: str, times: Mapping[str, CallTimes]) -> None:
    for method, call_times in times.items():
        evidence.number(f"{name}_{method}_us", call_times.median_ns / 1e3)
        evidence.number(f"{name}_{method}_min_us", call_times.minimum_ns / 1e3)


def make_cyclic_call(call: Callable[[int], object], *, length_bytes: int) -> Callable[[], object]:
    """Return a function that calls `call` with the next offset, and begins again at the end of the file."""
    offset = 0

    def call_next() -> None:
        nonlocal offset
        call(offset)
        offset = (offset + length_bytes) % (FILE_BYTES - FILE_BYTES % length_bytes)

    return call_next


def split_into_pages(memory: mmap.mmap) -> list[memoryview]:
    view = memoryview(memory)
    return [view[offset : offset + PAGE_BYTES] for offset in range(0, FILE_BYTES, PAGE_BYTES)]


@needs(host.module("kvikio"), host.module("numpy"))
def test_one_4k_read_at_a_time_beside_kvikio(
    evidence: Evidence, stack: contextlib.ExitStack, path: Path, rounds_count: int
) -> None:
    import numpy as np

    memory = allocate_host_memory(stack, FILE_BYTES)
    pages = split_into_pages(memory)
    arrays = [np.frombuffer(page, dtype=np.uint8) for page in pages]  # The buffers that kvikio accepts.
    file = stack.enter_context(gds.File(path, direct="never"))
    kvikio_file = stack.enter_context(Kvikio(stack).open(path))
    read_functions: dict[str, Callable[[int], object]] = {
        "gdrkit": lambda offset: file.read_into(arrays[offset // PAGE_BYTES], file_offset_bytes=offset),
        "kvikio": lambda offset: kvikio_file.read(arrays[offset // PAGE_BYTES], PAGE_BYTES, offset),
        "preadv": lambda offset: os.preadv(file.fileno(), [pages[offset // PAGE_BYTES]], offset),
    }
    file_bytes = path.read_bytes()
    for read in read_functions.values():
        memory[:] = bytes(FILE_BYTES)
        for offset in range(0, FILE_BYTES, PAGE_BYTES):
            read(offset)
        assert memory[:] == file_bytes
    calls = {name: make_cyclic_call(read, length_bytes=PAGE_BYTES) for name, read in read_functions.items()}
    record_times(evidence, "read_4k", measure_interleaved(calls, rounds_count=rounds_count, calls_count=READS_COUNT))
    # `stack` cannot close the memory while views of it exist.
    arrays.clear()
    pages.clear()


def test_1_mib_write_beside_pwrite(
    evidence: Evidence, stack: contextlib.ExitStack, path: Path, rounds_count: int
) -> None:
    data = allocate_host_memory(stack, MIB)
    data[:] = os.urandom(MIB)
    file = stack.enter_context(gds.File(path, "r+", direct="never"))
    write_functions: dict[str, Callable[[int], object]] = {
        "gdrkit": lambda offset: file.write_from(data, file_offset_bytes=offset),
        "gdrkit_started": lambda offset: file.start_write_from(data, file_offset_bytes=offset).result(),
        "pwrite": lambda offset: os.pwrite(file.fileno(), data, offset),
    }
    for write in write_functions.values():
        os.pwrite(file.fileno(), bytes(MIB), MIB)
        write(MIB)
        assert os.pread(file.fileno(), MIB, MIB) == data[:]
    calls = {name: make_cyclic_call(write, length_bytes=MIB) for name, write in write_functions.items()}
    record_times(evidence, "write_1m", measure_interleaved(calls, rounds_count=rounds_count, calls_count=16))


@needs(host.module("kvikio"), host.module("numpy"))
def test_start_of_a_transfer_beside_kvikio(
    evidence: Evidence, stack: contextlib.ExitStack, path: Path, rounds_count: int
) -> None:
    import numpy as np

    memory = allocate_host_memory(stack, FILE_BYTES)
    pages = split_into_pages(memory)
    arrays = [np.frombuffer(page, dtype=np.uint8) for page in pages]
    file = stack.enter_context(gds.File(path, direct="never"))
    kvikio = Kvikio(stack)
    kvikio_file = stack.enter_context(kvikio.open(path))
    kvikio.apply_settings(num_threads=2)
    offsets = [index * PAGE_BYTES for index in range(200)]

    def start_gdrkit() -> list[Callable[[], object]]:
        return [
            file.start_read_into(
                memory, file_offset_bytes=offset, length_bytes=PAGE_BYTES, buffer_offset_bytes=offset
            ).result
            for offset in offsets
        ]

    def start_kvikio() -> list[Callable[[], object]]:
        return [kvikio_file.pread(arrays[index], PAGE_BYTES, offset).get for index, offset in enumerate(offsets)]

    times_us: dict[str, list[float]] = {"gdrkit": [], "kvikio": []}
    start_functions = [("gdrkit", start_gdrkit), ("kvikio", start_kvikio)]
    for _ in range(rounds_count):
        start_functions.reverse()
        for name, start in start_functions:
            begin_ns = time.thread_time_ns()
            wait_functions = start()
            times_us[name].append((time.thread_time_ns() - begin_ns) / len(offsets) / 1e3)
            for wait in wait_functions:
                wait()
            wait_functions.clear()
    for name, times in times_us.items():
        evidence.number(f"start_{name}_cpu_us", statistics.median(times))
        evidence.number(f"start_{name}_cpu_min_us", min(times))
    # `stack` cannot close the memory while views of it exist.
    arrays.clear()
    pages.clear()


def test_thousand_awaited_reads_beside_threads(
    evidence: Evidence, stack: contextlib.ExitStack, path: Path, rounds_count: int
) -> None:
    memory = allocate_host_memory(stack, FILE_BYTES)
    pages = split_into_pages(memory)
    file_bytes = path.read_bytes()

    async def read_gdrkit(file: gds.AsyncFile) -> None:
        await asyncio.gather(
            *(
                file.read_into(memory, file_offset_bytes=offset, length_bytes=PAGE_BYTES, buffer_offset_bytes=offset)
                for offset in range(0, FILE_BYTES, PAGE_BYTES)
            )
        )

    async def read_in_threads(fd: int) -> None:
        await asyncio.gather(
            *(asyncio.to_thread(os.preadv, fd, [page], index * PAGE_BYTES) for index, page in enumerate(pages))
        )

    async def measure() -> dict[str, list[float]]:
        times_us: dict[str, list[float]] = {"gdrkit": [], "threads": []}
        async with gds.AsyncFile(path, direct="never") as file:
            read_functions: list[tuple[str, Callable[[], Awaitable[None]]]] = [
                ("gdrkit", partial(read_gdrkit, file)),
                ("threads", partial(read_in_threads, file.file.fileno())),
            ]
            for _ in range(rounds_count):
                read_functions.reverse()
                for name, read in read_functions:
                    memory[:] = bytes(FILE_BYTES)
                    begin_s = time.perf_counter()
                    await read()
                    times_us[name].append((time.perf_counter() - begin_s) / READS_COUNT * 1e6)
                    assert memory[:] == file_bytes
        return times_us

    for name, times in asyncio.run(measure()).items():
        evidence.number(f"awaited_4k_{name}_us", statistics.median(times))
        evidence.number(f"awaited_4k_{name}_min_us", min(times))
    pages.clear()
