"""How fast the copy engine is with other settings than its own: one table, from which its defaults are chosen.

What is best on a machine that matters becomes the default in ``gdrkit.gds.EngineOptions``. The settings of a kind take
turns, so that what slows the machine meets all of them, and each kind has a time of its own. Cached reads are measured
as a program meets them: right after another reader has had the caches and the bus.
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
    measure,
    pinned_copier,
    raw_direct_reader,
    say,
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

AS_IT_IS: Options = {}
CACHED: list[Options] = [
    AS_IT_IS,
    # Each thread loads copies of its own.
    {"coalesced_bytes": 4 * MIB},
    {"coalesced_bytes": 4 * MIB, "chunk_bytes": 2 * MIB, "buffers_count": 3},
    *(
        {"coalesced_bytes": haul * MIB, "coalesced_count": hauls, "slice_bytes": load * KIB}
        for haul, hauls, load in itertools.product((8, 16, 32), (3, 4, 5, 8), (512, 1024, 2048))
        if 32 <= haul * hauls <= 128 and (load == 1024 or haul * hauls == 64)
    ),
    *({"workers_count": workers} for workers in (8, 10, 14, 16)),
    {"chunk_bytes": 2 * MIB, "first_chunk_bytes": 2 * MIB},
    {"polls_device": False},
]
HOST_READS: list[Options] = [
    AS_IT_IS,
    *(
        {"workers_count": workers, "chunk_bytes": piece * MIB, "first_chunk_bytes": first * MIB}
        for workers, piece, first in ((16, 4, 4), (16, 8, 1), (16, 16, 16), (14, 8, 8), (12, 8, 8), (8, 8, 8))
    ),
]
BUFFERED_WRITES: list[Options] = [AS_IT_IS, {"buffered_writers_count": 1}, {"buffered_writers_count": 3}]
DURABLE_WRITES: list[Options] = [
    AS_IT_IS,
    *(
        {"direct_writers_count": workers, "direct_write_bytes": piece * MIB}
        for workers, piece in ((1, 16), (1, 64), (2, 8), (3, 16), (4, 16))
    ),
]
# The last ones go through less staging memory: whether a disk that is a program of the host fills caches, too.
COLD: list[Options] = [
    AS_IT_IS,
    *(
        {"direct_readers_count": readers, "direct_read_bytes": piece * MIB}
        for readers, piece in ((1, 4), (1, 8), (2, 2), (2, 8), (3, 4), (4, 2), (4, 4), (4, 16), (8, 4))
    ),
    *(
        {"direct_readers_count": readers, "direct_read_bytes": 4 * MIB, "chunk_bytes": 4 * MIB, **few}
        for readers in (2, 4)
        for few in ({"workers_count": readers, "buffers_count": 1}, {"workers_count": readers + 1, "buffers_count": 2})
    ),
]
RAW = ((1, 4), (1, 16), (2, 4), (2, 8), (4, 4), (4, 16))
# What each kind may take, in seconds; the file is made and removed beside that. In all less than two minutes.
TIMES_S = {"cached read": 24.0, "host read": 8.0, "write": 8.0, "durable write": 14.0, "cold read": 48.0}
TURNS_MAX = 5


@dataclass(slots=True)
class Row:
    """One setting of the engine in one kind, or what is beside it, and what each turn gave."""

    kind: str
    setting: str
    is_engine: bool
    rates: list[float] = field(default_factory=list)
    cpu_s_per_gib: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Median in GB/s; 0 where no time was left for it."""
        return statistics.median(self.rates) if self.rates else 0.0

    def __str__(self) -> str:
        if not self.rates:
            return f"{self.kind:14} {'-':>7} {'-':>7} {'-':>7} {'-':>6}  {self.setting} (no time was left)"
        cpu_s = statistics.median(self.cpu_s_per_gib)
        rates = f"{self.rate:7.2f} {max(self.rates):7.2f} {min(self.rates):7.2f} {cpu_s:6.3f}"
        return f"{self.kind:14} {rates}  {self.setting}"


def table(rows: Sequence[Row]) -> list[str]:
    """Its lines: kinds as they were measured, and in each the fastest first."""
    lines = [f"{'kind':14} {'GB/s':>7} {'best':>7} {'least':>7} {'CPU/GiB':>6}  setting"]
    for kind in dict.fromkeys(row.kind for row in rows):
        lines += [str(row) for row in sorted(rows, key=lambda each: -each.rate) if row.kind == kind]
    return lines


def _named(options: Options) -> str:
    words = [
        f"{key.removesuffix('_bytes')} {value >> 10} KiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in options.items()
    ]
    return ", ".join(words) or "as it is"


