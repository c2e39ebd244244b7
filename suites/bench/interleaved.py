"""Comparison of short calls. Each round makes all calls, so the load of the machine affects all calls alike."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["CallTimes", "measure_interleaved"]


@dataclass(frozen=True)
class CallTimes:
    """Median and minimum time of one call over all rounds, in nanoseconds."""

    median_ns: float
    minimum_ns: float


def measure_interleaved(
    calls: Mapping[str, Callable[[], object]], *, rounds_count: int, calls_count: int
) -> dict[str, CallTimes]:
    """Measure several calls. In each round, every call is repeated `calls_count` times before the next call follows.

    Every second round has the reverse order, because a call affects the next call: on a busy machine, the scheduler
    prefers a thread that has just slept. It therefore interrupts a call less often if the call before it has slept.

    A load that lasts longer than a round slows all calls. A shorter load affects a few rounds, but not the medians. The
    times include the Python loop around the calls, which is the same for every call.
    """
    times_ns: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(rounds_count):
        for name, call in list(calls.items())[:: 1 if round_index % 2 == 0 else -1]:
            begin_ns = time.perf_counter_ns()
            for _ in range(calls_count):
                call()
            times_ns[name].append((time.perf_counter_ns() - begin_ns) / calls_count)
    return {name: CallTimes(statistics.median(times), min(times)) for name, times in times_ns.items()}
