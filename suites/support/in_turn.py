"""Times of things that are compared with each other, measured so that a busy machine does not decide."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Times", "in_turn"]


@dataclass(frozen=True)
class Times:
    """What one call took, in nanoseconds, over all rounds."""

    median: float
    least: float


def in_turn(things: Mapping[str, Callable[[], object]], *, rounds_count: int, calls_count: int) -> dict[str, Times]:
    """Each round calls every thing `calls_count` times, one thing after the other.

    What slows the machine for longer than a round slows all of them; what is shorter moves single rounds, and no
    median. The loop around the calls is in the times, the same for each.
    """
    found: dict[str, list[float]] = {name: [] for name in things}
    for _ in range(rounds_count):
        for name, call in things.items():
            begin_ns = time.perf_counter_ns()
            for _ in range(calls_count):
                call()
            found[name].append((time.perf_counter_ns() - begin_ns) / calls_count)
    return {name: Times(statistics.median(times_ns), min(times_ns)) for name, times_ns in found.items()}
