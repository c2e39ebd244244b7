"""Readers and writers of one file, side by side: gdrkit, kvikio, and what no program can beat.

Each is a function that moves everything once; what it takes is measured here, in turn with the others.
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

from support.gds import RESIDENT_MOST, cached_share, forget

from gdrkit.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from gdrkit.cuda import CudaMemory, Device

__all__ = [
    "Kvikio",
    "Part",
    "Round",
    "Series",
    "best_of",
    "check_whole",
    "drop_cache",
    "host_memory",
    "in_pairs",
    "make_random_file",
    "measure",
    "pinned_copier",
    "raw_direct_reader",
    "say",
    "split_file",
]

_PART_BYTES = 16 * MIB
_CHECK_BYTES = 32 * MIB
_began = time.monotonic()


def say(line: str) -> None:
    """Print what is being done, with the time since the beginning."""
    print(f"[{time.monotonic() - _began:6.1f} s] {line}", flush=True)  # noqa: T201 - a run of minutes shows what it does.


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one reader: how fast, and at what cost of processors."""

    rate_gb_per_s: float
    cpu_s_per_gib: float


@dataclass(slots=True)
class Series:
    """The turns of one reader."""

    name: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def rate_gb_per_s(self) -> float:
        """Median."""
        return statistics.median(each.rate_gb_per_s for each in self.rounds)

    @property
    def cpu_s_per_gib(self) -> float:
        """Median."""
        return statistics.median(each.cpu_s_per_gib for each in self.rounds)

    @property
    def spread(self) -> float:
        """Fastest less slowest, as a share of the median."""
        rates = [each.rate_gb_per_s for each in self.rounds]
        return (max(rates) - min(rates)) / self.rate_gb_per_s

    def __str__(self) -> str:
        turns = " ".join(f"{each.rate_gb_per_s:.2f}" for each in self.rounds)
        return (
            f"{self.name}: {self.rate_gb_per_s:.2f} GB/s ({turns}; spread {self.spread:.1%}), "
            f"{self.cpu_s_per_gib:.3f} CPU s/GiB"
        )


def measure(mover: Callable[[], object], length_bytes: int) -> Round:
    """One turn."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    mover()
    passed_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Round(length_bytes / passed_s / 1e9, cpu_s / (length_bytes / GIB))


def in_pairs(
    movers: Mapping[str, Callable[[], object]],
    length_bytes: int,
    *,
    rounds_count: int,
    prepare: Callable[[], object] | None = None,
    spread_most: float = 0.03,
    tries_count: int = 3,
) -> dict[str, Series]:
    """The movers in turn, the order reversed every second time; again where what it shows spreads too much.

    Of several tries the one with the smallest spread counts; all are printed.
    """
    tries = []
    for attempt in range(tries_count):
        found = {name: Series(name) for name in movers}
        for number in range(rounds_count):
            names = list(movers) if number % 2 == 0 else list(movers)[::-1]
            for name in names:
                if prepare is not None:
                    prepare()
                found[name].rounds.append(measure(movers[name], length_bytes))
        for each in found.values():
            say(f"  {each}")
        tries.append(found)
        worst = max(each.spread for each in found.values())
        if worst <= spread_most or rounds_count == 1:
            break
        if attempt + 1 < tries_count:
            say(f"  spread {worst:.1%}: again")
    return min(tries, key=lambda found: max(each.spread for each in found.values()))


def best_of(
    candidates: Mapping[str, Callable[[], object]],
    length_bytes: int,
    *,
    turns_count: int,
    prepare: Callable[[], object] | None = None,
) -> str:
    """The name of the fastest candidate, by its best turn; one that is far behind gets one turn."""
    best, best_rate = "", 0.0
    for name, mover in candidates.items():
        rate = 0.0
        for _turn in range(turns_count):
            if prepare is not None:
                prepare()
            rate = max(rate, measure(mover, length_bytes).rate_gb_per_s)
            if rate < best_rate / 2:
                break
        say(f"  {name}: {rate:.2f} GB/s")
        if rate > best_rate:
            best, best_rate = name, rate
    return best


class Part:
    """A part of device memory, as other libraries take it."""

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
    """kvikio by its Python interface, without cuFile, as it is where no GPU Direct Storage is.

    Settings are those of kvikio.defaults; changing the number of threads makes a new pool. What it opens for good is
    closed with `stack`.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        import kvikio
        import kvikio.defaults

        self.version = str(kvikio.__version__)
        self._module: Any = kvikio
        self._settings: dict[str, object] = {}
        self._module.defaults.set({"compat_mode": kvikio.CompatMode.ON})

    def use(self, **settings: object) -> None:
        """Take these settings where they differ."""
        changed = {name: value for name, value in settings.items() if self._settings.get(name) != value}
        if changed:
            self._module.defaults.set(changed)
            self._settings.update(changed)

    def open(self, path: Path, mode: str = "r") -> Any:  # noqa: ANN401 - of kvikio.
        """An open CuFile."""
        return self._module.CuFile(str(path), mode)

    def reader(self, path: Path, memory: object, **settings: object) -> Callable[[], None]:
        """Reads the whole file into memory; the file is open before."""
        file = self._stack.enter_context(self.open(path))

        def read() -> None:
            self.use(**settings)
            file.pread(memory).get()

        return read

    def files_reader(self, paths: Sequence[Path], memory: CudaMemory, **settings: object) -> Callable[[], None]:
        """Opens, reads and closes all files, one behind the other in memory."""
        sizes = [path.stat().st_size for path in paths]

        def read() -> None:
            self.use(**settings)
            files, futures, where = [], [], 0
            for path, size in zip(paths, sizes, strict=True):
                file = self.open(path)
                files.append(file)
                futures.append(file.pread(Part(memory, where, size)))
                where += size
            for future in futures:
                future.get()
            for file in files:
                file.close()

        return read

    def writer(self, path: Path, memory: object, *, sync: bool, **settings: object) -> Callable[[], None]:
        """Writes memory into a new file."""

        def write() -> None:
            self.use(**settings)
            with self.open(path, "w") as file:
                file.pwrite(memory).get()
                if sync:
                    os.fdatasync(file.fileno())

        return write


