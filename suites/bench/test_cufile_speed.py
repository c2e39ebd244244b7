r"""Rates of file reads by cuFile in compat mode: several threads, and one thread as in earlier versions of gdrkit.gds.

Without nvidia-fs, libcufile reads into host memory and copies from there (compat mode). gdrkit.gds does not use such
reads, because its copy engine is faster. This benchmark shows how threads, the size of a call and registered
memory change the rate on a machine that has no direct path. Every method reads the same bytes, which are checked. The
counters of libcufile prove that libcufile made the reads. A run takes some minutes and 4 GiB of disk:

    pytest -c suites/pytest.ini suites/bench/test_cufile_speed.py --benchmark-enable -s \
        -o faulthandler_timeout=500 --records FILE

Without ``--benchmark-enable``, each method reads a small file once. The environment variable GDRKIT_BENCH_STORAGE_MIB
sets the size of the file, and GDRKIT_BENCH_STORAGE_FOLDER sets its folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench.storage_speed import check_all_bytes, create_random_file, find_fastest, log_progress, measure_in_turn
from support import udev

from gdrkit import cuda, cufile, gds
from gdrkit.gds._native import native
from gdrkit.gds.buffer import describe_buffer
from gdrkit.gds.cufile_driver import CufileOptions, SharedDriver
from gdrkit.gds.cufile_path import CufilePath
from gdrkit.harness.needs import cufile as cufile_needs
from gdrkit.harness.needs import needs
from gdrkit.harness.needs.cuda import device as needs_device
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.cuda import CudaMemory, Device
    from gdrkit.harness.evidence import Evidence

pytestmark = [needs(needs_device(), cufile_needs.driver, cufile_needs.udev_present), pytest.mark.timeout(540)]

# Size of the calls of earlier versions of gdrkit.gds, which made one call after the other, into unregistered memory.
EARLIER_CALL_BYTES = 64 * MIB
SMALL_RANGE_BYTES = 64 * KIB
# Pairs: the number of workers, and the size of a call in MiB.
SETTINGS = ((4, 4), (8, 1), (8, 4), (8, 16), (12, 8), (16, 2), (16, 4), (16, 8), (16, 16), (24, 8))
# The methods that read into memory that is not registered.
UNREGISTERED_METHODS = ("one_thread", "path_not_registered")
OPEN_FLAGS = {"cached": 0, "o_direct": os.O_DIRECT}


class CufileBench:
    """The file, the memory and the methods of the benchmark.

    make_one_thread_reader(), make_path_reader() and make_stream_reader() return a function that reads the file once
    into one of two memories. `memory` is registered with cuFile at the first transfer by the cuFile path of gdrkit.gds.
    `unregistered_memory` is never registered.
    """

    def __init__(self, file: Path, device: Device, stack: contextlib.ExitStack, *, length_bytes: int) -> None:
        self.file, self.device, self.stack, self.length_bytes = file, device, stack, length_bytes
        self.memory, self.unregistered_memory = (stack.enter_context(device.allocate(length_bytes)) for _ in range(2))
        self.shared_driver = SharedDriver(CufileOptions(workers_count=max(workers for workers, _ in SETTINGS)))
        stack.callback(self.shared_driver.close)
        self.route_monitor = cufile.RouteMonitor(self.shared_driver.driver, self.shared_driver.host_tree)

    def open(self, flags: int) -> int:
        """Open the file, and return its descriptor. The end of `stack` closes it."""
        fd = os.open(self.file, os.O_RDONLY | flags)
        self.stack.callback(os.close, fd)
        return fd

    def make_one_thread_reader(self, flags: int, call_bytes: int) -> Callable[[], None]:
        """Return a function that reads by one call after the other, into memory that is not registered."""
        handle = self.stack.enter_context(cufile.FileHandle(self.shared_driver.driver, self.open(flags)))

        def read() -> None:
            for offset in range(0, self.length_bytes, call_bytes):
                length = min(call_bytes, self.length_bytes - offset)
                moved_bytes = handle.read(
                    self.unregistered_memory, file_offset_bytes=offset, offset_bytes=offset, length_bytes=length
                )
                assert moved_bytes == length

        return read

    def make_path_reader(
        self, flags: int, options: CufileOptions, range_bytes: int | None = None
    ) -> Callable[[], None]:
        """Return a function that reads by the cuFile path of gdrkit.gds, as ranges of `range_bytes` or as one range."""
        file = native.OpenFile(os.open(self.file, os.O_RDONLY | flags))
        cufile_path = CufilePath(self.shared_driver, file, self.device.index, options)
        self.stack.callback(cufile_path.close)
        memory = self.memory if options.registers_memory else self.unregistered_memory
        # Each extent has four numbers: index of the file, offset in the file, address, length.
        extents: list[int] = []
        for offset in range(0, self.length_bytes, range_bytes or self.length_bytes):
            length = min(range_bytes or self.length_bytes, self.length_bytes - offset)
            extents += (0, offset, memory.address + offset, length)

        def read() -> None:
            job = cufile_path.submit(write=False, extents=extents, memory=describe_buffer(memory, writable=True))
            job.wait(-1)
            assert (job.failure, job.moved_bytes) == (None, self.length_bytes)

        return read

    def make_stream_reader(self, flags: int, part_bytes: int) -> Callable[[], None]:
        """Return a function that reads by asynchronous calls on one stream, into registered memory.

        The function uses only one stream, because cuFile 1.15 in compat mode reads wrong bytes if several streams read
        into the same registered memory.
        """
        handle = self.stack.enter_context(cufile.FileHandle(self.shared_driver.driver, self.open(flags)))
        stream = self.stack.enter_context(self.device.stream())

        def read() -> None:
            with self.shared_driver.buffer_cache.lease(self.memory):
                transfers = []
                for offset in range(0, self.length_bytes, part_bytes):
                    length = min(part_bytes, self.length_bytes - offset)
                    transfer = handle.read_async(
                        stream, self.memory, file_offset_bytes=offset, offset_bytes=offset, length_bytes=length
                    )
                    transfers.append(transfer)
                stream.synchronize()
                assert sum(transfer.bytes() for transfer in transfers) == self.length_bytes

        return read

    def read_and_get_counters(self, read: Callable[[], None], memory: CudaMemory) -> dict[str, int]:
        """Read once into cleared memory, check every byte, and return the increase of the counters of libcufile."""
        memory.fill(0)
        with self.route_monitor.watch(self.open(0)):
            read()
        check_all_bytes(memory, self.file, length_bytes=self.length_bytes)
        return dict(self.route_monitor.proof.counter_increases)


@pytest.fixture
def is_measured(request: pytest.FixtureRequest) -> bool:
    """Whether the rates are measured."""
    return bool(request.config.getoption("--benchmark-enable"))


@pytest.fixture(scope="module")
def start_libcufile() -> None:
    """Transfer once, so that libcufile opens the descriptors that it keeps until the process ends.

    The leak check does not count descriptors that a fixture of module scope opens.
    """
    with (
        tempfile.TemporaryDirectory(dir=DISK_FOLDER) as folder,
        udev.provide_entry(Path(folder)),
        contextlib.ExitStack() as stack,
    ):
        device = stack.enter_context(cuda.Device(0))
        file = Path(folder) / "file"
        file.write_bytes(bytes(MIB))
        bench = CufileBench(file, device, stack, length_bytes=MIB)
        bench.make_path_reader(0, CufileOptions())()
        bench.make_stream_reader(0, MIB)()


@pytest.fixture
def bench(start_libcufile: None, device: Device, *, is_measured: bool) -> Iterator[CufileBench]:
    """Yield the benchmark with a file of random bytes. libcufile needs an entry for the disk in udev's database."""
    length_bytes = int(os.environ.get("GDRKIT_BENCH_STORAGE_MIB", "4096" if is_measured else "8")) * MIB
    parent_folder = os.environ.get("GDRKIT_BENCH_STORAGE_FOLDER", DISK_FOLDER)
    folder = Path(tempfile.mkdtemp(prefix="gdrkit-cufile-speed-", dir=parent_folder))
    try:
        with udev.provide_entry(folder), contextlib.ExitStack() as stack:
            create_random_file(folder / "file", length_bytes)
            yield CufileBench(folder / "file", device, stack, length_bytes=length_bytes)
    finally:
        gds.close_engines()
        shutil.rmtree(folder)


