r"""Rates of file transfers to and from device memory, compared with kvikio and with the limits of bus and disk.

The rates are medians of five transfers, which are measured in turn. For each kind of transfer, every byte of one
transfer is checked. A "cached" file is in the page cache. A "cold" file was dropped from the page cache, which is
verified with cachestat(2). A run takes some minutes and 16 GB of disk:

    pytest -c suites/pytest.ini suites/bench/test_storage_speed.py --benchmark-enable -s \
        -o faulthandler_timeout=1200 --records FILE

Without ``--benchmark-enable``, each kind of transfer runs once with a small file. The environment variable
GDRKIT_BENCH_STORAGE_MIB sets the size of the file, and GDRKIT_BENCH_STORAGE_FOLDER sets its folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bench.storage_speed import (
    DeviceRange,
    Kvikio,
    allocate_host_memory,
    check_all_bytes,
    create_random_file,
    drop_cache,
    find_fastest,
    log_progress,
    make_direct_reader,
    make_pinned_copier,
    measure_in_turn,
    split_file,
)

from gdrkit import gds
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.storage_speed import Series

    from gdrkit.cuda import CudaMemory, Device
    from gdrkit.harness.evidence import Evidence

pytestmark = [needs(cuda_needs.device(), host.module("kvikio")), pytest.mark.timeout(1200)]

PAGE_BYTES = 4 * KIB


class Bench:
    """The file, the memory and the kvikio binding of a benchmark, and how often each transfer is repeated."""

    def __init__(
        self, folder: Path, device: Device, memory: CudaMemory, evidence: Evidence, *, is_measured: bool
    ) -> None:
        self.folder, self.device, self.memory, self.evidence = folder, device, memory, evidence
        self.length_bytes = memory.length_bytes
        self.rounds_count = 5 if is_measured else 1
        self.repeats_count = 2 if is_measured else 1
        self.thread_counts = (8, 16, 32) if is_measured else (2,)
        self.file = folder / "file"
        self.stack = contextlib.ExitStack()
        self.kvikio = Kvikio(self.stack)

    def list_kvikio_settings(
        self, direction: str, *, auto_direct_values: tuple[bool, ...], threads_max: int = 32
    ) -> dict[str, dict[str, object]]:
        """Return the settings of kvikio to compare, by a name for each. `direction` is ``read`` or ``write``.

        `auto_direct_values` has the values of kvikio's setting auto_direct_io to try. The function and its callers omit
        settings that were much slower in one measurement: 32 threads with tasks of 4 MiB, direct reads of cached files,
        32 threads for the disk, and buffered writes.
        """
        return {
            f"kvikio {threads} threads, {task_mib} MiB, {'auto direct' if auto_direct else 'buffered'}": {
                "num_threads": threads,
                "task_size": task_mib * MIB,
                f"auto_direct_io_{direction}": auto_direct,
            }
            for auto_direct in auto_direct_values
            for threads in self.thread_counts
            for task_mib in (4, 16)
            if threads <= threads_max and (threads, task_mib) != (32, 4)
        }

    def record(self, name: str, value: float) -> None:
        """Add a number to the record, and print it."""
        self.evidence.number(name, value)
        log_progress(f"{name} = {value:.4g}")

    def record_rate(self, name: str, series: Series) -> None:
        """Add the median rate and the median processor time of a series to the record, and print them."""
        self.record(f"{name}_gb_per_s", series.rate_gb_per_s)
        self.record(f"{name}_cpu_s_per_gib", series.cpu_s_per_gib)

    def check_reader(self, read: Callable[[], object]) -> None:
        """Call `read` once with cleared memory, and check every byte. This also warms up the reader."""
        self.memory.fill(0)
        read()
        check_all_bytes(self.memory, self.file, length_bytes=self.length_bytes)


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, device: Device, evidence: Evidence) -> Iterator[Bench]:
    is_measured = bool(request.config.getoption("--benchmark-enable"))
    length_bytes = int(os.environ.get("GDRKIT_BENCH_STORAGE_MIB", "4096" if is_measured else "32")) * MIB
    folder = Path(os.environ.get("GDRKIT_BENCH_STORAGE_FOLDER", tmp_path)) / "storage_speed"
    folder.mkdir(parents=True)
    try:
        with device.allocate(length_bytes) as memory:
            bench = Bench(folder, device, memory, evidence, is_measured=is_measured)
            with bench.stack:
                yield bench
    finally:
        gds.close_engines()
        shutil.rmtree(folder)


def test_device_file_transfers_beside_kvikio(bench: Bench) -> None:
    log_progress(f"{bench.length_bytes >> 20} MiB in {bench.folder}; kvikio {bench.kvikio.version}")
    create_random_file(bench.file, bench.length_bytes)
    log_progress("the file is created")
    with gds.File(bench.file, direct="never") as file:
        kvikio_setting_name = measure_cached_reads(bench, file)
        measure_small_reads(bench, file)
        measure_many_files(bench, file, kvikio_setting_name)
        measure_cold_reads(bench, file)
    measure_writes(bench)
    bench.evidence["kvikio"] = bench.kvikio.version
    bench.evidence["file_bytes"] = bench.length_bytes


def test_host_file_reads_beside_kvikio(bench: Bench) -> None:
    create_random_file(bench.file, bench.length_bytes)
    with gds.File(bench.file, direct="never") as file:
        measure_host_reads(bench, file)
    bench.evidence["kvikio"] = bench.kvikio.version
    bench.evidence["file_bytes"] = bench.length_bytes


def measure_cached_reads(bench: Bench, file: gds.File) -> str:
    """Measure cached reads by gdrkit and kvikio, and pinned copies. Return the name of kvikio's fastest setting."""
    log_progress("cached reads: fastest setting of kvikio")
    settings = bench.list_kvikio_settings("read", auto_direct_values=(False,))
    candidates = {
        name: bench.kvikio.make_reader(bench.file, bench.memory, **setting) for name, setting in settings.items()
    }
    with bench.device.current():
        bench.check_reader(next(iter(candidates.values())))
        fastest_name = find_fastest(candidates, bench.length_bytes, repeats_count=bench.repeats_count + 1)
        bench.evidence["cached_read_kvikio_best"] = fastest_name
        bench.check_reader(candidates[fastest_name])
        bench.check_reader(lambda: file.read_into(bench.memory))
        copy, free_memory = make_pinned_copier(bench.device, bench.memory, length_bytes=bench.length_bytes)
        copy()
        reads = {
            "gdrkit": lambda: file.read_into(bench.memory),
            "kvikio": candidates[fastest_name],
            "pinned copy": copy,
        }
        series_by_name = measure_in_turn(reads, bench.length_bytes, rounds_count=bench.rounds_count)
        free_memory()
    bench.check_reader(lambda: file.read_into(bench.memory))
    bench.record_rate("cached_read_gdrkit", series_by_name["gdrkit"])
    bench.record_rate("cached_read_kvikio_best", series_by_name["kvikio"])
    bench.record_rate("pinned_copy", series_by_name["pinned copy"])
    bench.record("cached_read_gdrkit_spread_ratio", series_by_name["gdrkit"].spread_ratio)
    bench.record("cached_read_kvikio_spread_ratio", series_by_name["kvikio"].spread_ratio)
    bench.record("pinned_copy_spread_ratio", series_by_name["pinned copy"].spread_ratio)
    return fastest_name


