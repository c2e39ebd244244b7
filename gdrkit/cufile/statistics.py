"""The statistics of libcufile (cuFile 1.15 and newer): counters of the whole process, in three levels.

For each GPU, the third level counts the transfers that went peer to peer, through nvidia-fs, or through host memory
(POSIX). The first level has counters of routes for batches only.
"""

from __future__ import annotations

import enum
import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gdrkit.cufile import _cufile, _layout, _results

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GpuCounters", "Level", "Statistics", "StatisticsSnapshot"]

# Names of rates, which libcufile derives from counters.
_RATE_NAME_PATTERN = re.compile(r"_bw(_|$)|_per_sec$|_utilization$")
# Names of values about the last batch begin with this text. These values are not counters.
_LAST_BATCH_PREFIX = "last_batch_"


class Level(enum.IntEnum):
    """The level of statistics. ``SIZES`` adds histograms of the sizes, and ``PER_GPU`` the counters of each GPU."""

    OFF = 0
    BASIC = 1
    SIZES = 2
    PER_GPU = 3


@dataclass(frozen=True, slots=True)
class GpuCounters:
    """Counters of one GPU.

    Attributes
    ----------
    uuid : str
        UUID of the GPU, as nvidia-smi prints it.
    counters : mapping
        Counters by their names in ``cufile.h``.
    """

    uuid: str
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """The counters at one moment, or their increase between two moments.

    Attributes
    ----------
    basic : mapping
        Counters of the first level by their names in ``cufile.h``. Successes and errors have separate counters, such as
        ``read_ops`` and ``read_ops_err``.
    read_sizes, write_sizes : tuple of int
        Histograms of the second level; empty at a lower level.
    gpus : tuple of GpuCounters
        Counters of the third level; empty at a lower level.
    """

    basic: Mapping[str, int]
    read_sizes: tuple[int, ...] = ()
    write_sizes: tuple[int, ...] = ()
    gpus: tuple[GpuCounters, ...] = field(default=())

    def since(self, before: StatisticsSnapshot) -> StatisticsSnapshot:
        """Return the increase of the counters since `before`, without unchanged counters.

        An average (``..._lat_avg_us``) is the average over the operations since `before`, rounded down as in libcufile.
        Rates (``..._bw...``, ``..._per_sec``, ``..._utilization``) are left out, because the difference of two rates is
        not a rate. Values named ``last_batch_...`` are not counters. For a value that has changed, the result has the
        value of this snapshot.
        """
        counters_before_by_uuid = {gpu.uuid: gpu.counters for gpu in before.gpus}
        return StatisticsSnapshot(
            basic=_compute_increases(self.basic, before.basic),
            read_sizes=_subtract_histograms(self.read_sizes, before.read_sizes),
            write_sizes=_subtract_histograms(self.write_sizes, before.write_sizes),
            gpus=tuple(
                GpuCounters(gpu.uuid, increases)
                for gpu in self.gpus
                if (increases := _compute_increases(gpu.counters, counters_before_by_uuid.get(gpu.uuid, {})))
            ),
        )

    def total(self, counter_name: str) -> int:
        """Return the sum of one counter of :attr:`gpus` over all GPUs."""
        return sum(gpu.counters.get(counter_name, 0) for gpu in self.gpus)


class Statistics:
    """The statistics of an open driver. :attr:`gdrkit.cufile.Driver.statistics` returns them."""

    def level(self) -> Level:
        """Return the current level.

        Raises
        ------
        Unsupported
            cuFile is older than 1.15.
        """
        self._check_version()
        return Level(int(_cufile.call("cuFileGetStatsLevel", "get_stats_level")))

    def start(self, level: Level = Level.PER_GPU) -> None:
        """Start counting at a level.

        Raises
        ------
        Unsupported
            cuFile is older than 1.15.
        """
        self._check_version()
        _cufile.call("cuFileSetStatsLevel", "set_stats_level", level=int(level))
        _cufile.call("cuFileStatsStart", "stats_start")

    def stop(self) -> None:
        """Stop counting. The counters keep their values."""
        self._check_version()
        _cufile.call("cuFileStatsStop", "stats_stop")

    def reset(self) -> None:
        """Set all counters of this process to 0."""
        self._check_version()
        _cufile.call("cuFileStatsReset", "stats_reset")

    def snapshot(self, level: Level = Level.PER_GPU) -> StatisticsSnapshot:
        """Return the current counters.

        Raises
        ------
        ApiError
            CU_FILE_INVALID_VALUE: the statistics were started at a lower level.
        Unsupported
            cuFile is older than 1.15.
        """
        buffer, version = _cufile.get_statistics(int(level)), _cufile.library_version()
        basic = _layout.unpack_basic_counters(buffer, version=version)
        if level < Level.SIZES:
            return StatisticsSnapshot(basic)
        read_sizes, write_sizes = _layout.unpack_histograms(buffer, version=version)
        if level < Level.PER_GPU:
            return StatisticsSnapshot(basic, read_sizes, write_sizes)
        gpus = tuple(
            GpuCounters(f"GPU-{uuid.UUID(bytes=uuid_bytes)}", counters)
            for uuid_bytes, counters in _layout.unpack_gpu_counters(buffer, version=version)
        )
        return StatisticsSnapshot(basic, read_sizes, write_sizes, gpus)

    @staticmethod
    def _check_version() -> None:
        if _cufile.library_version() < _layout.STATISTICS_VERSION_MIN:
            raise _results.make_missing_function_error(
                "cuFileGetStatsLevel", version=_cufile.format_version(), since="1.15"
            )


def _compute_increases(counters_now: Mapping[str, int], counters_before: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each counter that has changed; see :meth:`StatisticsSnapshot.since`."""
    increases: dict[str, int] = {}
    for name, value in counters_now.items():
        if value == counters_before.get(name, 0) or _RATE_NAME_PATTERN.search(name):
            continue
        increases[name] = value if name.startswith(_LAST_BATCH_PREFIX) else value - counters_before.get(name, 0)
    for average_name, (sum_name, count_name) in _layout.SUM_AND_COUNT_BY_AVERAGE.items():
        increases.pop(average_name, None)
        if increases.get(count_name, 0) > 0:
            increases[average_name] = increases.get(sum_name, 0) // increases[count_name]
    return increases


def _subtract_histograms(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return (
        tuple(count_now - count_before for count_now, count_before in zip(now, before, strict=True)) if before else now
    )
