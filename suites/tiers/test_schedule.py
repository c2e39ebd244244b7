"""The schedule of background moves: quiet hours, the rate limit, and valid and invalid settings of a run."""

from __future__ import annotations

import calendar
import time
from typing import TYPE_CHECKING

import pytest
from support.system_calls import SystemCall, run_with_intercepted_calls
from support.tier_world import create_file, read_contents

from gdrkit.errors import UsageError
from gdrkit.tiers import Phase, TierManager, configure
from gdrkit.tiers.schedule import QuietHours, RateLimiter, RunSettings
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path


# Time of a new FakeTime.
START_S = 1000.0


class FakeTime:
    """A clock that advances only by its method `wait`, or when a case changes `now_s`."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.pauses_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds


def make_local_time(hour: int, minute: int) -> float:
    """Return a time in seconds since 1970 at which the local clock of this host shows this hour and minute."""
    utc_noon_s = calendar.timegm((2026, 3, 10, 12, 0, 0))
    local_time = time.localtime(utc_noon_s)
    return utc_noon_s + ((hour - local_time.tm_hour) * 60 + minute - local_time.tm_min) * 60.0 - local_time.tm_sec


@pytest.mark.parametrize(
    ("text", "hour", "minute", "remaining_s"),
    [
        ("08:00-18:30", 7, 59, 0),
        ("08:00-18:30", 8, 0, 10.5 * 3600),
        ("08:00-18:30", 18, 29, 60),
        ("08:00-18:30", 18, 30, 0),
        ("22:00-06:15", 21, 59, 0),
        ("22:00-06:15", 23, 0, 7.25 * 3600),
        ("22:00-06:15", 0, 0, 6.25 * 3600),
        ("22:00-06:15", 6, 14, 60),
        ("22:00-06:15", 6, 15, 0),
        ("09:30-00:00", 23, 59, 60),
    ],
)
def test_quiet_hours_begin_and_end(text: str, hour: int, minute: int, remaining_s: float) -> None:
    assert QuietHours.parse(text).remaining_s(make_local_time(hour, minute)) == remaining_s


def test_several_quiet_hours_last_until_the_last_end() -> None:
    settings = RunSettings(quiet_hours=(QuietHours.parse("08:00-10:00"), QuietHours.parse("09:00-12:00")))
    assert settings.remaining_quiet_s(make_local_time(9, 30)) == 2.5 * 3600
    assert settings.remaining_quiet_s(make_local_time(13, 0)) == 0
    assert RunSettings().remaining_quiet_s(make_local_time(9, 30)) == 0


@pytest.mark.parametrize(
    "text", ["", "8:00-18:00", "08:00", "24:00-06:00", "08:60-09:00", "09:00-09:60", "08:00-25:00", "08:00-08:00"]
)
def test_invalid_quiet_hours_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="quiet hours must be two different times of day"):
        QuietHours.parse(text)


@pytest.mark.parametrize("rate_bytes_per_s", [64 * KIB, 1_000_000, 100 * MIB, 10_000 * MIB])
def test_rate_limit_holds_and_pauses_are_short(rate_bytes_per_s: int) -> None:
    fake_time = FakeTime()
    rate_limiter = RateLimiter(rate_bytes_per_s, wait=fake_time.wait, clock=fake_time.clock)
    chunk_count = 50
    for _ in range(chunk_count):
        rate_limiter.wait_and_charge(rate_limiter.chunk_bytes)
    # The first chunk passes without a wait.
    assert fake_time.now_s - START_S == pytest.approx((chunk_count - 1) * rate_limiter.chunk_bytes / rate_bytes_per_s)
    assert max(fake_time.pauses_s) <= 0.1
    assert rate_limiter.chunk_bytes % (4 * KIB) == 0
    assert 0 < rate_limiter.chunk_bytes <= 4 * MIB


def test_idle_time_gives_no_burst() -> None:
    fake_time = FakeTime()
    rate_limiter = RateLimiter(MIB, wait=fake_time.wait, clock=fake_time.clock)
    rate_limiter.wait_and_charge(64 * KIB)
    fake_time.now_s += 3600
    for _ in range(2):
        rate_limiter.wait_and_charge(64 * KIB)
    assert fake_time.pauses_s == [pytest.approx(1 / 16)]


def test_run_without_rate_limit_never_waits() -> None:
    fake_time = FakeTime()
    rate_limiter = RateLimiter(None, wait=fake_time.wait, clock=fake_time.clock)
    rate_limiter.wait_and_charge(1 << 40)
    rate_limiter.wait_and_charge(1 << 40)
    assert (fake_time.pauses_s, rate_limiter.chunk_bytes) == ([], 4 * MIB)


def test_move_copies_at_most_the_rate(manager: TierManager) -> None:
    fake_time, progress = FakeTime(), []
    data = create_file(manager, "file", 200 * KIB + 1, seed=1)

    def record_progress(phase: Phase, _name: str, offset_bytes: int) -> None:
        progress.append((phase, offset_bytes, fake_time.now_s))

    rate_limiter = RateLimiter(100 * KIB, wait=fake_time.wait, clock=fake_time.clock)
    manager.move("file", "nvme", observe=record_progress, rate_limiter=rate_limiter)
    assert read_contents(manager, "file") == data
    copy_steps = [(offset_bytes, now_s) for phase, offset_bytes, now_s in progress if phase is Phase.COPY]
    # The copy is never ahead of the rate by more than one chunk. The additional byte allows for rounding.
    for offset_bytes, now_s in copy_steps:
        assert offset_bytes <= (now_s - START_S) * 100 * KIB + rate_limiter.chunk_bytes + 1
    # The manager calls the observer before the first chunk and after each chunk.
    assert len(copy_steps) == 1 + -(-len(data) // rate_limiter.chunk_bytes)
    # The rate limit applies to the copy, and then to its verification.
    assert fake_time.now_s - START_S == pytest.approx(2 * len(data) / (100 * KIB), rel=0.1)


def test_holes_are_not_charged(manager: TierManager) -> None:
    fake_time = FakeTime()
    with manager.open("sparse", "a+") as file:
        file.write_from(b"x" * 4096, file_offset_bytes=1 << 30)
    manager.move("sparse", "nvme", rate_limiter=RateLimiter(64 * KIB, wait=fake_time.wait, clock=fake_time.clock))
    assert fake_time.now_s - START_S < 1


def test_paced_copy_is_synced_in_parts(manager: TierManager) -> None:
    create_file(manager, "file", 12 * MIB, seed=1)
    fake_time = FakeTime()
    rate_limiter = RateLimiter(None, wait=fake_time.wait, clock=fake_time.clock)
    rate_limiter.unsynced_bytes_max = 4 * MIB
    sync_positions: list[tuple[Phase, int]] = []
    last_position = (Phase.RECORD, 0)

    def observe(phase: Phase, _name: str, offset_bytes: int) -> None:
        nonlocal last_position
        last_position = (phase, offset_bytes)

    def record_sync(call: SystemCall) -> None:
        # The copy of a migration is in the folder `incoming` until it is complete.
        if "/incoming/" in call.path:
            sync_positions.append(last_position)

    run_with_intercepted_calls(
        lambda: manager.move("file", "nvme", observe=observe, rate_limiter=rate_limiter), "fdatasync", reply=record_sync
    )
    assert sync_positions == [(Phase.COPY, 4 * MIB), (Phase.COPY, 8 * MIB)]


def test_file_and_arguments_set_the_run(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text('[run]\ninterval_s = 60\nrate_per_s = "1.5 MiB"\nquiet_hours = ["08:00-18:00"]\nwatch = "never"\n')
    run = configure(file=path, environ={}).run
    assert run == RunSettings(60, 3 * MIB // 2, (QuietHours(8 * 3600, 18 * 3600),), "never")
    assert configure(environ={}).run == RunSettings()


@pytest.mark.parametrize(
    ("toml_line", "error_text"),
    [
        ("interval_s = 0", "interval_s must be positive"),
        ("interval_s = 1e400", "interval_s"),
        ("interval_s = inf", "interval_s"),
        ('rate_per_s = "10 KiB"', "the rate limit must be at least 64 KiB per second, not 10240"),
        ('rate_per_s = "fast"', "a size must be a number"),
        ('quiet_hours = ["at night"]', "HH:MM-HH:MM"),
        ('watch = "always"', "watch must be one of 'preferred', 'required', 'never', not 'always'"),
        ("speed = 1", "speed"),
    ],
)
def test_invalid_run_settings_are_refused(tmp_path: Path, toml_line: str, error_text: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(f"[run]\n{toml_line}\n")
    with pytest.raises(UsageError, match=error_text):
        configure(file=path, environ={})
