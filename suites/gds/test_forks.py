"""A forked child of a process with open files and running transfers: its calls end, and its parent loses nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.python_child import suites_environ

from gdrkit.harness.needs import host, needs

if TYPE_CHECKING:
    from pathlib import Path

# A program that forks while a read is blocked (gds.faulty_file). One of FORK_STEPS replaces the line FORK_STEP. A step
# forks by `for _ in run_in_child():`. Only the child runs the block of this statement, and the child must end.
BLOCKED_READ_PROGRAM = """
import asyncio, os, sys, threading, time
from pathlib import Path
from gds.faulty_file import FaultyFile
from gdrkit import gds
from gdrkit.errors import UsageError
mount, other_path = Path(sys.argv[1]) / "mount", Path(sys.argv[1]) / "other_file"
mount.mkdir()
other_path.write_bytes(b"data")
length_bytes = 4096
def run_in_child():
    child_pid = os.fork()
    if child_pid == 0:
        try:
            yield
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline_s = time.monotonic() + 20
    while True:
        ended_pid, status = os.waitpid(child_pid, os.WNOHANG)
        if ended_pid:
            break
        if time.monotonic() > deadline_s:
            os.kill(child_pid, 9)
            os.waitpid(child_pid, 0)
            sys.exit("the child does not end")
    if status:
        sys.exit(f"the child ended with {os.waitstatus_to_exitcode(status)}")
with FaultyFile(mount, length_bytes=length_bytes, seed=1) as faulty_file:
    faulty_file.send(f"gate 0 {length_bytes}")
    file, memory = gds.File(faulty_file.path, direct="never"), bytearray(length_bytes)
    transfer = file.start_read_into(memory)
    faulty_file.expect_line("waiting")
    waiting_thread = threading.Thread(target=transfer.result)
    waiting_thread.start()
    FORK_STEP
    faulty_file.send("open")
    waiting_thread.join()
    assert transfer.result().bytes == length_bytes
    file.close()
print("done")
"""
FORK_STEPS = {
    "close": """
    for _ in run_in_child():
        descriptor_count_before = len(os.listdir("/proc/self/fd"))
        file.close()
        assert len(os.listdir("/proc/self/fd")) < descriptor_count_before
    """,
    "read": """
    for _ in run_in_child():
        with gds.File(other_path, direct="never") as other_file:
            assert other_file.start_read_into(bytearray(4)).result().bytes == 4
        gds.close_engines()
    """,
    "engine_of_the_parent": """
    engine = gds.Engine()
    for _ in run_in_child():
        with gds.File(other_path, direct="never") as other_file, other_file.hold_open() as native_file:
            buffer = gds.describe_buffer(bytearray(4), writable=True)
            extents = [0, 0, buffer.address, 4]  # index of the file, offset in the file, address, length
            job = engine.submit(write=False, device_index=gds.HOST, files=[native_file], extents=extents)
            assert job.wait(10_000_000)  # The timeout is in microseconds.
        engine.close()
    engine.close()
    """,
    "result": """
    for _ in run_in_child():
        try:
            transfer.result()
        except UsageError as error:
            assert "before the fork" in str(error)
        else:
            raise AssertionError
    """,
}
# A program whose child uses a file that the parent had closed before the fork.
CLOSED_PROGRAM = """
import os, sys
from gdrkit import gds
from gdrkit.errors import ClosedResource
file = gds.File(sys.argv[1], direct="never")
file.close()
child_pid = os.fork()
if child_pid == 0:
    try:
        assert file.closed
        file.start_read_into(bytearray(4), length_bytes=4)
    except ClosedResource:
        os._exit(0)
    finally:
        os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]))
"""
# A program whose signal handler forks during close(). The close waits, because another thread uses the file.
HANDLER_PROGRAM = """
import os, signal, sys, threading, time
from gdrkit import gds
file = gds.File(sys.argv[1], direct="never")
use_begun_event, end_use_event, child_pids, parent_pid = threading.Event(), threading.Event(), [], os.getpid()
def use():
    with file.hold_open():
        use_begun_event.set()
        end_use_event.wait()
thread = threading.Thread(target=use)
thread.start()
use_begun_event.wait()
def handle(*_):
    child_pids.append(os.fork())
    if os.getpid() == parent_pid:
        end_use_event.set()
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.1)
file.close()
assert file.closed
if os.getpid() != parent_pid:
    os._exit(0)
thread.join()
deadline_s = time.monotonic() + 20
while True:
    ended_pid, status = os.waitpid(child_pids[0], os.WNOHANG)
    if ended_pid:
        sys.exit(os.waitstatus_to_exitcode(status))
    if time.monotonic() > deadline_s:
        os.kill(child_pids[0], 9)
        sys.exit("the child does not end")
"""
# A program whose child deletes its copy of a completion queue, which still has the notification about a job that ended.
EVENT_PROGRAM = """
import os
from gdrkit.gds._native import native
queue = native.CompletionQueue(has_event=True)
job = native.Completion()
job.notify(queue, 1)
job.end()
child_pid = os.fork()
if child_pid == 0:
    del queue
    os._exit(0)
os.waitpid(child_pid, 0)
import select
poll = select.poll()
poll.register(queue.fileno(), select.POLLIN)
assert poll.poll(0), "the child has taken the event"
assert queue.take() == [1]
"""


def run_program(program: str, *arguments: object) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=suites_environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert completed.returncode == 0, completed.stderr


@needs(host.fuse)
@pytest.mark.parametrize("step_name", FORK_STEPS)
def test_child_of_a_process_with_a_running_transfer(tmp_path: Path, step_name: str) -> None:
    run_program(BLOCKED_READ_PROGRAM.replace("    FORK_STEP\n", FORK_STEPS[step_name].strip(" ")), tmp_path)


def test_child_leaves_the_event_of_its_parent() -> None:
    """In an older version, the child read the eventfd, and the event loop of the parent did not wake."""
    run_program(EVENT_PROGRAM)


@pytest.mark.parametrize("program", [CLOSED_PROGRAM, HANDLER_PROGRAM], ids=["closed_before", "closed_during_the_fork"])
def test_closed_file_is_closed_in_the_child(tmp_path: Path, program: str) -> None:
    (tmp_path / "data").write_bytes(b"data")
    run_program(program, tmp_path / "data")
