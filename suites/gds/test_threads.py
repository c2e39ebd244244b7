"""Files that many threads use, and forks during transfers: no transfer is lost, and no lock stays held."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from gds.faulty_file import FaultyFile
from support.processes import wait_until

from gdrkit import gds, pattern
from gdrkit.errors import ClosedResource
from gdrkit.harness.needs import cuda, host, needs, software
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path

THREADS = 8
STARTS = 30  # Per thread. The transfers of all threads fit into the queue of an engine.
# A thread holds a lock of gds during a slow call of the driver, and the process forks at that time.
FORKING = """
import os, sys, threading, time, warnings
from gdrkit import gds
from gdrkit.gds import cufile_path, engine
warnings.simplefilter("ignore")
lock = {"engine": engine, "cufile": cufile_path}[sys.argv[1]]._lock
start, end = {
    "engine": (lambda: gds.engine_for(0), gds.close_engines),
    "cufile": (cufile_path._open_driver, gds.close_driver),
}[sys.argv[1]]
thread = threading.Thread(target=start)
thread.start()
while not lock.locked():
    assert thread.is_alive()
child = os.fork()
if child == 0:
    end()
    os._exit(7)
limit = time.monotonic() + 30
while True:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    if time.monotonic() > limit:
        os.kill(child, 9)
        os.waitpid(child, 0)
        sys.exit("the child waits for a lock that no thread of it will release")
thread.join()
end()
sys.exit(0 if os.waitstatus_to_exitcode(status) == 7 else f"the child ended with {status}")
"""


def is_refused(file: gds.File) -> bool:
    """Return whether a start is refused, which is the case after close() has begun."""
    try:
        file.start_read_into(bytearray(0))
    except ClosedResource:
        return True
    return False


@needs(host.fuse)
def test_close_waits_for_the_transfers_of_all_threads(tmp_path: Path, seed: int) -> None:
    """Issue 15, B: of two concurrent starts, one was not recorded, and close() did not wait for it."""
    (tmp_path / "mount").mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty:
        faulty.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty.path) as file, ThreadPoolExecutor(THREADS) as threads:

            def start() -> list[bytearray]:
                buffers = [bytearray(4 * KIB) for _ in range(STARTS)]
                for each in buffers:
                    file.start_read_into(each)
                return buffers

            started = [threads.submit(start) for _ in range(THREADS)]
            buffers = [buffer for each in started for buffer in each.result()]
            faulty.expect_line("waiting")
            faulty.send("open")
    for each in buffers:
        assert each == pattern.payload(4 * KIB, seed=seed)
        each.append(0)  # BufferError: a transfer still holds it.


@needs(host.fuse)
def test_close_waits_for_a_read_and_refuses_new_ones(tmp_path: Path, seed: int) -> None:
    (tmp_path / "mount").mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty, ThreadPoolExecutor(2) as threads:
        faulty.send(f"gate 0 {4 * KIB}")
        file, buffer = gds.File(faulty.path), bytearray(4 * KIB)
        # A short read on its own thread, which is not in the set of the file's transfers.
        reading = threads.submit(file.read_into, buffer)
        faulty.expect_line("waiting")
        closing = threads.submit(file.close)
        wait_until(lambda: is_refused(file), "close to begin")
        assert not closing.done()
        faulty.send("open")
        assert reading.result(60).bytes == len(buffer)
        closing.result(60)
    assert file.closed
    assert buffer == pattern.payload(4 * KIB, seed=seed)


@needs(host.fuse)
def test_start_time_does_not_grow_with_running_transfers(tmp_path: Path, seed: int) -> None:
    """Issue 15, B: each start polled every running transfer, under one lock."""
    (tmp_path / "mount").mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty:
        faulty.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty.path) as file:
            durations_ns = []
            for _ in range(240):
                buffer = bytearray(KIB)
                began = time.thread_time_ns()
                file.start_read_into(buffer)
                durations_ns.append(time.thread_time_ns() - began)
            faulty.expect_line("waiting")
            faulty.send("open")
    few, many = statistics.median(durations_ns[10:40]), statistics.median(durations_ns[-30:])
    assert many < 3 * few, f"{few} ns with 10 to 40 running transfers, {many} ns with 210 to 240"


def test_dropped_futures_are_settled_by_later_transfers(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * KIB))
    with gds.File(path) as file:
        buffers = [bytearray(64 * KIB) for _ in range(20)]
        pending = [file.start_read_into(each) for each in buffers]
        while not all(each.done() for each in pending):
            pass
        for _ in range(len(buffers)):
            file.start_read_into(bytearray(1)).result()
        for each in buffers:
            each.append(0)  # BufferError: the memory was not released.


@needs(cuda.device(), software("cuda"), software("cufile"))
@pytest.mark.parametrize("module", ["engine", "cufile"])
def test_fork_during_an_open_leaves_no_lock_held(tmp_path: Path, module: str) -> None:
    call = {"engine": "cuDevicePrimaryCtxRetain", "cufile": "cuFileDriverOpen"}[module]
    plan = tmp_path / "plan"
    plan.write_text(f"gdrkit-faults 1\n{call} call=1 delay_us=3000000\n")
    done = subprocess.run(
        [sys.executable, "-c", FORKING, module],
        env={**os.environ, "GDRKIT_TWINS_FAULTS": str(plan)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
