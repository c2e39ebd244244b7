"""Rates of the copy engine with several settings, as one table, from which its defaults are chosen.

The best settings on the relevant machines become the defaults of ``gdrkit.gds.EngineOptions``. The settings of a kind
of transfer are measured in turn, so that the load of the machine affects all of them, and each kind has its own time
limit. A cached read is measured after another reader has used the processor caches and the bus, as in a real program.
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
    drop_cache,
    host_memory,
    log_progress,
    measure,
    pinned_copier,
    raw_direct_reader,
)

from gdrkit.gds import HOST, Engine, EngineOptions
from gdrkit.gds._native import native
from gdrkit.gds.engine import HOST_OPTIONS
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from gdrkit.cuda import CudaMemory, Device

__all__ = ["Row", "Sweep", "table"]

Options = dict[str, int]

DEFAULT: Options = {}
CACHED: list[Options] = [
    DEFAULT,
    # With these, each thread fills its own copies.
    {"coalesced_bytes": 4 * MIB},
    {"coalesced_bytes": 4 * MIB, "chunk_bytes": 2 * MIB, "buffers_count": 3},
    *(
        {"coalesced_bytes": size * MIB, "coalesced_count": count, "slice_bytes": slice_kib * KIB}
        for size, count, slice_kib in itertools.product((8, 16, 32), (3, 4, 5, 8), (512, 1024, 2048))
        if 32 <= size * count <= 128 and (slice_kib == 1024 or size * count == 64)
    ),
    *({"workers_count": workers} for workers in (8, 10, 14, 16)),
    {"chunk_bytes": 2 * MIB, "first_chunk_bytes": 2 * MIB},
    {"polls_device": False},
]
HOST_READS: list[Options] = [
    DEFAULT,
    *(
        {"workers_count": workers, "chunk_bytes": chunk * MIB, "first_chunk_bytes": first * MIB}
        for workers, chunk, first in ((16, 4, 4), (16, 8, 1), (16, 16, 16), (14, 8, 8), (12, 8, 8), (8, 8, 8))
    ),
]
BUFFERED_WRITES: list[Options] = [DEFAULT, {"buffered_writers_count": 1}, {"buffered_writers_count": 3}]
DURABLE_WRITES: list[Options] = [
    DEFAULT,
    *(
        {"direct_writers_count": workers, "direct_write_bytes": size * MIB}
        for workers, size in ((1, 16), (1, 64), (2, 8), (3, 16), (4, 16))
    ),
]
# The last settings use less staging memory. They show whether a virtual disk, which is a program of the host, also
# fills the processor caches.
COLD: list[Options] = [
    DEFAULT,
    *(
        {"direct_readers_count": readers, "direct_read_bytes": size * MIB}
        for readers, size in ((1, 4), (1, 8), (2, 2), (2, 8), (3, 4), (4, 2), (4, 4), (4, 16), (8, 4))
    ),
    *(
        {"direct_readers_count": readers, "direct_read_bytes": 4 * MIB, "chunk_bytes": 4 * MIB, **less_memory}
        for readers in (2, 4)
        for less_memory in (
            {"workers_count": readers, "buffers_count": 1},
            {"workers_count": readers + 1, "buffers_count": 2},
        )
    ),
]
# Numbers of threads and sizes of reads, in MiB, of the readers by O_DIRECT.
RAW = ((1, 4), (1, 16), (2, 4), (2, 8), (4, 4), (4, 16))
# Time limit of each kind of transfer, in seconds, without the creation of the file. The sum is less than two minutes.
TIMES_S = {"cached read": 24.0, "host read": 8.0, "write": 8.0, "durable write": 14.0, "cold read": 48.0}
ROUNDS_MAX = 5


@dataclass(slots=True)
class Row:
    """The results of one setting of the engine, or of a peer, for one kind of transfer."""

    kind: str
    setting: str
    is_engine: bool
    rates: list[float] = field(default_factory=list)
    cpu_s_per_gib: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Median rate in GB/s, or 0 if there was no time for this setting."""
        return statistics.median(self.rates) if self.rates else 0.0

    def __str__(self) -> str:
        if not self.rates:
            return f"{self.kind:14} {'-':>7} {'-':>7} {'-':>7} {'-':>6}  {self.setting} (not measured: no time)"
        cpu_s = statistics.median(self.cpu_s_per_gib)
        rates = f"{self.rate:7.2f} {max(self.rates):7.2f} {min(self.rates):7.2f} {cpu_s:6.3f}"
        return f"{self.kind:14} {rates}  {self.setting}"


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table: the kinds of transfer in the order of rows, with the fastest setting first."""
    lines = [f"{'kind':14} {'GB/s':>7} {'max':>7} {'min':>7} {'CPU/GiB':>6}  setting"]
    for kind in dict.fromkeys(row.kind for row in rows):
        lines += [str(row) for row in sorted(rows, key=lambda each: -each.rate) if row.kind == kind]
    return lines


def _description(options: Options) -> str:
    words = [
        f"{key.removesuffix('_bytes')} {value >> 10} KiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in options.items()
    ]
    return ", ".join(words) or "default"


class Sweep:
    """Transfers between a file and memory by engines with different settings.

    Parameters
    ----------
    source : Path
        The file, at least as long as the memory. Writes go to another file in its folder.
    device : Device
        The device.
    memory : CudaMemory
        Memory of the device.
    times_share : float
        Share of the time limits to use. If it is 0, only the first two settings of each kind are measured, once.
    """

    def __init__(self, source: Path, device: Device, memory: CudaMemory, *, times_share: float = 1.0) -> None:
        self.source, self.target = source, source.with_name("sweep_written")
        self.device, self.memory = device, memory
        self.times_share = times_share
        self.rows: list[Row] = []
        self._file_bytes = source.stat().st_size

    def run(self) -> list[Row]:
        """Measure all kinds of transfer and return the rows of the table.

        The file must be in the page cache before, and is not in it afterwards. The first half of the memory then has
        the data of the last cold read of an engine.
        """
        length_bytes = self.memory.length_bytes
        with contextlib.ExitStack() as stack:
            copy, free = pinned_copier(self.device, self.memory, length_bytes=length_bytes)
            stack.callback(free)
            other_engine = Engine(EngineOptions(chunk_bytes=4 * MIB, buffers_count=3))
            stack.callback(other_engine.close)

            def use_caches_and_bus() -> None:
                self._read(other_engine, length_bytes)
                copy()

            peers: dict[str, Callable[[], object]] = {"pinned copy": copy}
            self._measure("cached read", CACHED, self._read, length_bytes, before=use_caches_and_bus, peers=peers)
        self._host_reads(length_bytes)
        half_bytes = length_bytes // 2
        for kind, options, move in (
            ("write", BUFFERED_WRITES, self._write),
            ("durable write", DURABLE_WRITES, self._write_durably),
        ):
            self._measure(kind, options, move, half_bytes, before=self._remove)
        self._remove()
        with contextlib.ExitStack() as stack:
            raw = {
                f"raw O_DIRECT, {threads} x {part} MiB": raw_direct_reader(
                    self.source, stack, threads_count=threads, part_bytes=part * MIB, length_bytes=half_bytes
                )
                for threads, part in RAW
            }
            self._measure("cold read", COLD, self._read, half_bytes, before=self._drop, peers=raw, is_cleared=True)
        return self.rows

    def _measure(
        self,
        kind: str,
        settings: Iterable[Options],
        move: Callable[[Engine, int], None],
        length_bytes: int,
        *,
        before: Callable[[], object],
        peers: Mapping[str, Callable[[], object]] | None = None,
        base: EngineOptions | None = None,
        is_cleared: bool = False,
    ) -> None:
        """Measure the settings of one kind of transfer, and its peers, in turn until the time limit.

        Parameters
        ----------
        kind : str
            The kind of transfer.
        settings : iterable of Options
            The settings of the engine, added to `base`.
        move : callable
            It transfers a number of bytes by an engine.
        length_bytes : int
            The number of bytes.
        before : callable
            It is called before each transfer.
        peers : Mapping of str to callable
            Other functions that transfer the same number of bytes, into their own memory.
        base : EngineOptions, optional
            Settings that all engines have.
        is_cleared : bool
            Whether the device memory is cleared before each transfer of an engine.
        """
        is_short = self.times_share == 0
        peers = dict(peers or {})
        with contextlib.ExitStack() as stack:
            # The engines come before the peers, because the time may suffice for a part only.
            transfers: dict[str, Callable[[], object]] = {}
            for options in list(settings)[: 2 if is_short else None]:
                engine = Engine(replace(base or EngineOptions(), **options))  # type: ignore[arg-type]
                stack.callback(engine.close)
                transfers[_description(options)] = partial(move, engine, length_bytes)
                # The first read pins the memory of the engine and creates its streams.
                self._read(engine, min(length_bytes, 256 * MIB), access="buffered")
            transfers.update(list(peers.items())[: 2 if is_short else None])
            rows = {name: Row(kind, name, name not in peers) for name in transfers}
            self.rows += rows.values()
            end_s = time.monotonic() + TIMES_S[kind] * self.times_share
            for number in range(1 if is_short else ROUNDS_MAX):
                for name in list(transfers)[:: -1 if number % 2 else 1]:
                    if not is_short and time.monotonic() > end_s:
                        break
                    before()
                    if is_cleared and rows[name].is_engine:
                        self.memory.fill(0)
                    result = measure(transfers[name], length_bytes)
                    rows[name].rates.append(result.rate_gb_per_s)
                    rows[name].cpu_s_per_gib.append(result.cpu_s_per_gib)
        count = sum(len(each.rates) for each in rows.values())
        log_progress(f"{kind}: {count} transfers with {len(rows)} settings")

    def _read(self, engine: Engine, length_bytes: int, *, access: str = "automatic") -> None:
        self._move(engine, self.source, os.O_RDONLY, length_bytes, access=access)

    def _write(self, engine: Engine, length_bytes: int) -> None:
        self._move(engine, self.target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, length_bytes, access="buffered")

    def _write_durably(self, engine: Engine, length_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._move(engine, self.target, flags, length_bytes, access="direct", durable=True)

    def _host_reads(self, length_bytes: int) -> None:
        """Measure reads into host memory, by engines with other base settings."""
        with contextlib.ExitStack() as stack:
            memory = native().HostMemory(host_memory(stack, length_bytes), writable=True)
            stack.callback(memory.release)

            def read(engine: Engine, length_bytes: int) -> None:
                target = (HOST, memory.address)
                self._move(engine, self.source, os.O_RDONLY, length_bytes, access="automatic", target=target)

            self._measure("host read", HOST_READS, read, length_bytes, before=int, base=HOST_OPTIONS)

    def _move(
        self,
        engine: Engine,
        path: Path,
        flags: int,
        length_bytes: int,
        *,
        access: str,
        durable: bool = False,
        target: tuple[int, int] | None = None,
    ) -> None:
        """Transfer data between a file and memory: that of the sweep, or `target` (device index and address)."""
        device_index, address = target or (self.device.index, self.memory.address)
        fd = os.open(path, flags, 0o600)
        try:
            job = engine.submit(
                write=flags != os.O_RDONLY,
                device_index=device_index,
                files=[native().OpenFile(fd)],
                extents=[0, 0, address, length_bytes],
                access=access,
                durable=durable,
            )
            job.wait(-1)
            progress = job.progress()
        finally:
            os.close(fd)
        assert progress["failure"] is None, progress
        assert progress["bytes"] == length_bytes

    def _drop(self) -> None:
        drop_cache(self.source)

    def _remove(self) -> None:
        self.target.unlink(missing_ok=True)
