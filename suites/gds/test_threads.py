"""Files that many threads use, and forks while a lock is held: no transfer is lost, and no lock stays held."""

from __future__ import annotations

import contextlib
import errno
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
from gdrkit.errors import ApiError, ClosedResource
from gdrkit.gds import EngineOptions
from gdrkit.harness.needs import cuda, host, needs, software
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from gdrkit.cuda import Device

THREAD_COUNT = 8
# With this number, the transfers of all threads fit into the queue of an engine.
STARTS_PER_THREAD = 30
# A program that forks while one of its threads holds a lock of gdrkit.gds, during a slow call of the CUDA driver
# or of cuFile.
FORKING_PROGRAM = """
import os, sys, threading, time, warnings
from gdrkit import gds
from gdrkit.gds import cufile_driver, engine
warnings.simplefilter("ignore")
lock = {"engine": engine._engines_lock, "cufile": cufile_driver._drivers_lock}[sys.argv[1]]
open_resource, close_resource = {
    "engine": (lambda: gds.engine_for(0), gds.close_engines),
    "cufile": (cufile_driver.shared_driver, gds.close_driver),
}[sys.argv[1]]
thread = threading.Thread(target=open_resource)
thread.start()
while not lock.locked():
    assert thread.is_alive()
child_pid = os.fork()
if child_pid == 0:
    close_resource()
    os._exit(7)
deadline_s = time.monotonic() + 30
while True:
    ended_pid, status = os.waitpid(child_pid, os.WNOHANG)
    if ended_pid:
        break
    if time.monotonic() > deadline_s:
        os.kill(child_pid, 9)
        os.waitpid(child_pid, 0)
        sys.exit("the child waits for a lock that none of its threads will release")
thread.join()
close_resource()
sys.exit(0 if os.waitstatus_to_exitcode(status) == 7 else f"the child ended with {status}")
"""


# A program whose buffer starts a transfer when it is freed. The time limit ends the program if the transfer
# waits for its own thread.
FINALIZER_PROGRAM = """
import faulthandler, sys
from gdrkit import gds
faulthandler.dump_traceback_later(20, exit=True)
class Memory(bytearray):
    def __del__(self):
        started_transfers.append(file.start_read_into(second_buffer))
started_transfers, second_buffer = [], bytearray(4)
with gds.File(sys.argv[1], direct="never") as file:
    transfers = [file.start_read_into(Memory(4)) for _ in range(3)]
    for transfer in transfers:
        transfer.result()
    assert len(started_transfers) == 3
print(second_buffer)
"""


def refuses_transfers(file: gds.File) -> bool:
    """Return whether the file refuses a new transfer, as it does after close() has begun."""
    try:
        file.start_read_into(bytearray(0))
    except ClosedResource:
        return True
    return False


def start_interrupted_read(file: gds.File, buffer: bytearray) -> None:
    """Start a read. When the engine has accepted the job, a KeyboardInterrupt ends the call."""

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        if event == "return" and frame.f_code is gds.Engine.submit.__code__:
            raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        file.start_read_into(buffer)
    finally:
        sys.setprofile(None)


@needs(host.fuse)
def test_close_waits_for_the_transfers_of_all_threads(tmp_path: Path, seed: int) -> None:
    """In an older version, close() did not wait for one of two transfers that were started at the same time."""
    (tmp_path / "mount").mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty_file:
        faulty_file.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty_file.path) as file, ThreadPoolExecutor(THREAD_COUNT) as pool:

            def start_reads() -> list[bytearray]:
                buffers = [bytearray(4 * KIB) for _ in range(STARTS_PER_THREAD)]
                for buffer in buffers:
                    file.start_read_into(buffer)
                return buffers

            futures = [pool.submit(start_reads) for _ in range(THREAD_COUNT)]
            buffers = [buffer for future in futures for buffer in future.result()]
            faulty_file.expect_line("waiting")
            faulty_file.send("open")
    for buffer in buffers:
        assert buffer == pattern.payload(4 * KIB, seed=seed)
        # This would raise BufferError if a transfer still held the buffer.
        buffer.append(0)


@needs(host.fuse)
def test_close_waits_for_a_read_and_refuses_new_ones(tmp_path: Path, seed: int) -> None:
    (tmp_path / "mount").mkdir()
    with (
        FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty_file,
        ThreadPoolExecutor(2) as pool,
    ):
        faulty_file.send(f"gate 0 {4 * KIB}")
        file, buffer = gds.File(faulty_file.path), bytearray(4 * KIB)
        # The calling thread executes this short read without the engine, so the file does not record it as a transfer.
        read_future = pool.submit(file.read_into, buffer)
        faulty_file.expect_line("waiting")
        close_future = pool.submit(file.close)
        wait_until(lambda: refuses_transfers(file), "close to begin")
        assert not close_future.done()
        faulty_file.send("open")
        assert read_future.result(60).bytes == len(buffer)
        close_future.result(60)
    assert file.closed
    assert buffer == pattern.payload(4 * KIB, seed=seed)


@needs(host.fuse)
def test_start_time_does_not_grow_with_running_transfers(tmp_path: Path, seed: int) -> None:
    """In an older version, each start polled every running transfer, under one lock."""
    (tmp_path / "mount").mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty_file:
        faulty_file.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty_file.path) as file:
            durations_ns = []
            for _ in range(240):
                buffer = bytearray(KIB)
                start_ns = time.thread_time_ns()
                file.start_read_into(buffer)
                durations_ns.append(time.thread_time_ns() - start_ns)
            faulty_file.expect_line("waiting")
            faulty_file.send("open")
    start_ns_with_few = statistics.median(durations_ns[10:40])
    start_ns_with_many = statistics.median(durations_ns[-30:])
    assert start_ns_with_many < 3 * start_ns_with_few, (
        f"{start_ns_with_few} ns with 10 to 40 running transfers, {start_ns_with_many} ns with 210 to 240"
    )


