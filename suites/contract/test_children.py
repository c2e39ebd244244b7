"""Waits for the end of children and threads are bounded. An error names the child or thread that did not end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.processes import wait_until
from support.tracer import trace_process

from gdrkit import children
from gdrkit.errors import BrokenResource, Reason

# This program starts another process, prints the process ID of that process, and waits.
_START_CHILD_PROGRAM = """
import subprocess, sys, time
print(subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(100)
"""
# This program prints its descriptors, whether it leads a session, and its standard input.
_PRINT_DESCRIPTORS_PROGRAM = """
import os, sys
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd")), os.getsid(0) == os.getpid(), sys.stdin.read())
sys.exit(3)
"""


def has_ended(process_id: int) -> bool:
    """Return whether the process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_kill_of_a_child_ends_its_process_group() -> None:
    child = subprocess.Popen([sys.executable, "-c", _START_CHILD_PROGRAM], stdout=subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    grandchild_pid = int(child.stdout.readline())
    child.stdout.close()
    assert children.kill_child(child) == ""
    assert child.returncode == -9
    deadline_s = time.monotonic() + 20
    while not has_ended(grandchild_pid):
        assert time.monotonic() < deadline_s
        os.sched_yield()
    assert children.kill_child(child) == ""


@pytest.mark.parametrize("leads_group", [False, True])
def test_child_that_outlives_sigkill_is_abandoned(*, leads_group: bool) -> None:
    child = subprocess.Popen(["sleep", "100"], process_group=0 if leads_group else None)
    with trace_process(child.pid):
        # On a busy machine, SIGKILL may take longer to end the process than `kill_child` waits. So the case sends
        # SIGKILL first.
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: has_ended(child.pid), "the child has the state Z")
        started_s = time.monotonic()
        message = children.kill_child(child, leads_group=leads_group, timeout_s=0.5)
        assert re.fullmatch(
            rf"process {child.pid} did not end within 0.5 s of SIGKILL \(state Z\) and was left behind", message
        )
        # The next call does not wait again for an abandoned child.
        assert children.kill_child(child, leads_group=leads_group, timeout_s=60)
        assert time.monotonic() - started_s < 20
    assert child.wait(20) == -9
    assert children.kill_child(child, leads_group=leads_group) == ""


def test_spawned_child_inherits_no_descriptors(tmp_path: Path) -> None:
    inherited_fd = os.dup(0)
    os.set_inheritable(inherited_fd, True)  # noqa: FBT003 - the function takes no keyword arguments.
    child, output_path = children.SpawnedChild(), tmp_path / "output"
    command = [sys.executable, "-c", _PRINT_DESCRIPTORS_PROGRAM]
    child.start(command, os.environ, output_path=str(output_path), error_output_path=str(tmp_path / "error_output"))
    os.close(inherited_fd)
    assert child.wait(60) == child.returncode == 3
    # Descriptor 3 is the folder /proc/self/fd, which the child has open while it lists the folder.
    assert output_path.read_text() == "[0, 1, 2, 3] True \n"
    assert child.end() == ""


def test_spawned_child_ends_with_its_process_group(tmp_path: Path) -> None:
    child, output_path = children.SpawnedChild(), tmp_path / "output"
    command = [sys.executable, "-c", _START_CHILD_PROGRAM]
    child.start(command, os.environ, output_path=str(output_path), error_output_path=str(tmp_path / "error_output"))
    wait_until(lambda: output_path.read_text().endswith("\n"), "the child has started its child")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0)
    assert child.end() == ""
    assert child.returncode == -9
    wait_until(lambda: has_ended(int(output_path.read_text())), "the child of the child has ended")


def test_spawned_child_ends_while_sigchld_is_ignored(tmp_path: Path) -> None:
    previous_handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = children.SpawnedChild()
        output_paths = {"output_path": str(tmp_path / "output"), "error_output_path": str(tmp_path / "error_output")}
        child.start(["/bin/true"], {}, **output_paths)
        assert child.wait(60) == 0
    finally:
        signal.signal(signal.SIGCHLD, previous_handler)


def test_threads_share_one_deadline_and_are_named() -> None:
    release_event = threading.Event()
    threads = [threading.Thread(target=release_event.wait, args=(60,), name=f"waits {index}") for index in range(3)]
    for thread in threads:
        thread.start()
    try:
        started_s = time.monotonic()
        with pytest.raises(BrokenResource, match=r"within 0\.5 s: waits 0, waits 1, waits 2") as error_info:
            children.join_threads(threads, timeout_s=0.5)
        assert error_info.value.reason is Reason.TIMEOUT
        assert time.monotonic() - started_s < 10
    finally:
        release_event.set()
    children.join_threads(threads, timeout_s=30)
