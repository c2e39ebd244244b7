"""Metrics of the calling process: caches, pools and other objects with counters, and transfers by route."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

from gdrkit import gds
from gdrkit.errors import GdrkitError
from gdrkit.monitor.metrics import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gdrkit.registration import CacheStatistics, MemoryPoolStatistics, PoolStatistics

    Statistics = Mapping[str, int] | CacheStatistics | MemoryPoolStatistics | PoolStatistics

__all__ = ["process_metrics", "watch"]

# The numbers of statistics that describe the present. All other numbers count events, so they only grow.
_GAUGES = frozenset(
    {
        *(
            "buffers",
            "clients",
            "files",
            "free",
            "idle",
            "in_flight",
            "in_use",
            "idle_blocks",
            "idle_bytes",
            "in_use_blocks",
        ),
        *(
            "idle_bytes_max",
            "in_use_bytes",
            "leases",
            "not_deregistered",
            "regions",
            "registered_bytes",
            "sessions",
            "waiting",
        ),
    }
)
_lock = threading.Lock()
_watched: dict[int, tuple[str, str, Callable[[], Statistics]]] = {}


@contextlib.contextmanager
def watch(kind: str, statistics: Callable[[], Statistics], *, name: str = "") -> Iterator[None]:
    """Export the numbers of an object while the context is open.

    Parameters
    ----------
    kind : str
        Kind of the object, part of the names: ``cache`` gives ``gdrkit_cache_hits_total{name="..."}``.
    statistics : callable
        Returns the numbers, such as ``cache.statistics``. The thread of the metrics server calls it.
    name : str
        Name of the object, to tell objects of one kind apart.
    """
    key = id(statistics)
    with _lock:
        _watched[key] = kind, name, statistics
    try:
        yield
    finally:
        with _lock:
            del _watched[key]


def process_metrics() -> tuple[Metric, ...]:
    """Return the metrics of the watched objects, and the bytes of all file transfers of this process by route."""
    metrics: dict[str, Metric] = {}
    # With the lock, `watch` cannot return while the statistics of its object are read, so the object is not closed.
    with _lock:
        for kind, name, statistics in _watched.values():
            for field, value in _numbers(statistics).items():
                full_name = f"gdrkit_{kind}_{field}"
                help_text = f"Number {field!r} of the statistics of each {kind}."
                metric = metrics.setdefault(full_name, Metric(full_name, help_text, is_counter=field not in _GAUGES))
                metric.add({"name": name}, value)
    moved = Metric("gdrkit_transferred_bytes", "Bytes of finished file transfers of gdrkit.gds.", is_counter=True)
    for route, total_bytes in gds.transferred_bytes().items():
        moved.add({"route": route.value}, total_bytes)
    return (*metrics.values(), moved)


def _numbers(statistics: Callable[[], Statistics]) -> Mapping[str, int]:
    try:
        numbers = statistics()
    except GdrkitError:
        # The object was closed while it was still watched.
        return {}
    if dataclasses.is_dataclass(numbers):
        return {name: value for name, value in dataclasses.asdict(numbers).items() if isinstance(value, int)}
    return numbers