@pytest.mark.parametrize("access", OPEN_FLAGS)
def test_threads_beside_one_thread(bench: CufileBench, evidence: Evidence, access: str, *, is_measured: bool) -> None:
    """Read the file as one range: from the page cache, or with O_DIRECT from the disk."""
    flags = OPEN_FLAGS[access]
    settings = SETTINGS if is_measured else ((2, 1),)
    candidates: dict[str, Callable[[], None]] = {
        f"{workers} threads, {part_mib} MiB": bench.make_path_reader(
            flags, CufileOptions(workers_count=workers, part_bytes_max=part_mib * MIB)
        )
        for workers, part_mib in settings
    }
    candidates["default"] = bench.make_path_reader(flags, CufileOptions())
    fastest_name = find_fastest(candidates, bench.length_bytes, repeats_count=2 if is_measured else 1)
    evidence["fastest"] = fastest_name
    methods = {
        "one_thread": bench.make_one_thread_reader(flags, EARLIER_CALL_BYTES),
        "path": candidates["default"],
        "fastest_threads": candidates[fastest_name],
        "path_not_registered": bench.make_path_reader(flags, CufileOptions(registers_memory=False)),
        "one_stream": bench.make_stream_reader(flags, 4 * MIB),
    }
    measure_and_record(bench, evidence, methods, rounds_count=5 if is_measured else 1)


