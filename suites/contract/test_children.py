"""Waits for the end of children and threads are bounded, and name the child or thread that did not end."""

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

# This program starts another process, prints its process id and waits.
_PARENT_PROGRAM = """
import subprocess, sys, time
print(subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(100)
"""


def has_ended(process_id: int) -> bool:
    """Return whether the process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_kill_of_a_child_ends_its_process_group() -> None:
    child = subprocess.Popen([sys.executable, "-c", _PARENT_PROGRAM], stdout=subprocess.PIPE, process_group=0)
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
        # The signal of `kill_child` may need longer than its limit to end the process on a busy machine.
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