def make_random_file(path: Path, length_bytes: int) -> None:
    """A file of random bytes, written by many threads, and on the disk afterwards."""
    with path.open("wb") as file:
        file.truncate(length_bytes)
        fd = file.fileno()

        def write(offset: int) -> None:
            os.pwrite(fd, os.urandom(min(_PART_BYTES, length_bytes - offset)), offset)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(write, range(0, length_bytes, _PART_BYTES)))
        os.fsync(fd)


def split_file(path: Path, folder: Path, part_bytes: int) -> list[Path]:
    """The parts of a file as files of their own, written by many threads."""
    folder.mkdir()
    with path.open("rb") as source:
        offsets = range(0, path.stat().st_size, part_bytes)

        def write(offset: int) -> Path:
            part = folder / f"{offset // part_bytes:05}"
            part.write_bytes(os.pread(source.fileno(), part_bytes, offset))
            return part

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(write, offsets))


def host_memory(stack: ExitStack, length_bytes: int) -> mmap.mmap:
    """Memory of the host in large pages, every one of them there."""
    memory = stack.enter_context(mmap.mmap(-1, length_bytes))
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(length_bytes)
    return memory


def check_whole(memory: CudaMemory | mmap.mmap, path: Path, *, length_bytes: int) -> None:
    """Every byte of the memory is that of the file; many threads look."""
    with path.open("rb") as file:

        def check(offset: int) -> None:
            count = min(_CHECK_BYTES, length_bytes - offset)
            if isinstance(memory, mmap.mmap):
                found = memory[offset : offset + count]
            else:
                found = memory.read(offset_bytes=offset, length_bytes=count)
            assert found == os.pread(file.fileno(), count, offset), offset

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(check, range(0, length_bytes, _CHECK_BYTES)))


def drop_cache(path: Path) -> None:
    """Have the kernel forget what it has cached of the file; it must."""
    forget(path)
    share = cached_share(path)
    assert share <= RESIDENT_MOST, f"{share:.1%} of {path} is still cached"


def raw_direct_reader(
    path: Path, stack: ExitStack, *, threads_count: int, part_bytes: int, length_bytes: int | None = None
) -> Callable[[], None]:
    """Reads the file, or so much of it, by O_DIRECT into host memory, and that is all: what the disk can do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    stack.callback(os.close, fd)
    size = os.fstat(fd).st_size if length_bytes is None else length_bytes
    buffers = [stack.enter_context(mmap.mmap(-1, part_bytes)) for _ in range(threads_count)]
    for each in buffers:
        each.madvise(mmap.MADV_HUGEPAGE)
        each[:] = bytes(part_bytes)

    def read() -> None:
        offsets: Iterator[int] = iter(range(0, size, part_bytes))
        lock = threading.Lock()

        def work(buffer: mmap.mmap) -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                count = min(part_bytes, size - offset)
                assert os.preadv(fd, [memoryview(buffer)[:count]], offset) == count

        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    return read


def pinned_copier(
    device: Device, memory: CudaMemory, *, length_bytes: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copies pinned host memory into the whole of the memory: what the bus can do; and what frees it again."""
    from cuda.bindings import driver

    def done(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - of the bindings.
        assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer[0]
        return answer[1] if len(answer) > 1 else None

    part_bytes = min(256 * MIB, length_bytes)
    with device.current():
        host = done(driver.cuMemHostAlloc(part_bytes, 0))
        stream = done(driver.cuStreamCreate(1))

    def copy() -> None:
        with device.current():
            for offset in range(0, length_bytes, part_bytes):
                count = min(part_bytes, length_bytes - offset)
                done(driver.cuMemcpyHtoDAsync(memory.address + offset, host, count, stream))
            done(driver.cuStreamSynchronize(stream))

    def free() -> None:
        with device.current():
            done(driver.cuStreamDestroy(stream))
            done(driver.cuMemFreeHost(host))

    return copy, free
