"""A benchmark of a tier, for comparison with the numbers that the GDS integration update states.

The benchmark writes and reads an unnamed file in the tier. It bypasses the page cache if the file system supports
O_DIRECT. Otherwise it measures the page cache, and the result reports that. If there is a CUDA device, the benchmark
also reads the file into device memory, which shows the route.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import statistics
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import cuda, pattern
from gdrkit.cufile import RouteState
from gdrkit.errors import DataMismatch, SetupMissing
from gdrkit.gds.direct import FallbackWarning
from gdrkit.gds.file import File
from gdrkit.tiers.kernel_errors import convert_os_errors
from gdrkit.tiers.routes import TierRoute, worst_route
from gdrkit.units import HOST_PAGE_BYTES, MIB

if TYPE_CHECKING:
    from gdrkit.tiers.folder import TierFolder

__all__ = ["LENGTH_BYTES", "Speed", "measure"]

LENGTH_BYTES = 256 * MIB
_PART_BYTES = 8 * MIB
_THREADS_COUNT = 4
_LATENCY_READS_COUNT = 200
_SEED = 0x7135


@dataclass(frozen=True, slots=True)
class Speed:
    """The measurements of one tier.

    Attributes
    ----------
    past_cache : bool
        Whether the benchmark used O_DIRECT. False: the file system does not support it, and the numbers are those of
        the page cache, not of the disk.
    latency_us_median, latency_us_p99 : float
        Latency in microseconds of a read of one page at a random offset, with one read at a time.
    device_read_gb_per_s : float or None
        Rate of reads into memory of CUDA device 0; None without a device.
    route : TierRoute
        The route of those bytes. If they took several routes, it is the worst one (see
        :func:`~gdrkit.tiers.routes.worst_route`).
    """

    tier: str
    length_bytes: int
    past_cache: bool
    write_gb_per_s: float
    read_gb_per_s: float
    latency_us_median: float
    latency_us_p99: float
    device_read_gb_per_s: float | None
    route: TierRoute


def measure(folder: TierFolder, *, length_bytes: int = LENGTH_BYTES) -> Speed:
    """Write and read a file in a tier, and return the rates.

    Parameters
    ----------
    folder : TierFolder
        The tier.
    length_bytes : int
        Size of the file, in bytes. It is rounded down to a multiple of 8 MiB, and is at least 8 MiB.

    Raises
    ------
    ApiError
        The tier cannot be written, or it is full.
    DataMismatch
        The tier returned other bytes than those written.
    """
    parts = max(1, length_bytes // _PART_BYTES)
    with convert_os_errors("bench", tier=folder.name):
        buffered, direct = _open_unnamed(folder)
        try:
            memory = mmap.mmap(-1, _PART_BYTES)
            memory[:] = pattern.payload(_PART_BYTES, seed=_SEED)
            write_s = _timed_write(direct, memory, parts)
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _timed_read(direct, parts)
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_DONTNEED)
            latencies = _latencies_us(direct, parts * _PART_BYTES)
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_DONTNEED)
            device_rate, route = _device_read(f"/proc/self/fd/{buffered}", parts)
        finally:
            for descriptor in {buffered, direct}:
                os.close(descriptor)
    file_bytes = parts * _PART_BYTES
    return Speed(
        tier=folder.name,
        length_bytes=file_bytes,
        past_cache=direct != buffered,
        write_gb_per_s=file_bytes / write_s / 1e9,
        read_gb_per_s=file_bytes / read_s / 1e9,
        latency_us_median=statistics.median(latencies),
        latency_us_p99=statistics.quantiles(latencies, n=100)[-1],
        device_read_gb_per_s=device_rate,
        route=route,
    )


def _open_unnamed(folder: TierFolder) -> tuple[int, int]:
    """Create an unnamed file. Return a buffered descriptor and one with O_DIRECT.

    If the file system does not support O_DIRECT, both are the same descriptor.
    """
    name, incoming = f"bench-{uuid.uuid4().hex}", folder.own_folder("incoming")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    buffered = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=incoming)
    try:
        direct = os.open(name, flags | os.O_DIRECT, dir_fd=incoming)
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(buffered)
            raise
        direct = buffered
    finally:
        os.unlink(name, dir_fd=incoming)
    return buffered, direct


def _timed_write(descriptor: int, memory: mmap.mmap, parts: int) -> float:
    begin = time.perf_counter()
    for part in range(parts):
        if os.pwritev(descriptor, [memory], part * _PART_BYTES) != _PART_BYTES:
            raise OSError(errno.ENOSPC, "the tier is full")
    os.fsync(descriptor)
    return time.perf_counter() - begin


def _timed_read(descriptor: int, parts: int) -> float:
    memories = [mmap.mmap(-1, _PART_BYTES) for _ in range(min(_THREADS_COUNT, parts))]

    def read(first: int) -> None:
        for part in range(first, parts, len(memories)):
            count = os.preadv(descriptor, [memories[first]], part * _PART_BYTES)
            if count != _PART_BYTES:
                raise DataMismatch(first_offset_bytes=count, expected=b"", actual=b"", length_bytes=_PART_BYTES)

    with ThreadPoolExecutor(len(memories)) as threads:
        begin = time.perf_counter()
        for future in [threads.submit(read, first) for first in range(len(memories))]:
            future.result()
        duration_s = time.perf_counter() - begin
    for memory in memories:
        pattern.check(memoryview(memory), seed=_SEED)
    return duration_s


def _latencies_us(descriptor: int, length_bytes: int) -> list[float]:
    generator = random.Random(_SEED)  # noqa: S311 - not used for secrets.
    memory, latencies = mmap.mmap(-1, HOST_PAGE_BYTES), []
    for _ in range(_LATENCY_READS_COUNT):
        offset = generator.randrange(length_bytes // HOST_PAGE_BYTES) * HOST_PAGE_BYTES
        begin = time.perf_counter()
        os.preadv(descriptor, [memory], offset)
        latencies.append((time.perf_counter() - begin) * 1e6)
    return latencies


def _device_read(path: str, parts: int) -> tuple[float | None, TierRoute]:
    """Return the rate of reads into memory of the first device, in GB/s, and the worst route of a part of the file."""
    try:
        count = cuda.device_count()
    except SetupMissing as error:
        return None, TierRoute(RouteState.NOT_POSSIBLE, why=str(error))
    if not count:
        return None, TierRoute(RouteState.NOT_POSSIBLE, why="there is no CUDA device")
    length = parts * _PART_BYTES
    with cuda.Device(0) as device, device.allocate(_PART_BYTES) as memory, File(path) as file:
        with warnings.catch_warnings():
            # The table of results reports the fallback.
            warnings.simplefilter("ignore", FallbackWarning)
            # This first read probes for a direct path, and makes the engine pin its memory.
            file.read_into(memory, length_bytes=_PART_BYTES)
            begin = time.perf_counter()
            results = [
                file.read_into(memory, file_offset_bytes=part * _PART_BYTES, length_bytes=_PART_BYTES)
                for part in range(parts)
            ]
            duration_s = time.perf_counter() - begin
        pattern.check(memory.read(), seed=_SEED)
    return length / duration_s / 1e9, worst_route(results)
