"""A benchmark of a tier, for the command ``gdrkit tiers bench``.

The command prints the results beside the numbers of :data:`~gdrkit.tiers.configuration.DEFAULT_TIERS`, which come from
a requirements document.

The benchmark writes and reads an unnamed file in the tier. If the file system supports O_DIRECT, the benchmark bypasses
the page cache. Otherwise it measures the page cache, and the result says so. If there is a CUDA device, the benchmark
also reads the file into device memory. This shows the route between the tier and device memory.
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

__all__ = ["DEFAULT_LENGTH_BYTES", "Speed", "measure"]

DEFAULT_LENGTH_BYTES = 256 * MIB
# Length of one read or write, in bytes. The length of the file is a multiple of this length.
_CHUNK_BYTES = 8 * MIB
_READ_THREAD_COUNT = 4
_LATENCY_READ_COUNT = 200
# Seed of the data in the file, and of the offsets of the latency reads.
_SEED = 0x7135


@dataclass(frozen=True, slots=True)
class Speed:
    """The measurements of one tier.

    Attributes
    ----------
    length_bytes : int
        Size of the file that was written and read.
    past_cache : bool
        Whether the benchmark bypassed the page cache by O_DIRECT. False: the file system does not support O_DIRECT, so
        the rates and latencies describe the page cache, not the disk.
    latency_us_median, latency_us_p99 : float
        Latency in microseconds of a read of one page at a random offset, with one read at a time.
    device_read_gb_per_s : float or None
        Rate of reads into memory of CUDA device 0; None without a device.
    route : TierRoute
        The route of the reads into device memory. If the reads took several routes, it is the worst one (see
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


def measure(folder: TierFolder, *, length_bytes: int = DEFAULT_LENGTH_BYTES) -> Speed:
    """Write and read a file in a tier, and return the rates, the latencies and the route.

    Parameters
    ----------
    folder : TierFolder
        The folder of the tier.
    length_bytes : int
        Size of the file, in bytes. It is rounded down to a multiple of 8 MiB, and is at least 8 MiB.

    Raises
    ------
    ApiError
        The tier is not writable, or it is full.
    DataMismatch
        The tier returned bytes that differ from the written ones.
    """
    chunk_count = max(1, length_bytes // _CHUNK_BYTES)
    with convert_os_errors("bench", tier=folder.name):
        buffered_fd, direct_fd = _open_unnamed_file(folder)
        try:
            chunk = mmap.mmap(-1, _CHUNK_BYTES)
            chunk[:] = pattern.payload(_CHUNK_BYTES, seed=_SEED)
            write_s = _measure_write_s(direct_fd, chunk, chunk_count)
            # The kernel is advised to drop the file from the page cache before each measurement of reads.
            os.posix_fadvise(buffered_fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _measure_read_s(direct_fd, chunk_count)
            os.posix_fadvise(buffered_fd, 0, 0, os.POSIX_FADV_DONTNEED)
            latencies_us = _measure_latencies_us(direct_fd, chunk_count * _CHUNK_BYTES)
            os.posix_fadvise(buffered_fd, 0, 0, os.POSIX_FADV_DONTNEED)
            device_read_gb_per_s, route = _measure_device_read(f"/proc/self/fd/{buffered_fd}", chunk_count)
        finally:
            for descriptor in {buffered_fd, direct_fd}:
                os.close(descriptor)
    file_bytes = chunk_count * _CHUNK_BYTES
    return Speed(
        tier=folder.name,
        length_bytes=file_bytes,
        past_cache=direct_fd != buffered_fd,
        write_gb_per_s=file_bytes / write_s / 1e9,
        read_gb_per_s=file_bytes / read_s / 1e9,
        latency_us_median=statistics.median(latencies_us),
        latency_us_p99=statistics.quantiles(latencies_us, n=100)[-1],
        device_read_gb_per_s=device_read_gb_per_s,
        route=route,
    )


def _open_unnamed_file(folder: TierFolder) -> tuple[int, int]:
    """Create an unnamed file. Return a descriptor for buffered access and one with O_DIRECT.

    If the file system does not support O_DIRECT, both are the same descriptor.
    """
    name, incoming_fd = f"bench-{uuid.uuid4().hex}", folder.gdrkit_folder_fd("incoming")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    buffered_fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=incoming_fd)
    try:
        direct_fd = os.open(name, flags | os.O_DIRECT, dir_fd=incoming_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(buffered_fd)
            raise
        direct_fd = buffered_fd
    finally:
        os.unlink(name, dir_fd=incoming_fd)
    return buffered_fd, direct_fd


def _measure_write_s(descriptor: int, chunk: mmap.mmap, chunk_count: int) -> float:
    start_s = time.perf_counter()
    for chunk_index in range(chunk_count):
        if os.pwritev(descriptor, [chunk], chunk_index * _CHUNK_BYTES) != _CHUNK_BYTES:
            raise OSError(errno.ENOSPC, "the tier is full")
    os.fsync(descriptor)
    return time.perf_counter() - start_s


def _measure_read_s(descriptor: int, chunk_count: int) -> float:
    # Each thread has its own buffer.
    buffers = [mmap.mmap(-1, _CHUNK_BYTES) for _ in range(min(_READ_THREAD_COUNT, chunk_count))]

    def read_chunks(thread_index: int) -> None:
        for chunk_index in range(thread_index, chunk_count, len(buffers)):
            read_bytes = os.preadv(descriptor, [buffers[thread_index]], chunk_index * _CHUNK_BYTES)
            if read_bytes != _CHUNK_BYTES:
                # The read was short, so there is no byte at this offset to compare.
                raise DataMismatch(first_offset_bytes=read_bytes, expected=b"", actual=b"", length_bytes=_CHUNK_BYTES)

    with ThreadPoolExecutor(len(buffers)) as executor:
        start_s = time.perf_counter()
        for future in [executor.submit(read_chunks, thread_index) for thread_index in range(len(buffers))]:
            future.result()
        duration_s = time.perf_counter() - start_s
    # All chunks of the file have the same bytes, so a check of the last chunk in each buffer is enough.
    for memory in buffers:
        pattern.check(memoryview(memory), seed=_SEED)
    return duration_s


def _measure_latencies_us(descriptor: int, length_bytes: int) -> list[float]:
    random_generator = random.Random(_SEED)  # noqa: S311 - not used for secrets.
    page_buffer, latencies_us = mmap.mmap(-1, HOST_PAGE_BYTES), []
    for _ in range(_LATENCY_READ_COUNT):
        offset = random_generator.randrange(length_bytes // HOST_PAGE_BYTES) * HOST_PAGE_BYTES
        start_s = time.perf_counter()
        os.preadv(descriptor, [page_buffer], offset)
        latencies_us.append((time.perf_counter() - start_s) * 1e6)
    return latencies_us


def _measure_device_read(path: str, chunk_count: int) -> tuple[float | None, TierRoute]:
    """Read the file into memory of CUDA device 0. Return the rate in GB/s and the worst route of the chunks."""
    try:
        device_count = cuda.device_count()
    except SetupMissing as error:
        return None, TierRoute(RouteState.NOT_POSSIBLE, why=str(error))
    if not device_count:
        return None, TierRoute(RouteState.NOT_POSSIBLE, why="there is no CUDA device")
    length_bytes = chunk_count * _CHUNK_BYTES
    with cuda.Device(0) as device, device.allocate(_CHUNK_BYTES) as memory, File(path) as file:
        with warnings.catch_warnings():
            # The result has the route, so a warning about a fallback is not needed.
            warnings.simplefilter("ignore", FallbackWarning)
            # The first read is not measured, because it also probes for a direct path and pins the engine's host
            # memory.
            file.read_into(memory, length_bytes=_CHUNK_BYTES)
            start_s = time.perf_counter()
            results = [
                file.read_into(memory, file_offset_bytes=chunk_index * _CHUNK_BYTES, length_bytes=_CHUNK_BYTES)
                for chunk_index in range(chunk_count)
            ]
            duration_s = time.perf_counter() - start_s
        pattern.check(memory.read(), seed=_SEED)
    return length_bytes / duration_s / 1e9, worst_route(results)
