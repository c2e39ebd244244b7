r"""How fast files reach device memory, beside kvikio and beside what bus and disk can do, in one run.

Medians of five turns each, in turn with the peers; every byte is checked, once for each way. "Cached" files lie in the
page cache; "cold" ones were dropped from it, which cachestat confirms. It takes some minutes and 16 GB of disk:

    pytest -c suites/pytest.ini suites/bench/test_storage_speed.py --benchmark-enable -s \
        -o faulthandler_timeout=1200 --records FILE

Without ``--benchmark-enable`` a small file goes each way once. GDRKIT_BENCH_STORAGE_MIB sets the size of the file,
GDRKIT_BENCH_STORAGE_FOLDER where it lies.
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
    Kvikio,
    Part,
    best_of,
    check_whole,
    drop_cache,
    host_memory,
    in_pairs,
    make_random_file,
    pinned_copier,
    raw_direct_reader,
    say,
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
    """The files, the memory and the peers of one run, and how often each is measured."""

    def __init__(
        self, folder: Path, device: Device, memory: CudaMemory, evidence: Evidence, *, is_measured: bool
    ) -> None:
        self.folder, self.device, self.memory, self.evidence = folder, device, memory, evidence
        self.length_bytes = memory.length_bytes
        self.rounds_count = 5 if is_measured else 1
        self.turns_count = 2 if is_measured else 1
        self.threads_counts = (8, 16, 32) if is_measured else (2,)
        self.file = folder / "file"
        self.stack = contextlib.ExitStack()
        self.kvikio = Kvikio(self.stack)

    def kvikio_settings(
        self, kind: str, *, direct: tuple[bool, ...], threads_most: int = 32
    ) -> dict[str, dict[str, object]]:
        """Every setting that is tried, by its name.

        Measured once and far behind everywhere, hence left out: 32 threads with tasks of 4 MiB; direct reads of what is
        cached; for the disk, 32 threads; buffered writes.
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
            if threads <= threads_most and (threads, task) != (32, 4)
        }

    def keep(self, name: str, value: float) -> None:
        """A number of the record, also printed."""
        self.evidence.number(name, value)
        say(f"{name} = {value:.4g}")

    def cleared(self) -> None:
        """Nothing of an earlier reader is left in the memory."""
        self.memory.fill(0)

    def checked(self, reader: Callable[[], object]) -> None:
        """One turn that is checked byte by byte; it warms up, too."""
        self.cleared()
        reader()
        check_whole(self.memory, self.file, length_bytes=self.length_bytes)


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, device: Device, evidence: Evidence) -> Iterator[Bench]:
    is_measured = bool(request.config.getoption("--benchmark-enable"))
    length_bytes = int(os.environ.get("GDRKIT_BENCH_STORAGE_MIB", "4096" if is_measured else "32")) * MIB
    folder = Path(os.environ.get("GDRKIT_BENCH_STORAGE_FOLDER", tmp_path)) / "storage_speed"
    folder.mkdir(parents=True)
    try:
        with device.allocate(length_bytes) as memory:
            made = Bench(folder, device, memory, evidence, is_measured=is_measured)
            with made.stack:
                yield made
    finally:
        gds.close_engines()
        shutil.rmtree(folder)


def test_files_to_and_from_a_device_beside_kvikio(bench: Bench) -> None:
    say(f"{bench.length_bytes >> 20} MiB in {bench.folder}; kvikio {bench.kvikio.version}")
    make_random_file(bench.file, bench.length_bytes)
    say("the file is there")
    with gds.File(bench.file, direct="never") as file:
        best = cached_reads(bench, file)
        small_reads(bench, file)
        many_files(bench, file, best)
        cold_reads(bench, file)
    writes(bench)
    bench.evidence["kvikio"] = bench.kvikio.version
    bench.evidence["file_bytes"] = bench.length_bytes


def test_files_to_memory_of_the_host_beside_kvikio(bench: Bench) -> None:
    make_random_file(bench.file, bench.length_bytes)
    with gds.File(bench.file, direct="never") as file:
        host_reads(bench, file)
    bench.evidence["kvikio"] = bench.kvikio.version
    bench.evidence["file_bytes"] = bench.length_bytes


