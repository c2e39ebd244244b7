"""Measurement of the copy engine of gdrkit with many settings, printed as one table.

The table helps the developers to choose the defaults of ``gdrkit.gds.EngineOptions``.

There are five kinds of transfer: cached reads, cached reads into host memory, writes, durable writes, and cold reads.
Each kind is measured in at most five rounds, until a time limit. Each round measures all settings once, so that a
change of the machine's load affects all settings alike.

Before each cached read, another engine reads the file, and a copy of pinned memory uses the bus. As in a real program,
the processor caches then no longer have the data of the previous read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from bench.storage_speed import (
    allocate_host_memory,
    drop_cache,
    log_progress,
    make_direct_reader,
    make_pinned_copier,
    measure,
)

from gdrkit.gds import HOST, Engine, EngineOptions
from gdrkit.gds._native import native
from gdrkit.gds.engine import HOST_OPTIONS
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from gdrkit.cuda import CudaMemory, Device

__all__ = ["Sweep", "SweepRow", "format_table"]

# Values for some fields of EngineOptions. The other fields keep their defaults.
Options = dict[str, int]

DEFAULT_SETTING: Options = {}
# The settings to measure for each kind of transfer.
CACHED_READ_SETTINGS: list[Options] = [
    DEFAULT_SETTING,
    # This value is not above `chunk_bytes`, so it turns coalesced copies off: each thread fills its copies alone.
    {"coalesced_bytes": 4 * MIB},
    {"coalesced_bytes": 4 * MIB, "chunk_bytes": 2 * MIB, "buffers_count": 3},
    *(
        {"coalesced_bytes": size_mib * MIB, "coalesced_count": count, "slice_bytes": slice_kib * KIB}
        for size_mib, count, slice_kib in itertools.product((8, 16, 32), (3, 4, 5, 8), (512, 1024, 2048))
        if 32 <= size_mib * count <= 128 and (slice_kib == 1024 or size_mib * count == 64)
    ),
    *({"workers_count": workers} for workers in (8, 10, 14, 16)),
    {"chunk_bytes": 2 * MIB, "first_chunk_bytes": 2 * MIB},
    {"polls_device": False},
]
HOST_READ_SETTINGS: list[Options] = [
    DEFAULT_SETTING,
    *(
        {"workers_count": workers, "chunk_bytes": chunk_mib * MIB, "first_chunk_bytes": first_mib * MIB}
        for workers, chunk_mib, first_mib in ((16, 4, 4), (16, 8, 1), (16, 16, 16), (14, 8, 8), (12, 8, 8), (8, 8, 8))
    ),
]
BUFFERED_WRITE_SETTINGS: list[Options] = [DEFAULT_SETTING, {"buffered_writers_count": 1}, {"buffered_writers_count": 3}]
DURABLE_WRITE_SETTINGS: list[Options] = [
    DEFAULT_SETTING,
    *(
        {"direct_writers_count": workers, "direct_write_bytes": size_mib * MIB}
        for workers, size_mib in ((1, 16), (1, 64), (2, 8), (3, 16), (4, 16))
    ),
]
# The last settings use less staging memory, so they occupy less of the processor caches. This can be faster in a
# virtual machine, because the process of the host that emulates the disk may use the same caches.
COLD_READ_SETTINGS: list[Options] = [
    DEFAULT_SETTING,
    *(
        {"direct_readers_count": readers, "direct_read_bytes": size_mib * MIB}
        for readers, size_mib in ((1, 4), (1, 8), (2, 2), (2, 8), (3, 4), (4, 2), (4, 4), (4, 16), (8, 4))
    ),
    *(
        {"direct_readers_count": readers, "direct_read_bytes": 4 * MIB, "chunk_bytes": 4 * MIB, **memory_options}
        for readers in (2, 4)
        for memory_options in (
            {"workers_count": readers, "buffers_count": 1},
            {"workers_count": readers + 1, "buffers_count": 2},
        )
    ),
]
# Pairs for readers that read with O_DIRECT and copy nothing: the number of threads, and the size of each read in MiB.
RAW_READER_SETTINGS = ((1, 4), (1, 16), (2, 4), (2, 8), (4, 4), (4, 16))
# Time limit of each kind of transfer, in seconds. The creation of the file is not included.
TIME_LIMITS_S = {"cached read": 24.0, "host read": 8.0, "write": 8.0, "durable write": 14.0, "cold read": 48.0}
ROUNDS_MAX = 5


@dataclass(slots=True)
class SweepRow:
    """The results of one setting of the engine, or of one peer, for one kind of transfer.

    A peer moves the same bytes without the engine, for example by a plain copy of the CUDA driver.
    """

    kind: str
    setting: str
    is_engine: bool
    rates_gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gib: list[float] = field(default_factory=list)

    @property
    def rate_gb_per_s(self) -> float:
        """Median rate, or 0 if there was no time for this setting."""
        return statistics.median(self.rates_gb_per_s) if self.rates_gb_per_s else 0.0

    def __str__(self) -> str:
        if not self.rates_gb_per_s:
            return f"{self.kind:14} {'-':>7} {'-':>7} {'-':>7} {'-':>6}  {self.setting} (not measured: time limit)"
        cpu_s = statistics.median(self.cpu_s_per_gib)
        numbers_text = (
            f"{self.rate_gb_per_s:7.2f} {max(self.rates_gb_per_s):7.2f} {min(self.rates_gb_per_s):7.2f} {cpu_s:6.3f}"
        )
        return f"{self.kind:14} {numbers_text}  {self.setting}"


def format_table(rows: Sequence[SweepRow]) -> list[str]:
    """Return the lines of the table: one kind of transfer after the other, each with the fastest setting first."""
    lines = [f"{'kind':14} {'GB/s':>7} {'max':>7} {'min':>7} {'CPU/GiB':>6}  setting"]
    for kind in dict.fromkeys(row.kind for row in rows):
        lines += [str(row) for row in sorted(rows, key=lambda row: -row.rate_gb_per_s) if row.kind == kind]
    return lines


def _describe_options(options: Options) -> str:
    option_texts = [
        f"{key.removesuffix('_bytes')} {value >> 10} KiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in options.items()
    ]
    return ", ".join(option_texts) or "default"


def _do_nothing() -> None:
    pass


class Sweep:
    """Measurement of transfers between a file and memory, by engines with different settings.

    Parameters
    ----------
    source : Path
        The file to read, at least as long as the memory. Writes go to another file in the same folder.
    device : Device
        The CUDA device.
    memory : CudaMemory
        Memory of the device, as long as the largest transfer.
    time_factor : float
        Factor of all time limits. With 0, only the first two settings of each kind are measured, and only once.
    """

    def __init__(self, source: Path, device: Device, memory: CudaMemory, *, time_factor: float = 1.0) -> None:
        self.source, self.written_file = source, source.with_name("sweep_written")
        self.device, self.memory = device, memory
        self.time_factor = time_factor
        self.rows: list[SweepRow] = []
        self._file_bytes = source.stat().st_size

    def run(self) -> list[SweepRow]:
        """Measure all kinds of transfer and return the rows of the table.

        The source must be in the page cache. Afterwards, it is not in the page cache, and the first half of the memory
        has the data of the last cold read of an engine.
        """
        length_bytes = self.memory.length_bytes
        with contextlib.ExitStack() as stack:
            copy_pinned, free_memory = make_pinned_copier(self.device, self.memory, length_bytes=length_bytes)
            stack.callback(free_memory)
            disturbing_engine = Engine(EngineOptions(chunk_bytes=4 * MIB, buffers_count=3))
            stack.callback(disturbing_engine.close)

            def disturb_caches_and_bus() -> None:
                self._read(disturbing_engine, length_bytes)
                copy_pinned()

            peers: dict[str, Callable[[], object]] = {"pinned copy": copy_pinned}
            self._measure_kind(
                "cached read",
                CACHED_READ_SETTINGS,
                self._read,
                length_bytes,
                prepare=disturb_caches_and_bus,
                peers=peers,
            )
        self._measure_host_reads(length_bytes)
        half_bytes = length_bytes // 2
        for kind, settings, transfer in (
            ("write", BUFFERED_WRITE_SETTINGS, self._write),
            ("durable write", DURABLE_WRITE_SETTINGS, self._write_durably),
        ):
            self._measure_kind(kind, settings, transfer, half_bytes, prepare=self._remove_written_file)
        self._remove_written_file()
        with contextlib.ExitStack() as stack:
            raw_readers = {
                f"raw O_DIRECT, {threads} x {part_mib} MiB": make_direct_reader(
                    self.source, stack, threads_count=threads, part_bytes=part_mib * MIB, length_bytes=half_bytes
                )
                for threads, part_mib in RAW_READER_SETTINGS
            }
            self._measure_kind(
                "cold read",
                COLD_READ_SETTINGS,
                self._read,
                half_bytes,
                prepare=self._drop_source,
                peers=raw_readers,
                clears_memory=True,
            )
        return self.rows

    def _measure_kind(
        self,
        kind: str,
        settings: Iterable[Options],
        transfer: Callable[[Engine, int], None],
        length_bytes: int,
        *,
        prepare: Callable[[], object],
        peers: Mapping[str, Callable[[], object]] | None = None,
        base_options: EngineOptions | None = None,
        clears_memory: bool = False,
    ) -> None:
        """Measure the settings of one kind of transfer, and its peers, in turn until the time limit.

        Parameters
        ----------
        kind : str
            The kind of transfer.
        settings : iterable of Options
            The settings to measure. Each changes some fields of `base_options`.
        transfer : callable
            Function that transfers a number of bytes with an engine.
        length_bytes : int
            The number of bytes of each transfer.
        prepare : callable
            Function that is called before each transfer.
        peers : Mapping of str to callable
            Functions that move the same number of bytes without the engine, by name. The device memory is not cleared
            before their transfers.
        base_options : EngineOptions, optional
            Options of every engine; None for the defaults.
        clears_memory : bool
            Whether the device memory is cleared before each transfer of an engine.
        """
        is_short_run = self.time_factor == 0
        peers = dict(peers or {})
        with contextlib.ExitStack() as stack:
            # The engines come before the peers, because the time may not suffice for all transfers.
            transfers: dict[str, Callable[[], object]] = {}
            for options in list(settings)[: 2 if is_short_run else None]:
                engine = Engine(replace(base_options or EngineOptions(), **options))  # type: ignore[arg-type]
                stack.callback(engine.close)
                transfers[_describe_options(options)] = partial(transfer, engine, length_bytes)
                # The first read pins the memory of the engine and creates its streams.
                self._read(engine, min(length_bytes, 256 * MIB), access="buffered")
            transfers.update(list(peers.items())[: 2 if is_short_run else None])
            rows = {name: SweepRow(kind, name, name not in peers) for name in transfers}
            self.rows += rows.values()
            deadline_s = time.monotonic() + TIME_LIMITS_S[kind] * self.time_factor
            for round_index in range(1 if is_short_run else ROUNDS_MAX):
                for name in list(transfers)[:: -1 if round_index % 2 else 1]:
                    if not is_short_run and time.monotonic() > deadline_s:
                        break
                    prepare()
                    if clears_memory and rows[name].is_engine:
                        self.memory.fill(0)
                    measurement = measure(transfers[name], length_bytes)
                    rows[name].rates_gb_per_s.append(measurement.rate_gb_per_s)
                    rows[name].cpu_s_per_gib.append(measurement.cpu_s_per_gib)
        transfers_count = sum(len(row.rates_gb_per_s) for row in rows.values())
        log_progress(f"{kind}: {transfers_count} transfers with {len(rows)} settings")

    def _read(self, engine: Engine, length_bytes: int, *, access: str = "automatic") -> None:
        self._transfer(engine, self.source, os.O_RDONLY, length_bytes, access=access)

    def _write(self, engine: Engine, length_bytes: int) -> None:
        self._transfer(engine, self.written_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, length_bytes, access="buffered")

    def _write_durably(self, engine: Engine, length_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._transfer(engine, self.written_file, flags, length_bytes, access="direct", durable=True)

    def _measure_host_reads(self, length_bytes: int) -> None:
        """Measure reads into host memory, by engines with HOST_OPTIONS and the settings to compare."""
        with contextlib.ExitStack() as stack:
            memory = native.HostMemory(allocate_host_memory(stack, length_bytes), writable=True)
            stack.callback(memory.release)

            def read(engine: Engine, length_bytes: int) -> None:
                device_and_address = (HOST, memory.address)
                self._transfer(
                    engine,
                    self.source,
                    os.O_RDONLY,
                    length_bytes,
                    access="automatic",
                    device_and_address=device_and_address,
                )

            self._measure_kind(
                "host read", HOST_READ_SETTINGS, read, length_bytes, prepare=_do_nothing, base_options=HOST_OPTIONS
            )

    def _transfer(
        self,
        engine: Engine,
        path: Path,
        flags: int,
        length_bytes: int,
        *,
        access: str,
        durable: bool = False,
        device_and_address: tuple[int, int] | None = None,
    ) -> None:
        """Transfer data between a file and memory, by default the device memory of the sweep.

        `device_and_address` is the index of a device, or HOST, and the address of the memory.
        """
        device_index, address = device_and_address or (self.device.index, self.memory.address)
        file = native.OpenFile(os.open(path, flags, 0o600))
        try:
            job = engine.submit(
                write=flags != os.O_RDONLY,
                device_index=device_index,
                files=[file],
                # The extent has four numbers: index in `files`, offset in the file, address, length.
                extents=[0, 0, address, length_bytes],
                access=access,
                durable=durable,
            )
            job.wait(-1)
            progress = job.progress()
        finally:
            file.close()
        assert progress["failure"] is None, progress
        assert progress["bytes"] == length_bytes

    def _drop_source(self) -> None:
        drop_cache(self.source)

    def _remove_written_file(self) -> None:
        self.written_file.unlink(missing_ok=True)
