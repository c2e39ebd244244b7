"""The schedule and the speed of moves in the background: the interval, the quiet hours and the rate limit."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gdrkit.errors import UsageError
from gdrkit.tiers.copying import CHUNK_BYTES
from gdrkit.units import KIB, MIB, align_down

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RATE_BYTES_PER_S_MIN", "WATCH_MODES", "QuietHours", "RateLimiter", "RunSettings", "WatchMode"]

WatchMode = Literal["preferred", "required", "never"]
WATCH_MODES: tuple[WatchMode, ...] = ("preferred", "required", "never")
# Smallest rate limit. With a smaller limit, the pause after the smallest chunk would be too long.
RATE_BYTES_PER_S_MIN = 64 * KIB
_HOURS_PATTERN = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")
_MINUTES_PER_HOUR, _HOURS_PER_DAY = 60, 24
_DAY_S = 86400
# Longest pause between two chunks of a copy, in seconds. A program that opens the file for writing may have to wait for
# the end of the pause, because the migration detects such programs only between two chunks.
_PAUSE_S_MAX = 0.1
_CHUNK_BYTES_MIN = 4 * KIB


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A period of each day in which no file is moved, in the local time of the host.

    Attributes
    ----------
    begin_s, end_s : int
        Begin and end, in seconds after midnight. If the end is before the begin, the quiet hours include midnight.
    """

    begin_s: int
    end_s: int

    @classmethod
    def parse(cls, text: str) -> QuietHours:
        """Return the quiet hours of a text such as ``08:00-18:30`` or ``22:00-06:00``.

        Raises
        ------
        UsageError
            The text has another form, or both times are equal.
        """
        match = _HOURS_PATTERN.fullmatch(text)
        if match is not None:
            begin_hour, begin_minute, end_hour, end_minute = map(int, match.groups())
            begin_s, end_s = ((begin_hour * 60 + begin_minute) * 60, (end_hour * 60 + end_minute) * 60)
            is_valid = max(begin_hour, end_hour) < _HOURS_PER_DAY and max(begin_minute, end_minute) < _MINUTES_PER_HOUR
            if is_valid and begin_s != end_s:
                return cls(begin_s, end_s)
        message = f"quiet hours must be two different times of day HH:MM-HH:MM, such as 08:00-18:30, not {text[:40]!r}"
        raise UsageError(message)

    def remaining_s(self, time_s: float) -> float:
        """Return the seconds until the quiet hours end, or 0 if `time_s` (seconds since 1970) is not in them."""
        local_time = time.localtime(time_s)
        time_of_day_s = local_time.tm_hour * 3600 + local_time.tm_min * 60 + local_time.tm_sec
        since_begin_s, length_s = (time_of_day_s - self.begin_s) % _DAY_S, (self.end_s - self.begin_s) % _DAY_S
        return float(max(0, length_s - since_begin_s))


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The parameters of ``gdrkit tiers run``.

    Attributes
    ----------
    interval_s : float
        Time between two passes of the policy, in seconds.
    rate_bytes_per_s : int or None
        Largest rate at which files are copied, in bytes per second. None: no limit.
    quiet_hours : tuple of QuietHours
        Periods of each day in which no file is moved.
    watch : str
        Whether opens by other programs are counted: ``preferred`` (if possible), ``required`` or ``never``.

    Raises
    ------
    UsageError
        A value is invalid. The message says which one.
    """

    interval_s: float = 600.0
    rate_bytes_per_s: int | None = None
    quiet_hours: tuple[QuietHours, ...] = ()
    watch: WatchMode = "preferred"

    def __post_init__(self) -> None:
        if not (self.interval_s > 0 and math.isfinite(self.interval_s)):
            message = f"interval_s must be positive and finite, not {self.interval_s}"
            raise UsageError(message)
        if self.rate_bytes_per_s is not None and self.rate_bytes_per_s < RATE_BYTES_PER_S_MIN:
            message = f"the rate limit must be at least 64 KiB per second, not {self.rate_bytes_per_s} bytes per second"
            raise UsageError(message)
        if self.watch not in WATCH_MODES:
            message = f"watch must be one of {', '.join(map(repr, WATCH_MODES))}, not {self.watch!r}"
            raise UsageError(message)

    def remaining_quiet_s(self, time_s: float) -> float:
        """Return the time from `time_s` (seconds since 1970) to the end of the quiet hours, in seconds, or 0."""
        return max((hours.remaining_s(time_s) for hours in self.quiet_hours), default=0.0)


class RateLimiter:
    """The rate limit of the copies of a background run.

    At the rate limit, a chunk of n bytes takes n / `rate_bytes_per_s` seconds. It is *paid* when this time has passed.
    The next chunk is copied when all earlier chunks are paid. Time without copies is not saved up, so there are no
    bursts afterwards.

    Parameters
    ----------
    rate_bytes_per_s : int or None
        The limit, in bytes per second. None: no limit.
    wait : callable
        Function that waits for a number of seconds, for example the method ``wait`` of a :class:`threading.Event`. It
        may return earlier if the run has to stop.
    clock : callable
        Function that returns a time in seconds, which never goes back.

    Attributes
    ----------
    chunk_bytes : int
        Length of one read and one write. It is chosen so that the pause after a chunk is short.
    unsynced_bytes_max : int
        Largest number of bytes of a copy that may be only in memory. Because of this limit, the device writes at the
        rate of the copy, and the sync at the end of the copy is short.
    """

    def __init__(
        self,
        rate_bytes_per_s: int | None,
        *,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_bytes_per_s, self._wait, self._clock = rate_bytes_per_s, wait, clock
        # The time, by `clock`, at which all chunks that wait_and_charge() has charged are paid.
        self._paid_at_s = -math.inf
        self.unsynced_bytes_max = 32 * MIB
        self.chunk_bytes = CHUNK_BYTES
        if rate_bytes_per_s is not None:
            chunk_bytes = align_down(int(rate_bytes_per_s * _PAUSE_S_MAX), alignment_bytes=_CHUNK_BYTES_MIN)
            self.chunk_bytes = min(CHUNK_BYTES, chunk_bytes)

    def wait_and_charge(self, length_bytes: int) -> None:
        """Wait until the earlier chunks are paid, then charge the next chunk of `length_bytes`."""
        if self._rate_bytes_per_s is None:
            return
        now_s = self._clock()
        if self._paid_at_s > now_s:
            self._wait(self._paid_at_s - now_s)
        self._paid_at_s = max(self._paid_at_s, now_s) + length_bytes / self._rate_bytes_per_s