def test_many_small_ranges_beside_one_thread(bench: CufileBench, evidence: Evidence, *, is_measured: bool) -> None:
    """Read cached ranges of 64 KiB. The cuFile path makes no batch, because in compat mode no read is direct."""
    methods = {
        "one_thread": bench.make_one_thread_reader(0, SMALL_RANGE_BYTES),
        "path": bench.make_path_reader(0, CufileOptions(), SMALL_RANGE_BYTES),
    }
    # There are fewer rounds here, because one thread needs several seconds for the 65,536 calls.
    measure_and_record(bench, evidence, methods, rounds_count=3 if is_measured else 1, attempts_count=1)


def measure_and_record(
    bench: CufileBench,
    evidence: Evidence,
    methods: dict[str, Callable[[], None]],
    *,
    rounds_count: int,
    attempts_count: int = 2,
) -> None:
    """Check the bytes and the counters of each method, measure the methods in turn, and record the rates."""
    memory_by_method = {
        name: bench.unregistered_memory if name in UNREGISTERED_METHODS else bench.memory for name in methods
    }
    counters_by_method = {}
    for name, read in methods.items():
        # If the bytes are wrong, the record of the failed case names the method.
        evidence["checked_method"] = name
        counters_by_method[name] = bench.read_and_get_counters(read, memory_by_method[name])
    evidence["counters"] = counters_by_method
    evidence["file_bytes"] = bench.length_bytes
    assert all(method_counters.get("n_posix_reads", 0) > 0 for method_counters in counters_by_method.values())
    series_by_method = measure_in_turn(
        methods, bench.length_bytes, rounds_count=rounds_count, attempts_count=attempts_count
    )
    if rounds_count == 1:
        return
    for name, method_series in series_by_method.items():
        evidence.number(f"{name}_gb_per_s_median", method_series.rate_gb_per_s)
        evidence.number(f"{name}_cpu_s_per_gib", method_series.cpu_s_per_gib)
        evidence.number(f"{name}_spread_ratio", method_series.spread_ratio)
        if name != "one_thread":
            ratio = method_series.rate_gb_per_s / series_by_method["one_thread"].rate_gb_per_s
            evidence.number(f"{name}_over_one_thread_ratio", ratio)
            log_progress(f"{name} is {ratio:.2f} times as fast as one thread")