@needs(cuda.device(count_min=2), host.fuse)
def test_device_does_not_wait_for_threads_of_another(tmp_path: Path, devices: tuple[Device, ...], seed: int) -> None:
    """In an older version, the devices of a NUMA node shared the threads of one engine."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "data").write_bytes(pattern.payload(4 * KIB, seed=seed))
    with contextlib.ExitStack() as stack:
        memories = [stack.enter_context(devices[0].allocate(4 * KIB)) for _ in range(EngineOptions().threads_count())]
        other_memory = stack.enter_context(devices[1].allocate(4 * KIB))
        faulty_file = stack.enter_context(FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed))
        faulty_file.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty_file.path, direct="never") as file:
            blocked_transfers = [file.start_read_into(memory) for memory in memories]
            faulty_file.expect_line("waiting")
            try:
                with gds.File(tmp_path / "data", direct="never") as other_file:
                    other_file.start_read_into(other_memory).result(60)
                assert not any(transfer.done() for transfer in blocked_transfers)
            finally:
                faulty_file.send("open")
        pattern.check(other_memory.read(), seed=seed)


def test_dropped_futures_are_settled_by_later_transfers(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * KIB))
    with gds.File(path) as file:
        buffers = [bytearray(64 * KIB) for _ in range(20)]
        transfers = [file.start_read_into(buffer) for buffer in buffers]
        while not all(transfer.done() for transfer in transfers):
            pass
        # The case does not call result() of these transfers. Later transfers must release their buffers.
        for _ in range(len(buffers)):
            file.start_read_into(bytearray(1)).result()
        for buffer in buffers:
            # This would raise BufferError if a transfer still held the buffer.
            buffer.append(0)


def test_dropped_future_counts_and_lasts_until_its_last_byte(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(64 * KIB))
    with gds.File(tmp_path / "data", direct="never") as file:
        transfer_count_before, transferred_bytes_before = gds.transfer_totals().get(gds.Route.ENGINE, (0, 0))
        start_s = time.monotonic()
        transfer = file.start_read_into(bytearray(64 * KIB))
        wait_until(transfer.done, "the transfer to end")
        end_s = time.monotonic()
        assert gds.transfer_totals()[gds.Route.ENGINE] == (
            transfer_count_before + 1,
            transferred_bytes_before + 64 * KIB,
        )
        # The duration must end with the last byte, not with the call of result().
        wait_until(lambda: time.monotonic() > end_s + 0.02, "some time after the end")
        assert 0 < transfer.result().duration_s <= end_s - start_s
        assert gds.transfer_totals()[gds.Route.ENGINE].transfers_count == transfer_count_before + 1


@needs(host.fuse)
def test_interrupted_start_keeps_the_memory_of_its_job(tmp_path: Path, seed: int) -> None:
    """In an older version, an interrupt after the submission released the memory, to which the engine then wrote."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "other").write_bytes(b"data")
    buffer = bytearray(4 * KIB)
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty_file:
        faulty_file.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty_file.path) as file:
            with pytest.raises(KeyboardInterrupt):
                start_interrupted_read(file, buffer)
            faulty_file.expect_line("waiting")
            with pytest.raises(BufferError):
                buffer.append(0)
            faulty_file.send("open")
        assert buffer == pattern.payload(4 * KIB, seed=seed)  # The close of the file waited for the job.
    with gds.File(tmp_path / "other") as file:
        file.start_read_into(bytearray(4)).result()
    # After a later transfer, the memory is no longer in use.
    buffer.append(0)


@pytest.mark.timeout(30)
def test_file_of_a_refused_job_can_be_closed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    engine = gds.Engine()
    engine.close()
    with gds.File(tmp_path / "data", direct="never") as file, file.hold_open() as native_file:
        with pytest.raises(ApiError) as error_info:
            engine.submit(write=False, device_index=gds.HOST, files=[native_file], extents=[0, 0, 0, 4])
        assert error_info.value.errno == errno.ESHUTDOWN
    assert file.closed


def test_finalizer_of_a_buffer_may_start_a_transfer(tmp_path: Path) -> None:
    """In an older version, the release of the buffer held a lock that the new transfer waited for."""
    (tmp_path / "data").write_bytes(b"data")
    completed = subprocess.run(
        [sys.executable, "-c", FINALIZER_PROGRAM, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "bytearray(b'data')\n", "")


@needs(cuda.device(), software("cuda"), software("cufile"))
@pytest.mark.parametrize("locked_module", ["engine", "cufile"])
def test_fork_during_an_open_leaves_no_lock_held(tmp_path: Path, locked_module: str) -> None:
    delayed_call = {"engine": "cuDevicePrimaryCtxRetain", "cufile": "cuFileDriverOpen"}[locked_module]
    plan_path = tmp_path / "plan"
    plan_path.write_text(f"gdrkit-faults 1\n{delayed_call} call=1 delay_us=3000000\n")
    completed = subprocess.run(
        [sys.executable, "-c", FORKING_PROGRAM, locked_module],
        env={**os.environ, "GDRKIT_TWINS_FAULTS": str(plan_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert completed.returncode == 0, completed.stderr
