"""Measurement of file transfers for the storage benchmarks, and the transfers with which gdrkit is compared.

A transfer is a function that transfers all bytes once. :func:`measure_in_turn` measures several transfers. gdrkit is
compared with transfers by kvikio, with reads that use only the disk, and with copies that use only the PCIe bus.
"""

from __future__ import annotations

import mmap
import os
import resource
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.gds import CACHED_SHARE_MAX, cached_share, drop_from_cache

from gdrkit.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from gdrkit.cuda import CudaMemory, Device

__all__ = [
    "DeviceRange",
    "Kvikio",
    "Series",
    "TransferMeasurement",
    "allocate_host_memory",
    "check_all_bytes",
    "create_random_file",
    "drop_cache",
    "find_fastest",
    "log_progress",
    "make_direct_reader",
    "make_pinned_copier",
    "measure",
    "measure_in_turn",
    "split_file",
]

_FILL_CHUNK_BYTES = 16 * MIB
_CHECK_CHUNK_BYTES = 32 * MIB
_import_time_s = time.monotonic()


def log_progress(line: str) -> None:
    """Print a line with the time since the import of this module. A run takes minutes, so it shows its progress."""
    print(f"[{time.monotonic() - _import_time_s:6.1f} s] {line}", flush=True)  # noqa: T201


@dataclass(frozen=True, slots=True)
class TransferMeasurement:
    """The rate of one transfer, and the processor time that this process spent on each GiB."""

    rate_gb_per_s: float
    cpu_s_per_gib: float


@dataclass(slots=True)
class Series:
    """All measurements of one repeated transfer."""

    name: str
    measurements: list[TransferMeasurement] = field(default_factory=list)

    @property
    def rate_gb_per_s(self) -> float:
        """Median rate, in GB/s (10^9 bytes)."""
        return statistics.median(measurement.rate_gb_per_s for measurement in self.measurements)

    @property
    def cpu_s_per_gib(self) -> float:
        """Median processor time, in seconds per GiB."""
        return statistics.median(measurement.cpu_s_per_gib for measurement in self.measurements)

    @property
    def spread_ratio(self) -> float:
        """Difference between the highest and the lowest rate, as a share of the median."""
        rates = [measurement.rate_gb_per_s for measurement in self.measurements]
        return (max(rates) - min(rates)) / self.rate_gb_per_s

    def __str__(self) -> str:
        rates_text = " ".join(f"{measurement.rate_gb_per_s:.2f}" for measurement in self.measurements)
        return (
            f"{self.name}: {self.rate_gb_per_s:.2f} GB/s ({rates_text}; spread {self.spread_ratio:.1%}), "
            f"{self.cpu_s_per_gib:.3f} CPU s/GiB"
        )


def measure(transfer: Callable[[], object], length_bytes: int) -> TransferMeasurement:
    """Measure one transfer of `length_bytes`."""
    usage_before = resource.getrusage(resource.RUSAGE_SELF)
    begin_s = time.perf_counter()
    transfer()
    duration_s = time.perf_counter() - begin_s
    usage_after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage_after.ru_utime - usage_before.ru_utime + usage_after.ru_stime - usage_before.ru_stime
    return TransferMeasurement(length_bytes / duration_s / 1e9, cpu_s / (length_bytes / GIB))


def measure_in_turn(
    transfers: Mapping[str, Callable[[], object]],
    length_bytes: int,
    *,
    rounds_count: int,
    prepare: Callable[[], object] | None = None,
    spread_max: float = 0.03,
    attempts_count: int = 3,
) -> dict[str, Series]:
    """Measure several transfers in turn. Every second round measures them in reverse order.

    An attempt consists of all rounds. Its spread is the largest spread of a transfer. All attempts are printed. The
    function returns the series of the attempt with the smallest spread, by the name of the transfer.

    Parameters
    ----------
    transfers : Mapping of str to callable
        The transfers by name.
    length_bytes : int
        Number of bytes of each transfer.
    rounds_count : int
        Number of rounds of an attempt.
    prepare : callable, optional
        Function that is called before each transfer, outside of the measured time.
    spread_max : float
        Largest spread of an attempt that is accepted. After an attempt with a larger spread, another attempt follows.
    attempts_count : int
        Maximum number of attempts.
    """
    attempts = []
    for attempt_index in range(attempts_count):
        series_by_name = {name: Series(name) for name in transfers}
        for round_index in range(rounds_count):
            names = list(transfers) if round_index % 2 == 0 else list(transfers)[::-1]
            for name in names:
                if prepare is not None:
                    prepare()
                series_by_name[name].measurements.append(measure(transfers[name], length_bytes))
        for transfer_series in series_by_name.values():
            log_progress(f"  {transfer_series}")
        attempts.append(series_by_name)
        spread = max(transfer_series.spread_ratio for transfer_series in series_by_name.values())
        if spread <= spread_max or rounds_count == 1:
            break
        if attempt_index + 1 < attempts_count:
            log_progress(f"  spread {spread:.1%}: another attempt")
    return min(
        attempts,
        key=lambda series_by_name: max(transfer_series.spread_ratio for transfer_series in series_by_name.values()),
    )


