"""A benchmark of file transfers, by the size of a transfer.

Each point is measured for a short time with one transfer after another, as in a program that waits for each transfer.
"Cached" ranges are in the page cache. "Cold" ranges were dropped from it, and each is read once.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gdrkit.gds.copying import chunk_buffers
from gdrkit.gds.file import File
from gdrkit.gds.opening import os_error
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gdrkit.gds.file import Direct

__all__ = ["KINDS", "SIZES_BYTES", "Plan", "Point", "measure"]

KINDS = ("cached read", "cold read", "write", "durable write")
SIZES_BYTES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
_COLD_SHARE_MOST = 0.01
_FILL_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a benchmark.

    Attributes
    ----------
    folder : Path
        Folder for the test files. The files are removed at the end.
    file_bytes : int
        Size of each file, in bytes.
    device_index : int
        The device whose memory is used; :data:`~gdrkit.gds.HOST` for host memory.
    seconds : float
        Duration of each point, in seconds. A point takes at least one transfer.
    direct : str
        See :class:`~gdrkit.gds.File`.
    kinds : sequence of str
        Names out of :data:`KINDS`.
    sizes_bytes : sequence of int
        Sizes of a transfer, in bytes. A size above that of the file is reduced to it.
    """

    folder: Path
    file_bytes: int = GIB
    device_index: int = 0
    seconds: float = 1.0
    direct: Direct = "preferred"
    kinds: Sequence[str] = KINDS
    sizes_bytes: Sequence[int] = SIZES_BYTES

    def points(self) -> list[tuple[str, int]]:
        """Return kind and size of each point."""
        sizes = sorted({min(each, self.file_bytes) for each in self.sizes_bytes})
        return [(kind, size) for kind in self.kinds for size in sizes]


@dataclass(frozen=True, slots=True)
class Point:
    """The measurement of one kind and one size.

    Attributes
    ----------
    rate_gb_per_s : float
        Bytes divided by the time of all transfers, in 10**9 bytes per second; 0.0 if nothing could be measured.
    operations_per_s : float
        Transfers per second.
    latency_us : float
        Median duration of a transfer, in microseconds.
    cpu_s_per_gib : float
        Processor seconds of this process per GiB.
    transfers_count : int
        Number of transfers.
    routes : tuple of str
        The routes that the bytes took.
    note : str
        A remark, such as that nothing could be dropped from the page cache.
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


@dataclass(slots=True)
class _Tally:
    took_s: list[float] = field(default_factory=list)
    routes: set[str] = field(default_factory=set)


def measure(plan: Plan, *, on_point: Callable[[Point, int], None] = lambda _point, _whole: None) -> list[Point]:
    """Measure every point and return the results.

    Parameters
    ----------
    plan : Plan
        Parameters of the benchmark.
    on_point : callable
        Called after each point with the point and the total number of points.

    Raises
    ------
    ApiError
        A file cannot be created (ENOSPC), or memory cannot be allocated.
    """
    points: list[Point] = []
    try:
        folder = TemporaryDirectory(prefix="gdrkit-bench-", dir=plan.folder)
    except OSError as error:
        raise os_error("mkdtemp", str(plan.folder), error) from error
    with folder as name:
        path = Path(name) / "read"
        _make(path, plan.file_bytes)
        whole = plan.points()
        for kind, size in whole:
            points.append(_point(plan, path, kind, size))
            on_point(points[-1], len(whole))
    return points


def _point(plan: Plan, path: Path, kind: str, size: int) -> Point:
    with chunk_buffers(plan.device_index, size, 1) as (memory,):
        if kind.endswith("read"):
            with File(path, direct=plan.direct) as file:
                note = _forget(file) if kind == "cold read" else _remember(file)
                places = _places(plan.file_bytes, size, is_once=kind == "cold read")
                found = _timed(plan, (kind, size), lambda at: file.read_into(memory, file_offset_bytes=at), places)
                return replace(found, note=note)
        durable = kind == "durable write"
        target = path.with_name("written")
        with File(target, "w", direct=plan.direct) as file:
            places = _places(plan.file_bytes, size, is_once=False, in_order=True)
            found = _timed(
                plan, (kind, size), lambda at: file.write_from(memory, file_offset_bytes=at, durable=durable), places
            )
        target.unlink()
        return found


def _timed(plan: Plan, what: tuple[str, int], transfer: Callable[[int], Any], places: Iterator[int]) -> Point:
    kind, size = what
    tally = _Tally()
    usage, began = _cpu_s(), time.monotonic()
    for at in places:
        before = time.monotonic()
        result = transfer(at)
        tally.took_s.append(time.monotonic() - before)
        tally.routes.add(result.route.value)
        if time.monotonic() - began >= plan.seconds:
            break
    whole_s = sum(tally.took_s)
    moved = size * len(tally.took_s)
    return Point(
        kind=kind,
        size_bytes=size,
        rate_gb_per_s=moved / whole_s / 1e9,
        operations_per_s=len(tally.took_s) / whole_s,
        latency_us=statistics.median(tally.took_s) * 1e6,
        cpu_s_per_gib=(_cpu_s() - usage) / (moved / GIB),
        transfers_count=len(tally.took_s),
        routes=tuple(sorted(tally.routes)),
    )


def _places(file_bytes: int, size: int, *, is_once: bool, in_order: bool = False) -> Iterator[int]:
    """Return the offsets of the transfers: each offset once, or endless random ones, the same in each run."""
    last = max(file_bytes // size, 1)
    if in_order:
        return itertools.cycle(range(0, last * size, size))
    chance = random.Random(size)  # noqa: S311 - not used for secrets.
    if is_once:
        # The order is random, because otherwise the kernel would read ahead.
        return iter(chance.sample(range(0, last * size, size), last))
    return (chance.randrange(last) * size for _ in itertools.count())


def _make(path: Path, length_bytes: int) -> None:
    """Create a file of incompressible bytes."""
    try:
        with path.open("wb") as file:
            for at in range(0, length_bytes, _FILL_BYTES):
                file.write(os.urandom(min(_FILL_BYTES, length_bytes - at)))
            file.flush()
            os.fdatasync(file.fileno())
    except OSError as error:
        raise os_error("write", str(path), error) from error


def _forget(file: File) -> str:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    share = file.cached_share()
    return "" if share <= _COLD_SHARE_MOST else f"{share:.0%} of the file could not be dropped from the page cache"


def _remember(file: File) -> str:
    for at in range(0, file.size_bytes, _FILL_BYTES):
        os.pread(file.fileno(), _FILL_BYTES, at)
    share = file.cached_share()
    return "" if share >= 1 - _COLD_SHARE_MOST else f"{1 - share:.0%} of the file does not stay in the page cache"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
