"""An interrupt at any point of a call leaves no memory in use and no transfer in progress. The file can be closed."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gds.faulty_file import FaultyFile
from gds.interrupt_sweep import LENGTH_BYTES, SCENARIOS
from support import udev
from support.python_child import run_python, run_sweep

from gdrkit import gds
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, host, needs, software
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.units import KIB

if TYPE_CHECKING:
    from types import FrameType

# In these scenarios, reads are blocked until the call was interrupted. So a job that the call had queued still
# runs after the interrupt.
BLOCKED_SCENARIOS = ("read_files", "start_read_into", "start_readv", "transfer_ranges")
DIRECT_SCENARIOS = ("direct", "direct_close", "direct_first", "direct_result")
# A program whose daemon threads read files while the interpreter ends.
DAEMON_PROGRAM = """
import sys, threading, time
from gdrkit import gds
class SlowEnd:
    def __del__(self):
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            pass
slow_end = SlowEnd()  # The interpreter drops this object after it has begun to end the other threads.
file, start_barrier = gds.File(sys.argv[1], direct="never"), threading.Barrier(9)
def read():
    buffer = bytearray(4096)
    start_barrier.wait()
    while True:
        file.read_into(buffer)
for _ in range(8):
    threading.Thread(target=read, daemon=True).start()
start_barrier.wait()
threading.Event().wait(0.05)
"""
# The beginning of programs with an object that the interpreter drops after it has begun to end the daemon threads. At
# that time, the globals of the program are gone, so methods keep what they need in default arguments. The module
# `holder` in sys.modules keeps the object until then.
LATE_DROP_PRELUDE = """
import os, sys, threading, time, types
from gdrkit import gds
path, start_barrier = sys.argv[1], threading.Barrier(5)
def spin(seconds, now=time.monotonic):
    end_s = now() + seconds
    while now() < end_s:
        pass
holder = sys.modules["holder"] = types.ModuleType("holder")
def start_daemons(target):
    for _ in range(4):
        threading.Thread(target=target, daemon=True).start()
    start_barrier.wait()
    threading.Event().wait(0.05)
"""
# When the interpreter drops an object, the object closes a file that daemon threads read.
LATE_CLOSE_PROGRAM = f"""{LATE_DROP_PRELUDE}
class Closer:
    def __del__(self, spin=spin, write=os.write):
        spin(0.3)
        self.file.close()
        write(1, b"closed")
closer = Closer()
closer.file = file = gds.File(path, direct="never", access="buffered")
def read(file=file):
    buffer = bytearray(256 << 10)
    start_barrier.wait()
    while True:
        file.read_into(buffer)
start_daemons(read)
holder.closer = closer
del closer, file, read
"""
# The dropped object and a daemon thread close the same file, while another daemon thread uses the file.
TWO_CLOSES_PROGRAM = f"""{LATE_DROP_PRELUDE}
class Closer:
    def __del__(self, spin=spin, write=os.write):
        spin(0.3)
        self.file.close()
        write(1, b"closed")
closer, thread_indexes = Closer(), iter(range(4))
closer.file = file = gds.File(path, direct="never")
def use_or_close(file=file):
    thread_index = next(thread_indexes)
    if thread_index == 0:
        with file.hold_open():
            start_barrier.wait()
            threading.Event().wait()
    start_barrier.wait()
    if thread_index == 1:
        file.close()
start_daemons(use_or_close)
holder.closer = closer
del closer, file, use_or_close
"""
# Daemon threads close files, with many transfers in progress, so that the interpreter ends threads inside close().
DAEMON_CLOSE_PROGRAM = f"""{LATE_DROP_PRELUDE}
class SlowObject:
    def __del__(self, spin=spin):
        spin(0.5)
first_file = gds.File(path, direct="never")
transfers = [first_file.start_read_into(bytearray(64)) for _ in range(2000)]
sys.setswitchinterval(1e-5)
def close():
    start_barrier.wait()
    while True:
        gds.File(path, direct="never").close()
start_daemons(close)
holder.slow_object = SlowObject()
"""
# A program that drops a future. nanobind writes to standard error if an object of a native class outlives the
# interpreter.
DROPPED_FUTURE_PROGRAM = """
import sys
from gdrkit import gds
file = gds.File(sys.argv[1], direct="never")
file.start_read_into(bytearray(1 << 20), length_bytes=4096)
"""
# A worker waits for open(2), and holds the locks of a job and of its file. Meanwhile the program starts an empty read,
# and queries the progress of the job.
PROGRESS_PROGRAM = """
import sys, threading, time
from pathlib import Path
from gds.faulty_file import FaultyFile
from gdrkit import gds
mount = Path(sys.argv[1]) / "mount"
mount.mkdir()
length_bytes = 64 << 20
with FaultyFile(mount, length_bytes=length_bytes, seed=1) as faulty_file:
    with gds.File(faulty_file.path, access="direct", direct="never") as file:
        faulty_file.send("gate-opens")
        transfer = file.start_read_into(bytearray(length_bytes))
        faulty_file.expect_line("waiting")
        query_begun_event = threading.Event()
        def query():
            query_begun_event.set()
            file.start_read_into(bytearray(1), length_bytes=0)
            transfer.bytes_moved
        thread = threading.Thread(target=query)
        started_s = time.monotonic()
        thread.start()
        query_begun_event.wait()
        thread.join(0.2)
        # If a call held the GIL, this thread could continue only after the time limit of the gate.
        assert time.monotonic() - started_s < 30
        faulty_file.send("open")
        thread.join()
        assert transfer.result().bytes == length_bytes