class Sweep:
    """One file and one memory, moved by engines of any setting.

    Parameters
    ----------
    source : Path
        A file that is longer than the memory, or as long; what is written goes to another beside it.
    memory : CudaMemory
        Of the device.
    times_share : float
        Of the times that the kinds have; 0: one turn of the first two settings of each kind.
    """

    def __init__(self, source: Path, device: Device, memory: CudaMemory, *, times_share: float = 1.0) -> None:
        self.source, self.target = source, source.with_name("sweep_written")
        self.device, self.memory = device, memory
        self.times_share = times_share
        self.rows: list[Row] = []
        self._file_bytes = source.stat().st_size

    def run(self) -> list[Row]:
        """Measure everything; the file's pages are cached before and not afterwards.

        The first half of the memory has afterwards what the last cold read of an engine moved.
        """
        length_bytes = self.memory.length_bytes
        with contextlib.ExitStack() as stack:
            copy, free = pinned_copier(self.device, self.memory, length_bytes=length_bytes)
            stack.callback(free)
            other = Engine(EngineOptions(chunk_bytes=4 * MIB, buffers_count=3))
            stack.callback(other.close)

            def others() -> None:
                self._read(other, length_bytes)
                copy()

            self._kind("cached read", CACHED, self._read, length_bytes, before=others, beside={"pinned copy": copy})
        self._host_reads(length_bytes)
        half_bytes = length_bytes // 2
        for kind, options, move in (
            ("write", BUFFERED_WRITES, self._write),
            ("durable write", DURABLE_WRITES, self._write_durably),
        ):
            self._kind(kind, options, move, half_bytes, before=self._remove)
        self._remove()
        with contextlib.ExitStack() as stack:
            raw = {
                f"raw O_DIRECT, {threads} x {part} MiB": raw_direct_reader(
                    self.source, stack, threads_count=threads, part_bytes=part * MIB, length_bytes=half_bytes
                )
                for threads, part in RAW
            }
            # What is beside the engines reads into memory of its own.
            self._kind("cold read", COLD, self._read, half_bytes, before=self._drop, beside=raw, is_cleared=True)
        return self.rows

    def _kind(
        self,
        kind: str,
        settings: Iterable[Options],
        move: Callable[[Engine, int], None],
        length_bytes: int,
        *,
        before: Callable[[], object],
        beside: Mapping[str, Callable[[], object]] | None = None,
        base: EngineOptions | None = None,
        is_cleared: bool = False,
    ) -> None:
        """Measure the settings of a kind, and what is `beside` them, in turns until its time is over.

        Where memory `is_cleared` before each turn of an engine, it has afterwards what the last of them moved.
        """
        is_short = self.times_share == 0
        with contextlib.ExitStack() as stack:
            # Engines come first: where there is time for a part of them alone, it is theirs.
            movers: dict[str, Callable[[], object]] = {}
            for options in list(settings)[: 2 if is_short else None]:
                engine = Engine(replace(base or EngineOptions(), **options))  # type: ignore[arg-type]
                stack.callback(engine.close)
                movers[_named(options)] = partial(move, engine, length_bytes)
                # Its memory is pinned, its streams are there.
                self._read(engine, min(length_bytes, 256 * MIB), access="buffered")
            movers.update(list((beside or {}).items())[: 2 if is_short else None])
            rows = {name: Row(kind, name, name not in (beside or {})) for name in movers}
            self.rows += rows.values()
            over = time.monotonic() + TIMES_S[kind] * self.times_share
            for turn in range(1 if is_short else TURNS_MAX):
                for name in list(movers)[:: -1 if turn % 2 else 1]:
                    if not is_short and time.monotonic() > over:
                        break
                    before()
                    if is_cleared and rows[name].is_engine:
                        self.memory.fill(0)
                    found = measure(movers[name], length_bytes)
                    rows[name].rates.append(found.rate_gb_per_s)
                    rows[name].cpu_s_per_gib.append(found.cpu_s_per_gib)
        say(f"{kind}: {sum(len(each.rates) for each in rows.values())} turns of {len(rows)} settings")

    def _read(self, engine: Engine, length_bytes: int, *, access: str = "automatic") -> None:
        self._move(engine, self.source, os.O_RDONLY, length_bytes, access=access)

    def _write(self, engine: Engine, length_bytes: int) -> None:
        self._move(engine, self.target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, length_bytes, access="buffered")

    def _write_durably(self, engine: Engine, length_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._move(engine, self.target, flags, length_bytes, access="direct", durable=True)

    def _host_reads(self, length_bytes: int) -> None:
        """Into memory of the host, by engines of their own."""
        with contextlib.ExitStack() as stack:
            held = native().HostMemory(host_memory(stack, length_bytes), writable=True)
            stack.callback(held.release)

            def read(engine: Engine, length_bytes: int) -> None:
                where = (HOST, held.address)
                self._move(engine, self.source, os.O_RDONLY, length_bytes, access="automatic", where=where)

            self._kind("host read", HOST_READS, read, length_bytes, before=int, base=HOST_OPTIONS)

    def _move(
        self,
        engine: Engine,
        path: Path,
        flags: int,
        length_bytes: int,
        *,
        access: str,
        durable: bool = False,
        where: tuple[int, int] | None = None,
    ) -> None:
        device_index, address = where or (self.device.index, self.memory.address)
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
