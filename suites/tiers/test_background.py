"""``gdrkit tiers run`` moves files by policy, keeps quiet hours, and stops soon without loss."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.file_opener import FileOpener
from support.other_user import folder_for_all_users, make_program_command
from support.processes import wait_until
from support.tier_campaign import MigrationProcess
from support.tier_world import TIER_NAMES, check_tiers, create_file, make_configuration

from gdrkit import pattern
from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import host, needs
from gdrkit.tiers import Configuration, Phase, TierManager
from gdrkit.tiers.background import BackgroundRun, RunOutput
from gdrkit.tiers.schedule import QuietHours, RunSettings
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# `gdrkit tiers run` must stop within 2 s. The limit of the cases is ten times longer, for slow machines.
STOP_TIMEOUT_S = 20.0
# A busy machine may need this time to start the command or to migrate hundreds of files.
WORK_TIMEOUT_S = 240.0
# The time that the clock of a case returns first, in seconds since 1970.
FAKE_NOW_S = 1_800_000_000.0
DAY_S = 86400
# Program that runs `gdrkit tiers run` as an unprivileged user.
UNPRIVILEGED_RUN_PROGRAM = """
import sys
import gdrkit.cli, gdrkit.tiers.runs
from support.other_user import become_unprivileged
become_unprivileged()
sys.argv = ["gdrkit", "tiers", "run", *sys.argv[1:]]
gdrkit.cli.main()
"""


class RunningCommand:
    """The command `gdrkit tiers run --json` in a child process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    def wait_for_event(self, name: str) -> dict[str, Any]:
        """Read events up to the first event with this name, and return that event."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == name:
                return self.events[-1]
        pytest.fail(f"the command has ended without the event {name}: {self.events}")

    def stop(self, signal_number: int = signal.SIGTERM) -> dict[str, Any]:
        """Send the signal, require that the command ends in time with exit code 0, and return its last event."""
        self.process.send_signal(signal_number)
        output, _ = self.process.communicate(timeout=STOP_TIMEOUT_S)
        assert self.process.returncode == 0
        self.events += [json.loads(line) for line in output.splitlines()]
        return self.events[-1]


@contextmanager
def run_command_in_background(configuration: Configuration, *options: str) -> Iterator[RunningCommand]:
    """Start `gdrkit tiers run` on these tiers, and wait until it is ready."""
    config_file = configuration.catalogue.parent / "tiers.toml"
    tier_tables = (
        f'[[tiers]]\nname = "{tier.name}"\ndirectory = "{tier.directory}"\naccesses_min = {tier.accesses_min}\n'
        + ("" if tier.capacity_bytes is None else f"capacity = {tier.capacity_bytes}\n")
        for tier in configuration.tiers
    )
    timeout_line = f"timeout_ms = {configuration.timeout_ms}"
    config_file.write_text(
        f'catalogue = "{configuration.catalogue}"\n{timeout_line}\nheadroom = 0.0\n{"".join(tier_tables)}'
    )
    command = [sys.executable, "-m", "gdrkit", "tiers", "run", "--json", f"--config={config_file}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            run = RunningCommand(process)
            run.wait_for_event("ready")
            yield run
        finally:
            process.kill()


class StopEventWithoutWaits(threading.Event):
    """The stop event of a run. Instead of waiting, wait() calls `on_wait` with the length of the wait in seconds."""

    def __init__(self, on_wait: Callable[[float], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._on_wait(timeout)
        return self.is_set()


@needs(host.open_reports)
@pytest.mark.timeout(2 * WORK_TIMEOUT_S)
def test_hot_files_of_another_program_end_on_the_fast_tier(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    configuration = make_configuration(tmp_path)
    nvme, ssd, hdd = configuration.tiers
    # The fast tier has space for 20 files of one page, and is full of cold files when the run begins.
    configuration = replace(configuration, tiers=(replace(nvme, capacity_bytes=80 * KIB), ssd, hdd), headroom=0.0)
    with TierManager(configuration):
        pass
    names = [f"set-{index % 7}/{index}" for index in range(1000)]
    data_by_name = {name: pattern.payload(4 * KIB, seed=seed + index) for index, name in enumerate(names)}
    # The first 15 files get enough opens for the tier nvme (100), and the next 25 files enough for ssd (10).
    open_count_by_name = dict(
        zip(names, [*range(115, 100, -1), *(rng.randint(12, 60) for _ in range(25))], strict=False)
    )
    open_count_by_name |= {name: rng.randint(1, 5) for name in names[40:200]}
    for index, name in enumerate(names):
        tier_name = "nvme" if index >= 980 else "hdd"
        path = configuration.tier(tier_name).directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data_by_name[name])
    with (
        run_command_in_background(configuration, "--interval-s=0.2", "--watch=required") as run,
        FileOpener() as file_opener,
    ):
        assert run.wait_for_event("passed")["result"]["considered"] == 1000
        file_opener.open_files([tier.directory for tier in configuration.tiers], open_count_by_name, seed=seed)
        hot_names, warm_names = names[:15], names[15:40]
        wait_until(
            lambda: (
                all((nvme.directory / name).exists() for name in hot_names)
                and all((ssd.directory / name).exists() for name in warm_names)
            ),
            "the hot and the warm files are in their tiers",
            timeout_s=WORK_TIMEOUT_S,
        )
        assert run.stop() == {"event": "ended", "is_complete": True}
    check_tiers(configuration, data_by_name)
    with TierManager(configuration) as manager:
        assert {manager.find(name).tier for name in names[40:]} == {"hdd"}


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_stop_in_a_copy_undoes_it_in_time(tmp_path: Path, signal_number: int) -> None:
    configuration = make_configuration(tmp_path)
    with TierManager(configuration) as manager:
        data_by_name = {"file": create_file(manager, "file", 8 * MIB, seed=1)}
        manager.pin("file", "nvme")
    # With this rate, the copy takes two minutes.
    with run_command_in_background(configuration, "--rate=64KiB", "--watch=never") as run:
        incoming_folder = configuration.tier("nvme").directory / ".gdrkit-tiers" / "incoming"
        wait_until(
            lambda: any(path.stat().st_blocks for path in incoming_folder.iterdir()),
            "the copy has bytes",
            timeout_s=WORK_TIMEOUT_S,
        )
        assert run.stop(signal_number) == {"event": "ended", "is_complete": True}
    assert [event["event"] for event in run.events] == ["ready", "ended"]
    assert not list(incoming_folder.iterdir())
    check_tiers(configuration, data_by_name)
    with TierManager(configuration) as manager:
        assert manager.find("file").tier == "hdd"
        assert manager.migrate().moved == 1


def test_stop_between_passes_is_in_time(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path)
    with run_command_in_background(configuration, "--interval-s=1e6", "--watch=never") as run:
        run.wait_for_event("passed")
        assert run.stop() == {"event": "ended", "is_complete": True}


def test_stop_does_not_wait_for_a_blocked_step(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path, timeout_ms=600_000)
    with TierManager(configuration) as manager:
        data_by_name = {"file": create_file(manager, "file", 4 * KIB, seed=1)}
        manager.pin("file", "nvme")
        # gdrkit reports this file in a finding, which is the last event before the move.
        (unexpected_file := configuration.tier("nvme").directory / ".gdrkit-tiers" / "kept" / "file").write_bytes(b"")
        with (
            manager.catalogue.write_transaction("lock"),
            run_command_in_background(configuration, "--watch=never") as run,
        ):
            run.wait_for_event("finding")
            # The move waits for the lock of the catalogue.
            assert run.stop() == {"event": "ended", "is_complete": False}
    unexpected_file.unlink()
    check_tiers(configuration, data_by_name)


def run_until_wait(
    configuration: Configuration,
    *,
    wait_count: int,
    on_wait: Callable[[float], None],
    **options: Any,  # noqa: ANN401 - arguments of BackgroundRun.
) -> tuple[list[str], str]:
    """Execute a background run until its `wait_count`-th wait. Return the names of its events, and its output."""
    wait_count_so_far = 0

    def count_wait(timeout_s: float) -> None:
        nonlocal wait_count_so_far
        wait_count_so_far += 1
        on_wait(timeout_s)
        if wait_count_so_far == wait_count:
            stop.set()

    stop, output = StopEventWithoutWaits(count_wait), io.StringIO()
    with TierManager(configuration) as manager:
        BackgroundRun(manager, stop=stop, output=RunOutput(output, as_json=True), **options).run()
    lines = output.getvalue().splitlines()
    return [json.loads(line)["event"] for line in lines], output.getvalue()


def make_quiet_settings(time_s: float, *, begin_offset_s: int, end_offset_s: int) -> RunSettings:
    """Return settings with quiet hours that begin and end at these offsets in seconds from `time_s`."""
    local_time = time.localtime(time_s)
    time_of_day_s = local_time.tm_hour * 3600 + local_time.tm_min * 60 + local_time.tm_sec
    quiet_hours = QuietHours((time_of_day_s + begin_offset_s) % DAY_S, (time_of_day_s + end_offset_s) % DAY_S)
    return RunSettings(quiet_hours=(quiet_hours,), interval_s=1800, watch="never")


def test_first_pass_waits_for_the_end_of_quiet_hours(configuration: Configuration) -> None:
    now_s, wait_lengths_s = FAKE_NOW_S, []

    def on_wait(timeout_s: float) -> None:
        nonlocal now_s
        wait_lengths_s.append(timeout_s)
        now_s += timeout_s

    settings = make_quiet_settings(now_s, begin_offset_s=-3600, end_offset_s=2400)
    event_names, _ = run_until_wait(
        replace(configuration, run=settings), wait_count=3, on_wait=on_wait, clock=lambda: now_s
    )
    # The run waits twice for the end of the quiet hours, and once for the next pass.
    assert wait_lengths_s == [1800, 600, 1800]
    assert event_names == ["ready", "passed"]


def test_begin_of_quiet_hours_undoes_a_migration(configuration: Configuration) -> None:
    now_s, phases = FAKE_NOW_S, []
    with TierManager(configuration) as manager:
        data = create_file(manager, "file", 9 * MIB, seed=1)
        manager.pin("file", "nvme")

    def observe(phase: Phase, _name: str, offset_bytes: int) -> None:
        nonlocal now_s
        phases.append(phase)
        # The quiet hours begin in the middle of the copy.
        if phase is Phase.COPY and offset_bytes and now_s == FAKE_NOW_S:
            now_s += 60

    def on_wait(timeout_s: float) -> None:
        nonlocal now_s
        # The first wait follows the interrupted copy, and the second wait follows the completed migration.
        assert phases[-1] is (Phase.COPY if now_s == FAKE_NOW_S + 60 else Phase.DONE)
        now_s += timeout_s

    configuration = replace(configuration, run=make_quiet_settings(now_s, begin_offset_s=60, end_offset_s=120))
    event_names, _ = run_until_wait(configuration, wait_count=2, on_wait=on_wait, clock=lambda: now_s, observe=observe)
    assert event_names == ["ready", "moved", "passed"]
    check_tiers(configuration, {"file": data})


@pytest.mark.parametrize("phase", [Phase.RECORD, Phase.RENAME, Phase.FOLDER, Phase.RETIRE, Phase.FORGET])
def test_stopped_migration_is_undone_or_completed(configuration: Configuration, phase: Phase) -> None:
    with TierManager(configuration) as manager:
        data_by_name = {name: create_file(manager, name, 4 * KIB, seed=1) for name in ("first", "second")}
        for name in data_by_name:
            manager.pin(name, "nvme")
    stop, output = threading.Event(), io.StringIO()

    def observe(current_phase: Phase, _name: str, _offset_bytes: int) -> None:
        if current_phase is phase:
            stop.set()

    settings = RunSettings(watch="never")
    with TierManager(replace(configuration, run=settings)) as manager:
        BackgroundRun(manager, stop=stop, output=RunOutput(output, as_json=True), observe=observe).run()
        moved_names = [name for name in data_by_name if manager.find(name).tier == "nvme"]
    # A stop before the rename undoes the first migration. A later stop completes it.
    assert len(moved_names) == (0 if phase in {Phase.RECORD, Phase.RENAME} else 1)
    check_tiers(configuration, data_by_name)


def test_failed_pass_does_not_end_the_run(tmp_path: Path) -> None:
    configuration = make_configuration(tmp_path, timeout_ms=0, run=RunSettings(watch="never"))
    with TierManager(configuration) as locking_manager, ExitStack() as lock_stack:
        create_file(locking_manager, "file", 4 * KIB, seed=1)
        locking_manager.pin("file", "nvme")
        lock_stack.enter_context(locking_manager.catalogue.write_transaction("lock"))
        event_names, output = run_until_wait(configuration, wait_count=2, on_wait=lambda _: lock_stack.close())
        assert event_names == ["ready", "failed", "moved", "passed"]
        assert "busy" in output


def test_pass_recovers_the_migration_of_a_killed_process(configuration: Configuration) -> None:
    copy_path = configuration.tier("nvme").directory / "file"
    copy_exists_at_wait: list[bool] = []
    with TierManager(configuration) as manager, MigrationProcess() as migration_process:
        data = create_file(manager, "file", 4 * KIB, seed=1)

        def on_wait(_: float) -> None:
            if not copy_exists_at_wait:
                migration_process.start(configuration, "file", "nvme", phase=Phase.RETIRE.value)
                assert migration_process.wait_for_exit_code() == -signal.SIGKILL
            copy_exists_at_wait.append(copy_path.exists())

        run_until_wait(replace(configuration, run=RunSettings(watch="never")), wait_count=2, on_wait=on_wait)
    # The killed migration left its copy, and the next pass removed the copy.
    assert copy_exists_at_wait == [True, False]
    check_tiers(configuration, {"file": data})


def test_second_run_of_the_same_tiers_is_refused(configuration: Configuration) -> None:
    errors: list[ApiError] = []

    def run_again(_: float) -> None:
        with pytest.raises(ApiError, match="another gdrkit tiers run moves the files") as error_info:
            run_until_wait(configuration, wait_count=1, on_wait=lambda _: None)
        errors.append(error_info.value)

    configuration = replace(configuration, run=RunSettings(watch="never"))
    run_until_wait(configuration, wait_count=1, on_wait=run_again)
    assert [error.reason for error in errors] == [Reason.BUSY]
    run_until_wait(configuration, wait_count=1, on_wait=lambda _: None)


def test_text_output_has_a_line_for_each_event(configuration: Configuration) -> None:
    with TierManager(configuration) as manager:
        for name in ("free", "in use"):
            create_file(manager, name, 4 * KIB, seed=1)
            manager.pin(name, "nvme")
    (configuration.tier("ssd").directory / ".gdrkit-tiers" / "kept" / "page").write_bytes(b"")
    output = io.StringIO()
    run_output = RunOutput(output, as_json=False)
    stop = StopEventWithoutWaits(lambda _: stop.set())
    with TierManager(replace(configuration, run=RunSettings(watch="never"))) as manager, manager.open("in use", "r+"):
        BackgroundRun(manager, stop=stop, output=run_output).run()
    run_output.report_lost_opens(3)
    run_output.report_end(is_complete=False)
    lines = output.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["ready", "kept/page"]
    assert lines[0] == f"ready: not counted in {', '.join(TIER_NAMES)}: not requested"
    assert "free: hdd -> nvme" in lines
    assert any(line.startswith("in use: stays in hdd: ") for line in lines)
    assert lines[-3:-1] == [
        "1 of 2 files moved, 1 not moved",
        "opens were too fast to be counted: the kernel has dropped reports 3 times",
    ]
    assert "the next gdrkit tiers command completes or undoes it" in lines[-1]


@needs(host.capability("CAP_SETUID"))
@pytest.mark.parametrize("watch_mode", ["preferred", "required"])
def test_run_without_privileges_says_what_is_not_counted(watch_mode: str) -> None:
    with folder_for_all_users() as root:
        configuration = make_configuration(root)
        for path in (root, *(tier.directory for tier in configuration.tiers)):
            path.chmod(0o777)
        command, environ = make_program_command(UNPRIVILEGED_RUN_PROGRAM, os.environ)
        command += [f"--tier={tier.name}={tier.directory}" for tier in configuration.tiers]
        command += [f"--catalogue={root / 'catalogue'}", f"--watch={watch_mode}", "--json"]
        with subprocess.Popen(
            command, env=environ, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            ready_line = process.stdout.readline()
            process.terminate()
            _, error_output = process.communicate(timeout=60)
        if watch_mode == "required":
            assert (process.returncode, ready_line) == (1, "")
            assert "Operation not permitted (EPERM)" in error_output
            assert "run as root" in error_output
        else:
            ready = json.loads(ready_line)
            assert (process.returncode, ready["watched"], set(ready["unwatched"])) == (0, [], set(TIER_NAMES))
            assert all("watch opens" in reason and "EPERM" in reason for reason in ready["unwatched"].values())
