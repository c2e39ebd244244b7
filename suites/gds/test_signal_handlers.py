"""Signal handlers that use the file or the engine of the call that they interrupt: every call ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from gds.handler_sweep import CALLS
from gds.interrupt_sweep import LENGTH_BYTES
from support import udev
from support.python_child import run_python, run_sweep

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, host, needs, software
from gdrkit.harness.needs.cufile import DISK_FOLDER

# handle_inside() installs a signal handler. A signal may come too early, so the handler calls `act` only if it
# interrupts the function with this name in this module.
HANDLE_INSIDE = """
import signal
def handle_inside(function_and_module, act):
    def handle(_signal, frame):
        while frame is not None and (frame.f_code.co_name, frame.f_globals["__name__"]) != function_and_module:
            frame = frame.f_back
        if frame is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            act()
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
"""
# A program whose signal handler closes the file that the main thread is closing. The close in the main thread waits,
# because another thread uses the file.
NESTED_CLOSE_PROGRAM = f"""{HANDLE_INSIDE}
import errno, faulthandler, sys, threading
from gdrkit import gds
from gdrkit.errors import ApiError, ClosedResource, Reason
faulthandler.dump_traceback_later(20, exit=True)
file = gds.File(sys.argv[1], direct="never")
use_begun_event, end_use_event, errors = threading.Event(), threading.Event(), []
def use():
    with file.hold_open():
        use_begun_event.set()
        end_use_event.wait()
thread = threading.Thread(target=use)
thread.start()
use_begun_event.wait()
def close():
    try:
        with file.hold_open():  # The native close has not begun yet: try again later.
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        return
    except ClosedResource:
        pass
    try:
        file.close()
    except ApiError as error:
        errors.append(error)
    end_use_event.set()
handle_inside(("close", "gdrkit.gds.opening"), close)
file.close()
thread.join()
(error,) = errors
assert error.errno == errno.EDEADLK and error.reason is Reason.BUSY and error.arguments["path"] == sys.argv[1]
assert "signal handler" in str(error) and isinstance(error, OSError) and file.closed
print("done")
"""
# The beginning of programs with a transfer that is in progress until the file system gets the command `open`.
BLOCKED_TRANSFER_PRELUDE = f"""{HANDLE_INSIDE}
import faulthandler, os, sys
from pathlib import Path
from gds.faulty_file import FaultyFile
from gdrkit import gds
faulthandler.dump_traceback_later(40, exit=True)
faulty_file = FaultyFile(Path(sys.argv[1]), length_bytes=4096, seed=1).__enter__()
faulty_file.send("gate 0 4096")
file, memory = gds.File(faulty_file.path, direct="never"), bytearray(4096)
def start_job(engine):
    with file.hold_open() as native_file:
        buffer = gds.describe_buffer(memory, writable=True)
        extents = [0, 0, buffer.address, 4096]  # index of the file, offset in the file, address, length
        return engine.submit(write=False, device_index=gds.HOST, files=[native_file], extents=extents)
def interrupt():
    raise KeyboardInterrupt
engine_close = ("close", "gdrkit.gds.engine")
"""
# Ctrl-C ends the wait of Engine.close(), and the engine takes further jobs.
ENGINE_CLOSE_PROGRAM = f"""{BLOCKED_TRANSFER_PRELUDE}
engine = gds.Engine()
jobs = [start_job(engine)]
faulty_file.expect_line("waiting")
handle_inside(engine_close, interrupt)
try:
    engine.close()
except KeyboardInterrupt:
    assert not engine.closed and not jobs[0].is_over()
    jobs.append(start_job(engine))
faulty_file.send("open")
engine.close()
assert len(jobs) == 2 and all(job.is_over() for job in jobs) and engine.closed
file.close()
faulty_file.__exit__()
print("done")
"""
# Ctrl-C ends the wait of close_engines(). Later transfers use another engine, and the next call of
# close_engines() closes both engines.
CLOSE_ENGINES_PROGRAM = f"""{BLOCKED_TRANSFER_PRELUDE}
from gdrkit.handles import live
transfer = file.start_read_into(memory)
faulty_file.expect_line("waiting")
handle_inside(engine_close, interrupt)
try:
    gds.close_engines()