def measure_host_reads(bench: Bench, file: gds.File) -> None:
    """Measure cached reads into host memory."""
    log_progress("cached reads into host memory")
    memory = allocate_host_memory(bench.stack, bench.length_bytes)
    settings = bench.list_kvikio_settings("read", auto_direct_values=(False,))
    candidates = {name: bench.kvikio.make_reader(bench.file, memory, **setting) for name, setting in settings.items()}
    fastest_name = find_fastest(candidates, bench.length_bytes, repeats_count=bench.repeats_count)
    readers = {"gdrkit": lambda: file.read_into(memory), "kvikio": candidates[fastest_name]}
    series_by_name = measure_in_turn(readers, bench.length_bytes, rounds_count=bench.rounds_count)
    bench.record_rate("host_read_gdrkit", series_by_name["gdrkit"])
    bench.record_rate("host_read_kvikio", series_by_name["kvikio"])
    memory[:] = bytes(bench.length_bytes)
    file.read_into(memory)
    check_all_bytes(memory, bench.file, length_bytes=bench.length_bytes)


def measure_small_reads(bench: Bench, file: gds.File) -> None:
    """Measure reads of 4 KiB at random offsets of the file into consecutive memory."""
    log_progress("4 KiB random cached reads")
    reads_count = min(bench.length_bytes // PAGE_BYTES, 32768 if bench.rounds_count > 1 else 512)
    rng = random.Random(1)
    offsets = [rng.randrange(bench.length_bytes // PAGE_BYTES) * PAGE_BYTES for _ in range(reads_count)]
    ranges = [(offset, PAGE_BYTES) for offset in offsets]
    candidates = make_kvikio_small_readers(bench, offsets)
    fastest_name = find_fastest(candidates, reads_count * PAGE_BYTES, repeats_count=bench.repeats_count)
    bench.evidence["random_4k_kvikio_best"] = fastest_name

    def read_one_by_one() -> None:
        for index, offset in enumerate(offsets):
            file.read_into(
                bench.memory, file_offset_bytes=offset, length_bytes=PAGE_BYTES, buffer_offset_bytes=index * PAGE_BYTES
            )

    parallel_readers = {"gdrkit": lambda: file.readv(bench.memory, ranges), "kvikio": candidates[fastest_name]}
    sequential_readers = {"gdrkit": read_one_by_one, "kvikio": candidates["kvikio, one thread"]}
    for read in (*parallel_readers.values(), read_one_by_one):
        bench.memory.fill(0)
        read()
        with bench.file.open("rb") as posix_file:
            expected_bytes = b"".join(os.pread(posix_file.fileno(), PAGE_BYTES, offset) for offset in offsets)
        assert bench.memory.read(length_bytes=reads_count * PAGE_BYTES) == expected_bytes
    for name, readers, attempts_count in (
        ("random_4k", parallel_readers, 3),
        ("one_4k_at_a_time", sequential_readers, 1),
    ):
        series_by_name = measure_in_turn(
            readers, reads_count * PAGE_BYTES, rounds_count=bench.rounds_count, attempts_count=attempts_count
        )
        bench.record(f"{name}_gdrkit_ops_per_s", series_by_name["gdrkit"].rate_gb_per_s * 1e9 / PAGE_BYTES)
        bench.record(f"{name}_kvikio_ops_per_s", series_by_name["kvikio"].rate_gb_per_s * 1e9 / PAGE_BYTES)


def make_kvikio_small_readers(bench: Bench, offsets: list[int]) -> dict[str, Callable[[], object]]:
    """Return functions that read 4 KiB at each offset with kvikio, by different methods and numbers of threads."""
    kvikio_file = bench.stack.enter_context(bench.kvikio.open(bench.file))
    ranges = [DeviceRange(bench.memory, index * PAGE_BYTES, PAGE_BYTES) for index in range(len(offsets))]
    bench.kvikio.apply_settings(auto_direct_io_read=False)

    def read_every_nth(first_index: int, step: int) -> None:
        with bench.device.current():
            for index in range(first_index, len(offsets), step):
                kvikio_file.raw_read(bench.memory, PAGE_BYTES, offsets[index], index * PAGE_BYTES)

    def read_in_threads(threads_count: int) -> None:
        threads = [
            threading.Thread(target=read_every_nth, args=(first_index, threads_count))
            for first_index in range(threads_count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def read_in_thread_pool(threads_count: int) -> None:
        bench.kvikio.apply_settings(num_threads=threads_count)
        with bench.device.current():
            futures = [
                kvikio_file.pread(range_, PAGE_BYTES, offset) for range_, offset in zip(ranges, offsets, strict=True)
            ]
            for future in futures:
                future.get()

    candidates: dict[str, Callable[[], object]] = {"kvikio, one thread": partial(read_every_nth, 0, 1)}
    candidates |= {f"kvikio, {count} threads": partial(read_in_threads, count) for count in (2, 4, 8)}
    candidates |= {f"kvikio, {count} in its pool": partial(read_in_thread_pool, count) for count in bench.thread_counts}
    return candidates


def measure_many_files(bench: Bench, file: gds.File, kvikio_setting_name: str) -> None:
    """Measure cached reads of the same data from many files. Each transfer opens and closes all files."""
    file_counts = (64, 4096) if bench.rounds_count > 1 else (64, 512)
    for part_bytes in (bench.length_bytes // files_count for files_count in file_counts):
        paths = split_file(bench.file, bench.folder / f"parts_{part_bytes}", part_bytes)
        os.sync()
        name = f"{len(paths)} x {part_bytes >> 10} KiB"
        log_progress(f"cached reads of {name}")
        lengths_bytes = [part_bytes] * len(paths)

        def read(paths: list[Path] = paths, lengths_bytes: list[int] = lengths_bytes) -> object:
            return gds.read_files(paths, bench.memory, lengths_bytes).result()

        bench.check_reader(read)
        kvikio_options = bench.list_kvikio_settings("read", auto_direct_values=(False,))[kvikio_setting_name]
        kvikio_read = bench.kvikio.make_files_reader(paths, bench.memory, **kvikio_options)
        readers: dict[str, Callable[[], Any]] = {"gdrkit": read, "one file": lambda: file.read_into(bench.memory)}
        with bench.device.current():
            bench.check_reader(kvikio_read)
            series_by_name = measure_in_turn(
                {**readers, "kvikio": kvikio_read}, bench.length_bytes, rounds_count=bench.rounds_count
            )
        record_prefix = "64x64mib" if len(paths) == 64 else "4096x1mib"
        bench.record_rate(f"cached_{record_prefix}", series_by_name["gdrkit"])
        bench.record_rate(f"cached_{record_prefix}_kvikio", series_by_name["kvikio"])
        bench.record(
            f"cached_{record_prefix}_of_one_file_ratio",
            series_by_name["gdrkit"].rate_gb_per_s / series_by_name["one file"].rate_gb_per_s,
        )


def measure_cold_reads(bench: Bench, file: gds.File) -> None:
    """Measure reads from the disk by gdrkit, by kvikio, and by a reader that only reads with O_DIRECT."""
    # The reader with O_DIRECT is not an upper bound: on a shared disk, gdrkit was faster.
    log_progress("cold reads: fastest reader by O_DIRECT")

    def drop_file() -> None:
        drop_cache(bench.file)

    # Pairs: the number of threads, and the size of each read in MiB.
    threads_and_sizes = [(threads, part_mib) for part_mib in (4, 16) for threads in (2, 4, 8)]
    raw_readers: dict[str, Callable[[], object]] = {
        f"raw O_DIRECT, {threads} x {part_mib} MiB": make_direct_reader(
            bench.file, bench.stack, threads_count=threads, part_bytes=part_mib * MIB
        )
        for threads, part_mib in threads_and_sizes
    }
    fastest_raw_reader = find_fastest(raw_readers, bench.length_bytes, repeats_count=1, prepare=drop_file)
    settings = bench.list_kvikio_settings("read", auto_direct_values=(True,), threads_max=16)
    kvikio_readers = {
        name: bench.kvikio.make_reader(bench.file, bench.memory, **setting) for name, setting in settings.items()
    }
    with bench.device.current():
        fastest_kvikio_reader = find_fastest(kvikio_readers, bench.length_bytes, repeats_count=1, prepare=drop_file)
        bench.evidence["cold_read_best"] = [fastest_raw_reader, fastest_kvikio_reader]
        drop_file()
        bench.check_reader(lambda: file.read_into(bench.memory))
        readers: dict[str, Callable[[], object]] = {
            "gdrkit": lambda: file.read_into(bench.memory),
            "raw": raw_readers[fastest_raw_reader],
            "kvikio": kvikio_readers[fastest_kvikio_reader],
        }
        series_by_name = measure_in_turn(
            readers, bench.length_bytes, rounds_count=bench.rounds_count, prepare=drop_file, attempts_count=2
        )
    bench.record_rate("cold_read_gdrkit", series_by_name["gdrkit"])
    bench.record_rate("cold_read_raw", series_by_name["raw"])
    bench.record_rate("cold_read_kvikio_best", series_by_name["kvikio"])
    bench.record("cold_read_gdrkit_spread_ratio", series_by_name["gdrkit"].spread_ratio)
    bench.record("cold_read_raw_spread_ratio", series_by_name["raw"].spread_ratio)


def measure_writes(bench: Bench) -> None:
    """Measure writes to a new file, with and without fsync."""
    with gds.File(bench.file, direct="never") as file:
        file.read_into(bench.memory)
    written_file = bench.folder / "written"

    def remove_written_file() -> None:
        written_file.unlink(missing_ok=True)

    def write(*, sync: bool) -> None:
        with gds.File(written_file, "w", direct="never") as file:
            file.write_from(bench.memory, durable=sync)

    for sync in (False, True):
        record_prefix = "write_fsync" if sync else "write"
        log_progress(f"device to file, {'with' if sync else 'without'} fsync: fastest setting of kvikio")
        settings = bench.list_kvikio_settings("write", auto_direct_values=(True,), threads_max=16)
        kvikio_writers = {
            name: bench.kvikio.make_writer(written_file, bench.memory, sync=sync, **setting)
            for name, setting in settings.items()
        }
        with bench.device.current():
            fastest_name = find_fastest(
                kvikio_writers, bench.length_bytes, repeats_count=1, prepare=remove_written_file
            )
            bench.evidence[f"{record_prefix}_kvikio_best"] = fastest_name
            writers: dict[str, Callable[[], object]] = {
                "gdrkit": partial(write, sync=sync),
                "kvikio": kvikio_writers[fastest_name],
            }
            for transfer in writers.values():
                remove_written_file()
                transfer()
                check_all_bytes(bench.memory, written_file, length_bytes=bench.length_bytes)
            series_by_name = measure_in_turn(
                writers,
                bench.length_bytes,
                rounds_count=bench.rounds_count,
                prepare=remove_written_file,
                attempts_count=1,
            )
        bench.record_rate(f"{record_prefix}_gdrkit", series_by_name["gdrkit"])
        bench.record_rate(f"{record_prefix}_kvikio", series_by_name["kvikio"])
        remove_written_file()
