"""The benchmark of ``gdrkit bench storage``: speed of file transfers by kind and size of the transfer.

The kinds are cached reads, cold reads, writes, and durable writes (with a sync). Each point (one kind and one size) is
measured for a short time with one transfer after another, as in a program that waits for each transfer. Ranges of
cached reads are in the page cache. Ranges of cold reads were dropped from the page cache, and each is read once.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from gdrkit.gds.copying import chunk_buffers
from gdrkit.gds.file import File
from gdrkit.gds.opening import make_kernel_error
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gdrkit.gds.opening import DirectPathMode
    from gdrkit.gds.result import TransferResult

__all__ = ["KINDS", "SIZES_BYTES", "BenchmarkPlan", "BenchmarkPoint", "measure"]

KINDS = ("cached read", "cold read", "write", "durable write")
SIZES_BYTES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
# Largest share of a "cold" file that may be cached, and largest share of a "cached" file that may be uncached.
_CACHED_SHARE_TOLERANCE = 0.01
# Bytes per read or write when a test file is created or loaded into the page cache.
_IO_CALL_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """Parameters of a benchmark.

    Attributes
    ----------
    folder : Path
        Folder for the test files. The files are removed at the end.
    file_bytes : int
        Size of each file, in bytes.
    device_index : int
        Index of the CUDA device whose memory is used; :data:`~gdrkit.gds.HOST` for host memory.
    seconds : float
        Time for which each point is measured, in seconds. At least one transfer is measured.
    direct : str
        See :class:`~gdrkit.gds.File`.
    kinds : sequence of str
        Kinds of measurements, from :data:`KINDS`.
    sizes_bytes : sequence of int
        Sizes of a transfer, in bytes. A size above the size of the file is reduced to the size of the file.
    """

    folder: Path
    file_bytes: int = GIB
    device_index: int = 0
    seconds: float = 1.0
    direct: DirectPathMode = "preferred"
    kinds: Sequence[str] = KINDS
    sizes_bytes: Sequence[int] = SIZES_BYTES

    def points(self) -> list[tuple[str, int]]:
        """Return (kind, size in bytes) of each point."""
        sizes_bytes = sorted({min(size_bytes, self.file_bytes) for size_bytes in self.sizes_bytes})
        return [(kind, size_bytes) for kind in self.kinds for size_bytes in sizes_bytes]


@dataclass(frozen=True, slots=True)
class BenchmarkPoint:
    """The measurement of one kind and one size.

    Attributes
    ----------
    kind : str
        Kind of the measurement, from :data:`KINDS`.
    size_bytes : int
        Size of a transfer, in bytes.
    rate_gb_per_s : float
        Bytes divided by the time of all transfers, in 10**9 bytes per second.
    operations_per_s : float
        Transfers per second.
    latency_us : float
        Median duration of a transfer, in microseconds.
    cpu_s_per_gib : float
        Processor time of this process per GiB, in seconds.
    transfers_count : int
        Number of transfers.
    routes : tuple of str
        The routes that the bytes took.
    note : str
        A limitation of the measurement, such as a file that could not be dropped from the page cache.
    """

    kind: str
    size_bytes: int
    rate_gb_per_s: float
    operations_per_s: float
    latency_us: float
    cpu_s_per_gib: float
    transfers_count: int
    routes: tuple[str, ...]
    note: str = ""


def measure(
    plan: BenchmarkPlan, *, on_point: Callable[[BenchmarkPoint, int], None] = lambda _point, _points_count: None
) -> list[BenchmarkPoint]:
    """Measure every point and return the results.

    Parameters
    ----------
    plan : BenchmarkPlan
        Parameters of the benchmark.
    on_point : callable
        Function that is called after each point, with the point and the number of all points.

    Raises
    ------
    ApiError
        A file cannot be created (ENOSPC), or memory cannot be allocated.
    """
    points: list[BenchmarkPoint] = []
    try:
        temporary_folder = TemporaryDirectory(prefix="gdrkit-bench-", dir=plan.folder)
    except OSError as error:
        raise make_kernel_error("mkdtemp", str(plan.folder), error) from error
    with temporary_folder as folder_path:
        read_file_path = Path(folder_path) / "read"
        _create_file(read_file_path, plan.file_bytes)
        kinds_and_sizes = plan.points()
        for kind, size_bytes in kinds_and_sizes:
            points.append(_measure_point(plan, read_file_path, kind, size_bytes))
            on_point(points[-1], len(kinds_and_sizes))
    return points


def _measure_point(plan: BenchmarkPlan, read_file_path: Path, kind: str, size_bytes: int) -> BenchmarkPoint:
    """Measure one point. Reads use the file `read_file_path`, and writes a new file beside it."""
    with chunk_buffers(plan.device_index, size_bytes, 1) as (memory,):
        if kind.endswith("read"):
            with File(read_file_path, direct=plan.direct) as file:
                is_cold = kind == "cold read"
                note = _drop_from_cache(file) if is_cold else _load_into_cache(file)
                offsets = _make_random_offsets(plan.file_bytes, size_bytes, uses_each_once=is_cold)
                durations_s, routes, cpu_s = _time_transfers(
                    lambda offset: file.read_into(memory, file_offset_bytes=offset), offsets, seconds=plan.seconds
                )
        else:
            note, durable = "", kind == "durable write"
            written_file_path = read_file_path.with_name("written")
            with File(written_file_path, "w", direct=plan.direct) as file:
                offsets = itertools.cycle(
                    range(0, _count_transfers_per_file(plan.file_bytes, size_bytes) * size_bytes, size_bytes)
                )
                durations_s, routes, cpu_s = _time_transfers(
                    lambda offset: file.write_from(memory, file_offset_bytes=offset, durable=durable),
                    offsets,
                    seconds=plan.seconds,
                )
            written_file_path.unlink()
    total_s, total_bytes = sum(durations_s), size_bytes * len(durations_s)
    return BenchmarkPoint(
        kind=kind,
        size_bytes=size_bytes,
        rate_gb_per_s=total_bytes / total_s / 1e9,
        operations_per_s=len(durations_s) / total_s,
        latency_us=statistics.median(durations_s) * 1e6,
        cpu_s_per_gib=cpu_s / (total_bytes / GIB),
        transfers_count=len(durations_s),
        routes=tuple(sorted(routes)),
        note=note,
    )


def _time_transfers(
    transfer_at: Callable[[int], TransferResult], offsets: Iterable[int], *, seconds: float
) -> tuple[list[float], set[str], float]:
    """Call `transfer_at` with one offset after another for `seconds`, at least once.

    Returns
    -------
    tuple
        Duration of each transfer in seconds, the routes, and the processor time in seconds.
    """
    durations_s: list[float] = []
    routes: set[str] = set()
    cpu_before_s, start_s = _read_cpu_time_s(), time.monotonic()
    for offset in offsets:
        transfer_start_s = time.monotonic()
        result = transfer_at(offset)
        durations_s.append(time.monotonic() - transfer_start_s)
        routes.add(result.route.value)
        if time.monotonic() - start_s >= seconds:
            break
    return durations_s, routes, _read_cpu_time_s() - cpu_before_s


def _count_transfers_per_file(file_bytes: int, size_bytes: int) -> int:
    return max(file_bytes // size_bytes, 1)


def _make_random_offsets(file_bytes: int, size_bytes: int, *, uses_each_once: bool) -> Iterable[int]:
    """Return random offsets of reads: each offset once if `uses_each_once` is true, else an endless sequence.

    The order is random, because otherwise the kernel would read ahead. Each run has the same order.
    """
    offsets_count = _count_transfers_per_file(file_bytes, size_bytes)
    generator = random.Random(size_bytes)  # noqa: S311 - not used for secrets.
    if uses_each_once:
        return generator.sample(range(0, offsets_count * size_bytes, size_bytes), offsets_count)
    return (generator.randrange(offsets_count) * size_bytes for _ in itertools.count())


def _create_file(path: Path, length_bytes: int) -> None:
    """Create a file of incompressible bytes."""
    try:
        with path.open("wb") as file:
            for offset in range(0, length_bytes, _IO_CALL_BYTES):
                file.write(os.urandom(min(_IO_CALL_BYTES, length_bytes - offset)))
            file.flush()
            os.fdatasync(file.fileno())
    except OSError as error:
        raise make_kernel_error("write", str(path), error) from error


def _drop_from_cache(file: File) -> str:
    """Drop the file from the page cache. Return a note if that was not possible."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # With this advice, the kernel does not read ahead.
    cached_share = file.cached_share()
    return (
        ""
        if cached_share <= _CACHED_SHARE_TOLERANCE
        else f"{cached_share:.0%} of the file could not be dropped from the page cache"
    )


def _load_into_cache(file: File) -> str:
    """Load the file into the page cache. Return a note if a part of it does not stay there."""
    for offset in range(0, file.size_bytes, _IO_CALL_BYTES):
        os.pread(file.fileno(), _IO_CALL_BYTES, offset)
    cached_share = file.cached_share()
    return (
        ""
        if cached_share >= 1 - _CACHED_SHARE_TOLERANCE
        else f"{1 - cached_share:.0%} of the file does not stay in the page cache"
    )


def _read_cpu_time_s() -> float:
    """Return the processor time of this process so far, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