def find_fastest(
    candidates: Mapping[str, Callable[[], object]],
    length_bytes: int,
    *,
    repeats_count: int,
    prepare: Callable[[], object] | None = None,
) -> str:
    """Return the name of the candidate with the highest rate. Each candidate makes `repeats_count` transfers.

    A candidate with less than half of the highest rate so far is not repeated.
    """
    fastest_name, highest_rate = "", 0.0
    for name, transfer in candidates.items():
        rate = 0.0
        for _ in range(repeats_count):
            if prepare is not None:
                prepare()
            rate = max(rate, measure(transfer, length_bytes).rate_gb_per_s)
            if rate < highest_rate / 2:
                break
        log_progress(f"  {name}: {rate:.2f} GB/s")
        if rate > highest_rate:
            fastest_name, highest_rate = name, rate
    return fastest_name


class DeviceRange:
    """A range of device memory, which other libraries access by the CUDA array interface."""

    def __init__(self, memory: CudaMemory, offset_bytes: int, length_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (memory.address + offset_bytes, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


class Kvikio:
    """The library kvikio, set up to work without cuFile, as on a machine without GPUDirect Storage.

    The settings of kvikio are global, so each transfer applies its settings first. kvikio creates a new thread pool for
    a new number of threads. make_reader() keeps its file open until `stack` closes it.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        import kvikio
        import kvikio.defaults

        self.version = str(kvikio.__version__)
        self._module: Any = kvikio
        self._applied_settings: dict[str, object] = {}
        self._module.defaults.set({"compat_mode": kvikio.CompatMode.ON})

    def apply_settings(self, **settings: object) -> None:
        """Apply only the settings whose value changes, to keep the thread pool if possible."""
        changed_settings = {
            name: value for name, value in settings.items() if self._applied_settings.get(name) != value
        }
        if changed_settings:
            self._module.defaults.set(changed_settings)
            self._applied_settings.update(changed_settings)

    def open(self, path: Path, mode: str = "r") -> Any:  # noqa: ANN401 - kvikio has no types.
        """Open a file as a kvikio.CuFile."""
        return self._module.CuFile(str(path), mode)

    def make_reader(self, path: Path, memory: object, **settings: object) -> Callable[[], None]:
        """Open the file, and return a function that reads the whole file into the memory."""
        file = self._stack.enter_context(self.open(path))

        def read() -> None:
            self.apply_settings(**settings)
            file.pread(memory).get()

        return read

    def make_files_reader(self, paths: Sequence[Path], memory: CudaMemory, **settings: object) -> Callable[[], None]:
        """Return a function that opens all files, reads them into consecutive memory, and closes them."""
        sizes_bytes = [path.stat().st_size for path in paths]

        def read() -> None:
            self.apply_settings(**settings)
            files, futures, offset_bytes = [], [], 0
            for path, size_bytes in zip(paths, sizes_bytes, strict=True):
                file = self.open(path)
                files.append(file)
                futures.append(file.pread(DeviceRange(memory, offset_bytes, size_bytes)))
                offset_bytes += size_bytes
            for future in futures:
                future.get()
            for file in files:
                file.close()

        return read

    def make_writer(self, path: Path, memory: object, *, sync: bool, **settings: object) -> Callable[[], None]:
        """Return a function that writes the memory to a new file, and calls fdatasync if `sync` is True."""

        def write() -> None:
            self.apply_settings(**settings)
            with self.open(path, "w") as file:
                file.pwrite(memory).get()
                if sync:
                    os.fdatasync(file.fileno())

        return write


def create_random_file(path: Path, length_bytes: int) -> None:
    """Create a file of random bytes with several threads, and sync it to the disk."""
    with path.open("wb") as file:
        file.truncate(length_bytes)
        fd = file.fileno()

        def write_chunk(offset: int) -> None:
            os.pwrite(fd, os.urandom(min(_FILL_CHUNK_BYTES, length_bytes - offset)), offset)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(write_chunk, range(0, length_bytes, _FILL_CHUNK_BYTES)))
        os.fsync(fd)


def split_file(path: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Split a file into files of `part_bytes` in a new folder, with several threads, and return their paths."""
    folder.mkdir()
    with path.open("rb") as source:
        offsets = range(0, path.stat().st_size, part_bytes)

        def write_part(offset: int) -> Path:
            part_path = folder / f"{offset // part_bytes:05}"
            part_path.write_bytes(os.pread(source.fileno(), part_bytes, offset))
            return part_path

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(write_part, offsets))


def allocate_host_memory(stack: ExitStack, length_bytes: int) -> mmap.mmap:
    """Allocate host memory in huge pages, and write to every page, so that the kernel allocates all pages now."""
    memory = stack.enter_context(mmap.mmap(-1, length_bytes))
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(length_bytes)
    return memory


def check_all_bytes(memory: CudaMemory | mmap.mmap, path: Path, *, length_bytes: int) -> None:
    """Require that the memory has the bytes of the file. Several threads compare the bytes."""
    with path.open("rb") as file:

        def check_chunk(offset: int) -> None:
            chunk_bytes = min(_CHECK_CHUNK_BYTES, length_bytes - offset)
            if isinstance(memory, mmap.mmap):
                contents = memory[offset : offset + chunk_bytes]
            else:
                contents = memory.read(offset_bytes=offset, length_bytes=chunk_bytes)
            assert contents == os.pread(file.fileno(), chunk_bytes, offset), offset

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(check_chunk, range(0, length_bytes, _CHECK_CHUNK_BYTES)))