except KeyboardInterrupt:
    assert not transfer.done()
    with gds.File(sys.executable, direct="never") as other_file:
        assert other_file.start_read_into(bytearray(4096)).result().bytes == 4096
    assert live()["gds.engine"] == 2
faulty_file.send("open")
gds.close_engines()
assert transfer.done() and "gds.engine" not in live()
file.close()
faulty_file.__exit__()
print("done")
"""
# A signal handler forks while close_engines() waits. The child closes its copy of the engine at once, and exits with
# code 7.
HANDLER_FORK_PROGRAM = f"""{BLOCKED_TRANSFER_PRELUDE}
parent_pid, child_pids = os.getpid(), []
def fork():
    child_pids.append(os.fork())
    if os.getpid() == parent_pid:
        faulty_file.send("open")
transfer = file.start_read_into(memory)
faulty_file.expect_line("waiting")
handle_inside(engine_close, fork)
gds.close_engines()
if os.getpid() != parent_pid:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child_pids[0], 0)[1]) == 7 and transfer.done()
file.close()
faulty_file.__exit__()
print("done")
"""
# Ctrl-C ends a program that waits for a transfer when the interpreter exits.
EXIT_PROGRAM = f"""{BLOCKED_TRANSFER_PRELUDE}
transfer = file.start_read_into(memory)
faulty_file.expect_line("waiting")
print("done", flush=True)
handle_inside(engine_close, interrupt)
"""


def sweep_handlers(call: str, *arguments: object, **environ: str) -> None:
    """Run each signal handler at every point of a call."""
    run_sweep("gds.handler_sweep", call, *arguments, points_min=21, **environ)


@pytest.mark.parametrize("call", CALLS)
def test_handler_at_any_point_of_a_call(tmp_path: Path, call: str) -> None:
    """In an older version, a read or a close in a handler waited for ever for a lock of its own thread."""
    (tmp_path / "data").write_bytes(bytes(LENGTH_BYTES))
    sweep_handlers(call, tmp_path / "data")


@needs(cuda.device())
def test_handler_while_the_engine_of_a_device_is_created(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(LENGTH_BYTES))
    sweep_handlers("read_into", tmp_path / "data", "never")


@needs(cuda.device(), cufile.driver, software(Api.CUFILE), cufile.udev_present)
@pytest.mark.parametrize("call", ["result", "close"])
def test_handler_at_any_point_of_a_direct_call(tmp_path: Path, call: str) -> None:
    (tmp_path / "plan").write_text("gdrkit-faults 1\ncufile.route call=* route=p2p\n")
    with tempfile.TemporaryDirectory(prefix="gdrkit-gds-", dir=DISK_FOLDER) as folder, udev.provide_entry(Path(folder)):
        (Path(folder) / "data").write_bytes(bytes(LENGTH_BYTES))
        sweep_handlers(
            call,
            Path(folder) / "data",
            "required",
            GDRKIT_TWINS_FAULTS=str(tmp_path / "plan"),
            GDRKIT_TWINS_UDEV="0",
            CUFILE_LOGFILE_PATH=str(tmp_path / "cufile.log"),
        )


def test_close_inside_a_close_raises_edeadlk(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    completed = run_python("-c", NESTED_CLOSE_PROGRAM, tmp_path / "data")
    assert (completed.returncode, completed.stdout) == (0, "done\n"), completed.stderr


@needs(host.fuse)
@pytest.mark.parametrize(
    "program", [ENGINE_CLOSE_PROGRAM, CLOSE_ENGINES_PROGRAM, HANDLER_FORK_PROGRAM], ids=["one", "all", "fork"]
)
def test_signal_ends_the_wait_of_an_engine(tmp_path: Path, program: str) -> None:
    """In older versions, the signal was handled only after the last job."""
    completed = run_python("-c", program, tmp_path)
    assert (completed.returncode, completed.stdout) == (0, "done\n"), completed.stderr


@needs(host.fuse)
def test_signal_ends_a_program_that_waits_at_its_end(tmp_path: Path) -> None:
    completed = run_python("-c", EXIT_PROGRAM, tmp_path)
    assert (completed.returncode, completed.stdout) == (0, "done\n"), completed.stderr
    assert "KeyboardInterrupt" in completed.stderr
