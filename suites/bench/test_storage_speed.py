r"""Rates of file transfers to and from device memory, compared with kvikio and with the limits of bus and disk.

The rates are medians of five transfers, which are measured in turn. Every byte of one transfer of each kind is checked.
A "cached" file is in the page cache; a "cold" one was dropped from it, as cachestat confirms. A run takes some minutes
and 16 GB of disk:

    pytest -c suites/pytest.ini suites/bench/test_storage_speed.py --benchmark-enable -s \
        -o faulthandler_timeout=1200 --records FILE

Without ``--benchmark-enable``, each kind of transfer runs once with a small file. GDRKIT_BENCH_STORAGE_MIB is the size
of the file, GDRKIT_BENCH_STORAGE_FOLDER its folder.
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
    DevicePart,
    Kvikio,
    check_all_bytes,
    create_random_file,
    drop_cache,
    fastest_of,
    host_memory,
    log_progress,
    measure_in_turn,
    pinned_copier,
    raw_direct_reader,
    split_file,
)

from gdrkit import gds
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.cuda import CudaMemory, Device
    from gdrkit.harness.evidence import Evidence

pytestmark = [needs(cuda_needs.device(), host.module("kvikio")), pytest.mark.timeout(1200)]

PAGE = 4 * KIB


class Bench:
    """The file, the memory and kvikio of one run, and the numbers of its repetitions."""

    def __init__(
        self, folder: Path, device: Device, memory: CudaMemory, evidence: Evidence, *, is_measured: bool
    ) -> None:
        self.folder, self.device, self.memory, self.evidence = folder, device, memory, evidence
        self.length_bytes = memory.length_bytes
        self.rounds_count = 5 if is_measured else 1
        self.repeats = 2 if is_measured else 1
        self.threads_counts = (8, 16, 32) if is_measured else (2,)
        self.file = folder / "file"
        self.stack = contextlib.ExitStack()
        self.kvikio = Kvikio(self.stack)

    def kvikio_settings(
        self, kind: str, *, direct: tuple[bool, ...], threads_max: int = 32
    ) -> dict[str, dict[str, object]]:
        """Return the settings of kvikio to compare, by their names.

        These settings were much slower in one measurement and are omitted: 32 threads with tasks of 4 MiB, direct reads
        of cached files, 32 threads for the disk, and buffered writes.
        """
        return {
            f"kvikio {threads} threads, {task} MiB, {'auto direct' if auto else 'buffered'}": {
                "num_threads": threads,
                "task_size": task * MIB,
                f"auto_direct_io_{kind}": auto,
            }
            for auto in direct
            for threads in self.threads_counts
            for task in (4, 16)
            if threads <= threads_max and (threads, task) != (32, 4)
        }

    def record(self, name: str, value: float) -> None:
        """Add a number to the record, and print it."""
        self.evidence.number(name, value)
        log_progress(f"{name} = {value:.4g}")

    def check(self, read: Callable[[], object]) -> None:
        """Read once into cleared memory, and check every byte. This also warms up the reader."""
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
        best = cached_reads(bench, file)
        small_reads(bench, file)
        many_files(bench, file, best)
        cold_reads(bench, file)
    writes(bench)
    bench.evidence["kvikio"] = bench.kvikio.version
    bench.evidence["file_bytes"] = bench.length_bytes


def test_host_file_reads_beside_kvikio(bench: Bench) -> None:
    create_random_file(bench.file, bench.length_bytes)
    with gds.File(bench.file, direct="never") as file:
        host_reads(bench, file)
    bench.evidence["kvikio"] = bench.kvikio.version
    bench.evidence["file_bytes"] = bench.length_bytes


def cached_reads(bench: Bench, file: gds.File) -> str:
    """Measure cached reads: gdrkit, the fastest setting of kvikio, and the pinned copy. Return that setting."""
    log_progress("cached reads: fastest setting of kvikio")
    settings = bench.kvikio_settings("read", direct=(False,))
    candidates = {name: bench.kvikio.reader(bench.file, bench.memory, **setting) for name, setting in settings.items()}
    with bench.device.current():
        bench.check(next(iter(candidates.values())))
        best = fastest_of(candidates, bench.length_bytes, repeats=bench.repeats + 1)
        bench.evidence["cached_read_kvikio_best"] = best
        bench.check(candidates[best])
        bench.check(lambda: file.read_into(bench.memory))
        copy, free = pinned_copier(bench.device, bench.memory, length_bytes=bench.length_bytes)
        copy()
        reads = {"gdrkit": lambda: file.read_into(bench.memory), "kvikio": candidates[best], "pinned copy": copy}
        found = measure_in_turn(reads, bench.length_bytes, rounds_count=bench.rounds_count)
        free()
    bench.check(lambda: file.read_into(bench.memory))
    bench.record("cached_read_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
    bench.record("cached_read_kvikio_best_gb_per_s", found["kvikio"].rate_gb_per_s)
    bench.record("pinned_copy_gb_per_s", found["pinned copy"].rate_gb_per_s)
    bench.record("cached_read_gdrkit_cpu_s_per_gib", found["gdrkit"].cpu_s_per_gib)
    bench.record("cached_read_kvikio_cpu_s_per_gib", found["kvikio"].cpu_s_per_gib)
    bench.record("cached_read_gdrkit_spread_ratio", found["gdrkit"].spread)
    bench.record("cached_read_kvikio_spread_ratio", found["kvikio"].spread)
    bench.record("pinned_copy_spread_ratio", found["pinned copy"].spread)
    return best


def host_reads(bench: Bench, file: gds.File) -> None:
    """Measure cached reads into host memory."""
    log_progress("cached reads into host memory")
    memory = host_memory(bench.stack, bench.length_bytes)
    settings = bench.kvikio_settings("read", direct=(False,))
    candidates = {name: bench.kvikio.reader(bench.file, memory, **each) for name, each in settings.items()}
    best = fastest_of(candidates, bench.length_bytes, repeats=bench.repeats)
    reads = {"gdrkit": lambda: file.read_into(memory), "kvikio": candidates[best]}
    found = measure_in_turn(reads, bench.length_bytes, rounds_count=bench.rounds_count)
    bench.record("host_read_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
    bench.record("host_read_kvikio_gb_per_s", found["kvikio"].rate_gb_per_s)
    memory[:] = bytes(bench.length_bytes)
    file.read_into(memory)
    check_all_bytes(memory, bench.file, length_bytes=bench.length_bytes)


def small_reads(bench: Bench, file: gds.File) -> None:
    """Measure reads of 4 KiB at random offsets of the file into consecutive memory."""
    log_progress("4 KiB random cached reads")
    count = min(bench.length_bytes // PAGE, 32768 if bench.rounds_count > 1 else 512)
    chance = random.Random(1)
    offsets = [chance.randrange(bench.length_bytes // PAGE) * PAGE for _ in range(count)]
    ranges = [(offset, PAGE) for offset in offsets]
    candidates = small_reads_of_kvikio(bench, offsets)
    best = fastest_of(candidates, count * PAGE, repeats=bench.repeats)
    bench.evidence["random_4k_kvikio_best"] = best

    def read_one_by_one() -> None:
        for index, offset in enumerate(offsets):
            file.read_into(bench.memory, file_offset_bytes=offset, length_bytes=PAGE, buffer_offset_bytes=index * PAGE)

    parallel = {"gdrkit": lambda: file.readv(bench.memory, ranges), "kvikio": candidates[best]}
    one_by_one = {"gdrkit": read_one_by_one, "kvikio": candidates["kvikio, one thread"]}
    for read in (*parallel.values(), read_one_by_one):
        bench.memory.fill(0)
        read()
        with bench.file.open("rb") as posix_file:
            expected = b"".join(os.pread(posix_file.fileno(), PAGE, offset) for offset in offsets)
        assert bench.memory.read(length_bytes=count * PAGE) == expected
    for name, reads, attempts_count in (("random_4k", parallel, 3), ("one_4k_at_a_time", one_by_one, 1)):
        found = measure_in_turn(reads, count * PAGE, rounds_count=bench.rounds_count, attempts_count=attempts_count)
        bench.record(f"{name}_gdrkit_ops_per_s", found["gdrkit"].rate_gb_per_s * 1e9 / PAGE)
        bench.record(f"{name}_kvikio_ops_per_s", found["kvikio"].rate_gb_per_s * 1e9 / PAGE)


def small_reads_of_kvikio(bench: Bench, offsets: list[int]) -> dict[str, Callable[[], object]]:
    """Return functions that read a page at each offset by kvikio, with different methods and numbers of threads."""
    peer = bench.stack.enter_context(bench.kvikio.open(bench.file))
    parts = [DevicePart(bench.memory, index * PAGE, PAGE) for index in range(len(offsets))]
    bench.kvikio.use(auto_direct_io_read=False)

    def one_by_one(first: int, step: int) -> None:
        with bench.device.current():
            for index in range(first, len(offsets), step):
                peer.raw_read(bench.memory, PAGE, offsets[index], index * PAGE)

    def in_threads(threads_count: int) -> None:
        threads = [threading.Thread(target=one_by_one, args=(each, threads_count)) for each in range(threads_count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def in_thread_pool(threads_count: int) -> None:
        bench.kvikio.use(num_threads=threads_count)
        with bench.device.current():
            futures = [peer.pread(part, PAGE, offset) for part, offset in zip(parts, offsets, strict=True)]
            for each in futures:
                each.get()

    candidates: dict[str, Callable[[], object]] = {"kvikio, one thread": partial(one_by_one, 0, 1)}
    candidates |= {f"kvikio, {each} threads": partial(in_threads, each) for each in (2, 4, 8)}
    candidates |= {f"kvikio, {each} in its pool": partial(in_thread_pool, each) for each in bench.threads_counts}
    return candidates


def many_files(bench: Bench, file: gds.File, best: str) -> None:
    """Measure cached reads of the same data in many files, which are opened and closed each time."""
    counts = (64, 4096) if bench.rounds_count > 1 else (64, 512)
    for part_bytes in (bench.length_bytes // count for count in counts):
        paths = split_file(bench.file, bench.folder / f"parts_{part_bytes}", part_bytes)
        os.sync()
        name = f"{len(paths)} x {part_bytes >> 10} KiB"
        log_progress(f"cached reads of {name}")
        lengths = [part_bytes] * len(paths)

        def read(paths: list[Path] = paths, lengths: list[int] = lengths) -> object:
            return gds.read_files(paths, bench.memory, lengths).result()

        bench.check(read)
        setting = bench.kvikio_settings("read", direct=(False,))[best]
        peer = bench.kvikio.files_reader(paths, bench.memory, **setting)
        reads: dict[str, Callable[[], Any]] = {"gdrkit": read, "one file": lambda: file.read_into(bench.memory)}
        with bench.device.current():
            bench.check(peer)
            found = measure_in_turn({**reads, "kvikio": peer}, bench.length_bytes, rounds_count=bench.rounds_count)
        kind = "64x64mib" if len(paths) == 64 else "4096x1mib"
        bench.record(f"cached_{kind}_gb_per_s", found["gdrkit"].rate_gb_per_s)
        bench.record(f"cached_{kind}_kvikio_gb_per_s", found["kvikio"].rate_gb_per_s)
        bench.record(
            f"cached_{kind}_of_one_file_ratio", found["gdrkit"].rate_gb_per_s / found["one file"].rate_gb_per_s
        )


def cold_reads(bench: Bench, file: gds.File) -> None:
    """Measure reads from the disk: gdrkit, the fastest setting of kvikio, and the fastest reader by O_DIRECT."""
    # The reader by O_DIRECT is not an upper bound: on a shared disk, gdrkit was faster.
    log_progress("cold reads: fastest reader by O_DIRECT")

    def drop() -> None:
        drop_cache(bench.file)

    shapes = [(threads, part) for part in (4, 16) for threads in (2, 4, 8)]
    raw: dict[str, Callable[[], object]] = {
        f"raw O_DIRECT, {threads} x {part} MiB": raw_direct_reader(
            bench.file, bench.stack, threads_count=threads, part_bytes=part * MIB
        )
        for threads, part in shapes
    }
    best_raw = fastest_of(raw, bench.length_bytes, repeats=1, prepare=drop)
    settings = bench.kvikio_settings("read", direct=(True,), threads_max=16)
    peers = {name: bench.kvikio.reader(bench.file, bench.memory, **each) for name, each in settings.items()}
    with bench.device.current():
        best = fastest_of(peers, bench.length_bytes, repeats=1, prepare=drop)
        bench.evidence["cold_read_best"] = [best_raw, best]
        drop()
        bench.check(lambda: file.read_into(bench.memory))
        reads: dict[str, Callable[[], object]] = {
            "gdrkit": lambda: file.read_into(bench.memory),
            "raw": raw[best_raw],
            "kvikio": peers[best],
        }
        found = measure_in_turn(
            reads, bench.length_bytes, rounds_count=bench.rounds_count, prepare=drop, attempts_count=2
        )
    bench.record("cold_read_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
    bench.record("cold_read_raw_gb_per_s", found["raw"].rate_gb_per_s)
    bench.record("cold_read_kvikio_best_gb_per_s", found["kvikio"].rate_gb_per_s)
    bench.record("cold_read_gdrkit_spread_ratio", found["gdrkit"].spread)
    bench.record("cold_read_raw_spread_ratio", found["raw"].spread)


def writes(bench: Bench) -> None:
    """Measure writes to a new file, with and without fsync."""
    with gds.File(bench.file, direct="never") as file:
        file.read_into(bench.memory)
    target = bench.folder / "written"

    def remove() -> None:
        target.unlink(missing_ok=True)

    def write(*, sync: bool) -> None:
        with gds.File(target, "w", direct="never") as file:
            file.write_from(bench.memory, durable=sync)

    for sync in (False, True):
        kind = "write_fsync" if sync else "write"
        log_progress(f"device to file, {'with' if sync else 'without'} fsync: fastest setting of kvikio")
        settings = bench.kvikio_settings("write", direct=(True,), threads_max=16)
        peers = {name: bench.kvikio.writer(target, bench.memory, sync=sync, **each) for name, each in settings.items()}
        with bench.device.current():
            best = fastest_of(peers, bench.length_bytes, repeats=1, prepare=remove)
            bench.evidence[f"{kind}_kvikio_best"] = best
            all_writes: dict[str, Callable[[], object]] = {"gdrkit": partial(write, sync=sync), "kvikio": peers[best]}
            for each in all_writes.values():
                remove()
                each()
                check_all_bytes(bench.memory, target, length_bytes=bench.length_bytes)
            found = measure_in_turn(
                all_writes, bench.length_bytes, rounds_count=bench.rounds_count, prepare=remove, attempts_count=1
            )
        bench.record(f"{kind}_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
        bench.record(f"{kind}_kvikio_gb_per_s", found["kvikio"].rate_gb_per_s)
        remove()
