"""A signal handler that uses the object of the call that it interrupts does not deadlock.

suites/gds has the cases of gdrkit.gds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from contract.handler_sweep import SCENARIOS
from models.model_files import write_model
from support.interrupts import Interrupter
from support.python_child import run_python, run_sweep

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, needs, software, verbs
from gdrkit.host import STATE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


# This program forks while a thread retains the context of a device. The child process uses the device, too.
FORK_PROGRAM = """
import faulthandler, os, threading
from pathlib import Path
from gdrkit import cuda, handles
from gdrkit.errors import GdrkitError
device = cuda.Device(0)
thread = threading.Thread(target=device.context_handle)
thread.start()
# The twin delays the call by clock_nanosleep(2), which has the number 230 (x86-64) or 115 (aarch64). Before that, the
# thread may hold a lock of the C library or of the twin, which a forked child could never take.
syscall_file = Path(f"/proc/self/task/{thread.native_id}/syscall")
while syscall_file.read_text().split()[0] not in ("230", "115"):
    assert thread.is_alive()
assert "cuda.primary_context" in handles.live()
child_pid = os.fork()
if child_pid == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    try:
        device.context_handle()
    except GdrkitError:  # A driver may refuse every call of a forked child.
        pass
    os._exit(7)  # Only a child that did not hang exits with 7.
status = os.waitpid(child_pid, 0)[1]
thread.join()
device.close()
print(os.waitstatus_to_exitcode(status))
"""


def yield_numbers(*texts: str) -> Generator[int, None, None]:
    """Yield the value of each octal number, or 0 for a text that is not a number, for use_numbers()."""
    for text in texts:
        try:
            yield int(text, base=8)
        except ValueError:
            yield from (0,)


def use_numbers() -> None:
    """Execute calls, loops, a generator and "yield from", so that every type of point occurs."""
    numbers = yield_numbers("x", "7", "1")
    for number in numbers:
        if max(*(number, 0)) == 1:
            numbers.close()


def sweep_handler(scenario: str, folder: Path) -> None:
    """Run a scenario of handler_sweep.py once per point of its call, with a signal handler at that point."""
    run_sweep("contract.handler_sweep", scenario, folder, points_min=5)


def test_sweep_has_each_point_where_python_runs_handlers() -> None:
    """Older versions of Interrupter missed the start of each function and, with Python 3.13, nearly all points."""
    point_functions = []
    for point in itertools.count(1):
        interrupter = Interrupter(point, __file__, handler=lambda: None)
        interrupter.call(use_numbers)
        if not interrupter.interrupted_at:
            break
        point_functions.append(interrupter.interrupted_at.rpartition(" ")[2])
    # A point follows each entry of a function, each backward jump and each call that succeeds. No point follows
    # int("x"), which fails, nor close(), which continues the generator with an exception. After "yield from", the
    # interpreter does not check for signals.
    assert [(name, len(list(group))) for name, group in itertools.groupby(point_functions)] == [
        ("use_numbers", 2),
        ("yield_numbers", 1),
        ("use_numbers", 2),
        ("yield_numbers", 2),
        ("use_numbers", 2),
        ("yield_numbers", 3),
        ("use_numbers", 3),
    ]


@needs(cuda.device(), software(Api.CUDA))
def test_handler_while_a_context_is_retained(tmp_path: Path) -> None:
    sweep_handler("retain", tmp_path)


@needs(cuda.device(), software(Api.CUDA))
def test_fork_while_a_context_is_retained(tmp_path: Path) -> None:
    """In an older version, the child waited for ever for a lock that a thread of its parent held."""
    # The fault plan delays the twin's first call by 2 s, so that the fork happens during the call.
    (tmp_path / "plan").write_text("gdrkit-faults 1\ncuDevicePrimaryCtxRetain call=1 delay_us=2000000\n")
    completed = run_python("-c", FORK_PROGRAM, GDRKIT_TWINS_FAULTS=str(tmp_path / "plan"))
    assert (completed.returncode, completed.stdout) == (0, "7\n"), completed.stderr


@needs(cuda.device(), cufile.driver, software(Api.CUFILE))
@pytest.mark.parametrize("scenario", ["lease", "lease_and_close", "close_memory", "use_stream"])
def test_handler_while_memory_is_registered_with_cufile(tmp_path: Path, scenario: str) -> None:
    sweep_handler(scenario, tmp_path)


@needs(cuda.device(), verbs.nic(), software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name.startswith("region_")])
def test_handler_while_a_region_cache_is_used(tmp_path: Path, scenario: str) -> None:
    sweep_handler(scenario, tmp_path)


@needs(cuda.device(), verbs.nic(), software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize("scenario", ["reach", "reach_forget"])
def test_handler_while_the_reach_of_a_nic_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    sweep_handler(scenario, tmp_path)


@pytest.mark.parametrize("scenario", ["result", "result_and_close", "get_tensors"])
def test_handler_while_a_model_file_is_loaded(tmp_path: Path, seed: int, scenario: str) -> None:
    write_model(tmp_path / "model.safetensors", [("a", "F32", (4, 4))], seed=seed)
    sweep_handler(scenario, tmp_path)


def test_handler_while_host_memory_is_allocated_and_freed(tmp_path: Path) -> None:
    sweep_handler("host_memory", tmp_path)


def test_handler_while_memory_of_a_pool_is_used(tmp_path: Path) -> None:
    sweep_handler("memory_pool", tmp_path)


@needs(verbs.nic(), software(Api.VERBS))
def test_handler_while_a_buffer_of_a_pool_is_used(tmp_path: Path) -> None:
    sweep_handler("buffer_pool", tmp_path)
