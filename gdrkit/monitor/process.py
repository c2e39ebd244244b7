"""Metrics of the calling process: caches, pools and other objects with counters, and transfers by route."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

from gdrkit import gds, handles
from gdrkit.errors import GdrkitError
from gdrkit.monitor.metrics import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gdrkit.registration import CacheStatistics, MemoryPoolStatistics, PoolStatistics

    Statistics = Mapping[str, int] | CacheStatistics | MemoryPoolStatistics | PoolStatistics

__all__ = ["GAUGES", "process_metrics", "watch"]

# Names of the statistics that describe the present state. All other statistics count events, so they only grow.
GAUGES = frozenset(
    {
        *("leases", "in_flight", "not_deregistered", "regions", "registered_bytes", "waiting"),  # CacheStatistics
        *("buffers", "free"),  # PoolStatistics
        *("idle_blocks", "idle_bytes", "in_use_blocks", "in_use_bytes"),  # MemoryPoolStatistics
        "clients",  # Agent.statistics()
    }
)
# The kinds of open objects that have a size: registrations, dma-bufs that are held open, and pinned memory.
_SIZED_KINDS = ("verbs.region", "dmabuf_range", "cuda.pinned", "gaudi.host_mapping")
_lock = threading.Lock()
# Kind, name and statistics of each watched object, by the id of the function that returns its statistics.
_watched_objects: dict[int, tuple[str, str, Callable[[], Statistics]]] = {}


@contextlib.contextmanager
def watch(kind: str, statistics: Callable[[], Statistics], *, name: str = "") -> Iterator[None]:
    """Add the statistics of an object to the metrics of this process while the context is open.

    Parameters
    ----------
    kind : str
        Kind of the object. It is a part of the metric names: ``cache`` gives ``gdrkit_cache_hits_total{name="..."}``.
    statistics : callable
        Function that returns the statistics, such as ``cache.statistics``. The thread of the metrics server calls it.
    name : str
        Name of the object, to tell objects of one kind apart.
    """
    watch_id = id(statistics)
    with _lock:
        _watched_objects[watch_id] = kind, name, statistics
    try:
        yield
    finally:
        with _lock:
            del _watched_objects[watch_id]


def process_metrics() -> tuple[Metric, ...]:
    """Return the metrics of the watched objects, of all open objects, and of file transfers by route."""
    metric_by_name: dict[str, Metric] = {}
    # The lock delays the end of `watch` while the statistics of its object are read, so that the object stays open.
    with _lock:
        for kind, name, statistics in _watched_objects.values():
            for statistic_name, value in _read_statistics(statistics).items():
                metric_name = f"gdrkit_{kind}_{statistic_name}"
                help_text = f"Statistic {statistic_name!r} of each {kind}."
                metric = metric_by_name.setdefault(
                    metric_name, Metric(metric_name, help_text, is_counter=statistic_name not in GAUGES)
                )
                metric.add({"name": name}, value)
    transfers_metric = Metric("gdrkit_transfers", "Finished file transfers of gdrkit.gds.", is_counter=True)
    transferred_bytes_metric = Metric(
        "gdrkit_transferred_bytes", "Bytes of finished file transfers of gdrkit.gds.", is_counter=True
    )
    for route, totals in gds.transfer_totals().items():
        transfers_metric.add({"route": route.value}, totals.transfers_count)
        transferred_bytes_metric.add({"route": route.value}, totals.moved_bytes)
    return (*metric_by_name.values(), transfers_metric, transferred_bytes_metric, *_make_object_metrics())


def _make_object_metrics() -> tuple[Metric, ...]:
    """Return the open objects of this process. Kinds with a size are listed even if no object is open."""
    objects_metric = Metric("gdrkit_open_objects", "Open objects of gdrkit by kind.")
    sizes_metric = Metric("gdrkit_open_object_bytes", "Bytes of the open objects by kind, for kinds that have a size.")
    count_by_kind, bytes_by_kind = handles.live(), handles.live_bytes()
    for kind in sorted({*count_by_kind, *_SIZED_KINDS}):
        objects_metric.add({"kind": kind}, count_by_kind.get(kind, 0))
    for kind in _SIZED_KINDS:
        sizes_metric.add({"kind": kind}, bytes_by_kind.get(kind, 0))
    return (objects_metric, sizes_metric)


def _read_statistics(statistics: Callable[[], Statistics]) -> Mapping[str, int]:
    try:
        current_statistics = statistics()
    except GdrkitError:
        # The object was closed while it was still watched.
        return {}
    if dataclasses.is_dataclass(current_statistics):
        return {name: value for name, value in dataclasses.asdict(current_statistics).items() if isinstance(value, int)}
    return current_statistics