def cached_reads(bench: Bench, file: gds.File) -> str:
    """gdrkit, kvikio at its best and the pinned copy."""
    say("cached reads: what is kvikio's best?")
    settings = bench.kvikio_settings("read", direct=(False,))
    candidates = {name: bench.kvikio.reader(bench.file, bench.memory, **setting) for name, setting in settings.items()}
    with bench.device.current():
        bench.checked(next(iter(candidates.values())))
        best = best_of(candidates, bench.length_bytes, turns_count=bench.turns_count + 1)
        bench.evidence["cached_read_kvikio_best"] = best
        bench.checked(candidates[best])
        bench.checked(lambda: file.read_into(bench.memory))
        copy, free = pinned_copier(bench.device, bench.memory, length_bytes=bench.length_bytes)
        copy()
        movers = {"gdrkit": lambda: file.read_into(bench.memory), "kvikio": candidates[best], "pinned copy": copy}
        found = in_pairs(movers, bench.length_bytes, rounds_count=bench.rounds_count)
        free()
    bench.checked(lambda: file.read_into(bench.memory))
    bench.keep("cached_read_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
    bench.keep("cached_read_kvikio_best_gb_per_s", found["kvikio"].rate_gb_per_s)
    bench.keep("pinned_copy_gb_per_s", found["pinned copy"].rate_gb_per_s)
    bench.keep("cached_read_gdrkit_cpu_s_per_gib", found["gdrkit"].cpu_s_per_gib)
    bench.keep("cached_read_kvikio_cpu_s_per_gib", found["kvikio"].cpu_s_per_gib)
    bench.keep("cached_read_gdrkit_spread_ratio", found["gdrkit"].spread)
    bench.keep("cached_read_kvikio_spread_ratio", found["kvikio"].spread)
    bench.keep("pinned_copy_spread_ratio", found["pinned copy"].spread)
    return best


def host_reads(bench: Bench, file: gds.File) -> None:
    """The same file into host memory."""
    say("cached reads into host memory")
    memory = host_memory(bench.stack, bench.length_bytes)
    settings = bench.kvikio_settings("read", direct=(False,))
    candidates = {name: bench.kvikio.reader(bench.file, memory, **each) for name, each in settings.items()}
    best = best_of(candidates, bench.length_bytes, turns_count=bench.turns_count)
    movers = {"gdrkit": lambda: file.read_into(memory), "kvikio": candidates[best]}
    found = in_pairs(movers, bench.length_bytes, rounds_count=bench.rounds_count)
    bench.keep("host_read_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
    bench.keep("host_read_kvikio_gb_per_s", found["kvikio"].rate_gb_per_s)
    memory[:] = bytes(bench.length_bytes)
    file.read_into(memory)
    check_whole(memory, bench.file, length_bytes=bench.length_bytes)


def small_reads(bench: Bench, file: gds.File) -> None:
    """4 KiB each, anywhere in the file, one behind the other in the memory."""
    say("4 KiB random cached reads")
    count = min(bench.length_bytes // PAGE, 32768 if bench.rounds_count > 1 else 512)
    draw = random.Random(1)
    offsets = [draw.randrange(bench.length_bytes // PAGE) * PAGE for _ in range(count)]
    ranges = [(offset, PAGE) for offset in offsets]
    candidates = small_peers(bench, offsets)
    best = best_of(candidates, count * PAGE, turns_count=bench.turns_count)
    bench.evidence["random_4k_kvikio_best"] = best

    def each_alone() -> None:
        for index, offset in enumerate(offsets):
            file.read_into(bench.memory, file_offset_bytes=offset, length_bytes=PAGE, buffer_offset_bytes=index * PAGE)

    movers = {"gdrkit": lambda: file.readv(bench.memory, ranges), "kvikio": candidates[best]}
    alone = {"gdrkit": each_alone, "kvikio": candidates["kvikio, one thread"]}
    for reader in (*movers.values(), each_alone):
        bench.cleared()
        reader()
        with bench.file.open("rb") as plain:
            wanted = b"".join(os.pread(plain.fileno(), PAGE, offset) for offset in offsets)
        assert bench.memory.read(length_bytes=count * PAGE) == wanted
    for name, pair, tries_count in (("random_4k", movers, 3), ("one_4k_at_a_time", alone, 1)):
        found = in_pairs(pair, count * PAGE, rounds_count=bench.rounds_count, tries_count=tries_count)
        bench.keep(f"{name}_gdrkit_ops_per_s", found["gdrkit"].rate_gb_per_s * 1e9 / PAGE)
        bench.keep(f"{name}_kvikio_ops_per_s", found["kvikio"].rate_gb_per_s * 1e9 / PAGE)


def small_peers(bench: Bench, offsets: list[int]) -> dict[str, Callable[[], object]]:
    """The ways in which kvikio can read a page from each offset."""
    peer = bench.stack.enter_context(bench.kvikio.open(bench.file))
    parts = [Part(bench.memory, index * PAGE, PAGE) for index in range(len(offsets))]
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

    def in_flight(threads_count: int) -> None:
        bench.kvikio.use(num_threads=threads_count)
        with bench.device.current():
            futures = [peer.pread(part, PAGE, offset) for part, offset in zip(parts, offsets, strict=True)]
            for each in futures:
                each.get()

    candidates: dict[str, Callable[[], object]] = {"kvikio, one thread": partial(one_by_one, 0, 1)}
    candidates |= {f"kvikio, {each} threads": partial(in_threads, each) for each in (2, 4, 8)}
    candidates |= {f"kvikio, {each} in its pool": partial(in_flight, each) for each in bench.threads_counts}
    return candidates


def many_files(bench: Bench, file: gds.File, best: str) -> None:
    """The same bytes in many files, which are opened and closed each time, beside the one file."""
    counts = (64, 4096) if bench.rounds_count > 1 else (64, 512)
    for part_bytes in (bench.length_bytes // count for count in counts):
        paths = split_file(bench.file, bench.folder / f"parts_{part_bytes}", part_bytes)
        os.sync()
        name = f"{len(paths)} x {part_bytes >> 10} KiB"
        say(f"cached reads of {name}")
        lengths = [part_bytes] * len(paths)

        def read(paths: list[Path] = paths, lengths: list[int] = lengths) -> object:
            return gds.read_files(paths, bench.memory, lengths).result()

        bench.checked(read)
        setting = bench.kvikio_settings("read", direct=(False,))[best]
        peer = bench.kvikio.files_reader(paths, bench.memory, **setting)
        movers: dict[str, Callable[[], Any]] = {"gdrkit": read, "one file": lambda: file.read_into(bench.memory)}
        with bench.device.current():
            bench.checked(peer)
            found = in_pairs({**movers, "kvikio": peer}, bench.length_bytes, rounds_count=bench.rounds_count)
        kind = "64x64mib" if len(paths) == 64 else "4096x1mib"
        bench.keep(f"cached_{kind}_gb_per_s", found["gdrkit"].rate_gb_per_s)
        bench.keep(f"cached_{kind}_kvikio_gb_per_s", found["kvikio"].rate_gb_per_s)
        bench.keep(f"cached_{kind}_of_one_file_ratio", found["gdrkit"].rate_gb_per_s / found["one file"].rate_gb_per_s)


def cold_reads(bench: Bench, file: gds.File) -> None:
    """From the disk: gdrkit, kvikio at its best, and the best reader by O_DIRECT into host memory."""
    # A peer and no bound: on a shared disk gdrkit was faster than the best of them.
    say("cold reads: which reader by O_DIRECT is best?")

    def drop() -> None:
        drop_cache(bench.file)

    shapes = [(threads, part) for part in (4, 16) for threads in (2, 4, 8)]
    raw: dict[str, Callable[[], object]] = {
        f"raw O_DIRECT, {threads} x {part} MiB": raw_direct_reader(
            bench.file, bench.stack, threads_count=threads, part_bytes=part * MIB
        )
        for threads, part in shapes
    }
    best_raw = best_of(raw, bench.length_bytes, turns_count=1, prepare=drop)
    settings = bench.kvikio_settings("read", direct=(True,), threads_most=16)
    peers = {name: bench.kvikio.reader(bench.file, bench.memory, **each) for name, each in settings.items()}
    with bench.device.current():
        best = best_of(peers, bench.length_bytes, turns_count=1, prepare=drop)
        bench.evidence["cold_read_best"] = [best_raw, best]
        drop()
        bench.checked(lambda: file.read_into(bench.memory))
        movers: dict[str, Callable[[], object]] = {
            "gdrkit": lambda: file.read_into(bench.memory),
            "raw": raw[best_raw],
            "kvikio": peers[best],
        }
        found = in_pairs(movers, bench.length_bytes, rounds_count=bench.rounds_count, prepare=drop, tries_count=2)
    bench.keep("cold_read_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
    bench.keep("cold_read_raw_gb_per_s", found["raw"].rate_gb_per_s)
    bench.keep("cold_read_kvikio_best_gb_per_s", found["kvikio"].rate_gb_per_s)
    bench.keep("cold_read_gdrkit_spread_ratio", found["gdrkit"].spread)
    bench.keep("cold_read_raw_spread_ratio", found["raw"].spread)


def writes(bench: Bench) -> None:
    """The memory into a new file, with and without waiting for the disk."""
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
        say(f"device to file, {'with' if sync else 'without'} fsync: what is kvikio's best?")
        settings = bench.kvikio_settings("write", direct=(True,), threads_most=16)
        peers = {name: bench.kvikio.writer(target, bench.memory, sync=sync, **each) for name, each in settings.items()}
        with bench.device.current():
            best = best_of(peers, bench.length_bytes, turns_count=1, prepare=remove)
            bench.evidence[f"{kind}_kvikio_best"] = best
            movers: dict[str, Callable[[], object]] = {"gdrkit": partial(write, sync=sync), "kvikio": peers[best]}
            for writer in movers.values():
                remove()
                writer()
                check_whole(bench.memory, target, length_bytes=bench.length_bytes)
            found = in_pairs(movers, bench.length_bytes, rounds_count=bench.rounds_count, prepare=remove, tries_count=1)
        bench.keep(f"{kind}_gdrkit_gb_per_s", found["gdrkit"].rate_gb_per_s)
        bench.keep(f"{kind}_kvikio_gb_per_s", found["kvikio"].rate_gb_per_s)
        remove()