def drop_cache(path: Path) -> None:
    """Drop the file from the page cache, and require that the kernel did so."""
    drop_from_cache(path)
    share = cached_share(path)
    assert share <= CACHED_SHARE_MAX, f"{share:.1%} of {path} is still cached"


def make_direct_reader(
    path: Path, stack: ExitStack, *, threads_count: int, part_bytes: int, length_bytes: int | None = None
) -> Callable[[], None]:
    """Return a function that reads a file, or its first `length_bytes`, with O_DIRECT into host memory.

    The function only reads, so its rate is the rate of the disk. Each of its threads reads `part_bytes` at a
    time.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    stack.callback(os.close, fd)
    total_bytes = os.fstat(fd).st_size if length_bytes is None else length_bytes
    buffers = [stack.enter_context(mmap.mmap(-1, part_bytes)) for _ in range(threads_count)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer[:] = bytes(part_bytes)

    def read() -> None:
        offsets: Iterator[int] = iter(range(0, total_bytes, part_bytes))
        lock = threading.Lock()

        def read_parts(buffer: mmap.mmap) -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                requested_bytes = min(part_bytes, total_bytes - offset)
                assert os.preadv(fd, [memoryview(buffer)[:requested_bytes]], offset) == requested_bytes

        threads = [threading.Thread(target=read_parts, args=(buffer,)) for buffer in buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return read


def make_pinned_copier(
    device: Device, memory: CudaMemory, *, length_bytes: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Allocate pinned host memory. Return a function that copies it into device memory, and a function that frees it.

    The host memory has at most 256 MiB. The first function copies it repeatedly, until `length_bytes` of the device
    memory are written. It does nothing else, so its rate is the rate of the PCIe bus.
    """
    from cuda.bindings import driver

    def get_value(code_and_value: tuple[Any, ...]) -> Any:  # noqa: ANN401 - the bindings have no types.
        assert code_and_value[0] == driver.CUresult.CUDA_SUCCESS, code_and_value[0]
        return code_and_value[1] if len(code_and_value) > 1 else None

    chunk_bytes = min(256 * MIB, length_bytes)
    with device.current():
        host_address = get_value(driver.cuMemHostAlloc(chunk_bytes, 0))
        stream = get_value(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def copy() -> None:
        with device.current():
            for offset in range(0, length_bytes, chunk_bytes):
                copied_bytes = min(chunk_bytes, length_bytes - offset)
                get_value(driver.cuMemcpyHtoDAsync(memory.address + offset, host_address, copied_bytes, stream))
            get_value(driver.cuStreamSynchronize(stream))

    def free() -> None:
        with device.current():
            get_value(driver.cuStreamDestroy(stream))
            get_value(driver.cuMemFreeHost(host_address))

    return copy, free