print("done")
"""


def sweep_interrupts(scenario: str, *arguments: object, **environ: str) -> None:
    """Interrupt a call at every point, and check the state after each interrupt; see gds.interrupt_sweep."""
    run_sweep("gds.interrupt_sweep", scenario, *arguments, points_min=11, **environ)


@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - {*BLOCKED_SCENARIOS, *DIRECT_SCENARIOS}))
def test_interrupted_call_leaves_things_in_order(tmp_path: Path, scenario: str) -> None:
    (tmp_path / "data").write_bytes(bytes(range(256)) * (LENGTH_BYTES // 256))
    sweep_interrupts(scenario, tmp_path / "data")


@needs(host.fuse)
@pytest.mark.parametrize("scenario", BLOCKED_SCENARIOS)
def test_interrupted_start_leaves_memory_to_its_job(tmp_path: Path, scenario: str) -> None:
    (tmp_path / "mount").mkdir()
    sweep_interrupts(scenario, "-", tmp_path / "mount")


@needs(host.fuse)
@pytest.mark.parametrize("call", ["close", "result"])
def test_ctrl_c_ends_the_wait_for_a_transfer(tmp_path: Path, seed: int, call: str) -> None:
    (tmp_path / "mount").mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty_file:
        faulty_file.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty_file.path) as file:
            transfer = file.start_read_into(bytearray(4 * KIB))
            faulty_file.expect_line("waiting")
            main_thread = threading.get_ident()
            handled_event = threading.Event()

            def handle_signal(signal_number: int, frame: FrameType | None) -> None:
                # A second signal may arrive before the case has handled the first signal. The second signal must
                # interrupt nothing.
                if not handled_event.is_set():
                    handled_event.set()
                    signal.default_int_handler(signal_number, frame)

            def interrupt() -> None:
                while not handled_event.wait(0.1):
                    signal.pthread_kill(main_thread, signal.SIGINT)

            # If the signal does not interrupt the call, the gate opens after 10 s, and the case fails.
            gate_timer = threading.Timer(10.0, faulty_file.send, ["open"])
            interrupting_thread = threading.Thread(target=interrupt)
            previous_handler = signal.signal(signal.SIGINT, handle_signal)
            gate_timer.start()
            interrupting_thread.start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    file.close() if call == "close" else transfer.result()
            finally:
                handled_event.set()
                interrupting_thread.join()
                signal.signal(signal.SIGINT, previous_handler)
            assert gate_timer.is_alive()
            gate_timer.cancel()
            assert not transfer.done()
            assert not file.closed
            faulty_file.send("open")
            assert transfer.result().bytes == 4 * KIB
    assert file.closed


def test_daemon_threads_do_not_abort_the_exit(tmp_path: Path) -> None:
    """In an older version, the process aborted when the interpreter ended a thread that returned from native code."""
    (tmp_path / "data").write_bytes(bytes(4 * KIB))
    for _ in range(3):
        completed = run_python("-c", DAEMON_PROGRAM, tmp_path / "data")
        assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize(
    ("program", "expected_output"),
    [
        (LATE_CLOSE_PROGRAM, "closed"),
        (TWO_CLOSES_PROGRAM, "closed"),
        (DAEMON_CLOSE_PROGRAM, ""),
        (DROPPED_FUTURE_PROGRAM, ""),
    ],
    ids=["late_close", "two_closes", "daemons_close", "dropped_future"],
)
def test_program_ends_in_order(tmp_path: Path, program: str, expected_output: str) -> None:
    """In older versions, such a program hung, died of SIGSEGV or reported leaked instances."""
    (tmp_path / "data").write_bytes(bytes(256 * KIB))
    completed = run_python("-W", "ignore", "-c", program, tmp_path / "data")
    assert (completed.returncode, completed.stdout) == (0, expected_output), completed.stderr
    assert "nanobind" not in completed.stderr


@needs(host.fuse)
def test_progress_does_not_stop_the_interpreter(tmp_path: Path) -> None:
    """In an older version, a call held the GIL and waited for a worker, which waited for another Python thread."""
    completed = run_python("-c", PROGRESS_PROGRAM, tmp_path)
    assert (completed.returncode, completed.stdout) == (0, "done\n"), completed.stderr


@needs(cuda.device(), cufile.driver, software(Api.CUFILE), cufile.udev_present)
@pytest.mark.parametrize("scenario", DIRECT_SCENARIOS)
def test_interrupted_direct_call_leaves_things_in_order(tmp_path: Path, scenario: str) -> None:
    (tmp_path / "plan").write_text("gdrkit-faults 1\ncufile.route call=* route=p2p\n")
    with tempfile.TemporaryDirectory(prefix="gdrkit-gds-", dir=DISK_FOLDER) as folder, udev.provide_entry(Path(folder)):
        (Path(folder) / "data").write_bytes(bytes(LENGTH_BYTES))
        sweep_interrupts(
            scenario,
            Path(folder) / "data",
            GDRKIT_TWINS_FAULTS=str(tmp_path / "plan"),
            GDRKIT_TWINS_UDEV="0",
            CUFILE_LOGFILE_PATH=str(tmp_path / "cufile.log"),
        )
