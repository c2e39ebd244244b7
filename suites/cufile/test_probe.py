"""gdrkit opens the cuFile driver in a child process first (the probe), and loads libcuda before libcufile.

A libcufile that crashes or hangs therefore affects only the child process.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.python_child import run_sweep

from gdrkit import cufile
from gdrkit.errors import Api, Reason, SetupMissing
from gdrkit.harness.needs import cufile as cufile_needs
from gdrkit.harness.needs import needs, software
from gdrkit.launch import Launch, environment

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

NEEDS_TWIN = needs(software(Api.CUFILE), software(Api.CUDA))

# This program opens the driver. It prints the fields of the error, or an empty list if the driver opens.
_OPEN_DRIVER_PROGRAM = """
import json
from gdrkit import cufile
from gdrkit.errors import SetupMissing
try:
    cufile.Driver(timeout_s={timeout_s}).close()
    print(json.dumps([]))
except SetupMissing as error:
    print(json.dumps([error.operation, error.status, error.errno, error.reason.value]))
"""


def open_driver_in_child(environ: dict[str, str], *, timeout_s: float = 30) -> list[Any]:
    """Open the driver in a new process. Return the fields of the error, or an empty list if the driver opens."""
    program = _OPEN_DRIVER_PROGRAM.format(timeout_s=timeout_s)
    completed = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    error_fields: list[Any] = json.loads(completed.stdout.splitlines()[-1])
    return error_fields


@pytest.mark.qualify
@needs(cufile_needs.driver)
def test_probe_and_driver_open_succeed(evidence: Evidence) -> None:
    result = cufile.probe()
    evidence["version"] = result.version
    assert result.version >= 1000
    assert open_driver_in_child(dict(os.environ)) == []


@NEEDS_TWIN
def test_slow_open_ends_in_a_timeout(tmp_path: Path) -> None:
    fault_plan_path = tmp_path / "plan"
    fault_plan_path.write_text("gdrkit-faults 1\ncuFileDriverOpen call=* delay_us=10000000\n")
    error_fields = open_driver_in_child({**os.environ, "GDRKIT_TWINS_FAULTS": str(fault_plan_path)}, timeout_s=1)
    assert error_fields == ["cuFileDriverOpen in a child process", None, None, "timeout"]


@NEEDS_TWIN
def test_missing_libcuda_is_an_error_before_libcufile_loads() -> None:
    environ = environment(Launch(twin_apis=frozenset({Api.CUFILE})))
    assert open_driver_in_child(environ) == [
        "dlopen libcuda.so.1",
        errno.ENOENT,
        errno.ENOENT,
        Reason.LIBRARY_MISSING.value,
    ]


@NEEDS_TWIN
def test_missing_libcufile_is_named_in_the_error() -> None:
    environ = environment(Launch(twin_apis=frozenset({Api.CUDA})))
    assert open_driver_in_child(environ)[:2] == ["dlopen libcufile.so.0", errno.ENOENT]


@NEEDS_TWIN
@pytest.mark.parametrize("status", [5001, 5011, 5033])
def test_driver_error_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    fault_plan_path = tmp_path / "plan"
    fault_plan_path.write_text(f"gdrkit-faults 1\ncuFileDriverOpen call=* status={status}\n")
    monkeypatch.setenv("GDRKIT_TWINS_FAULTS", str(fault_plan_path))
    with pytest.raises(SetupMissing) as error_info:
        cufile.probe()
    assert (error_info.value.api, error_info.value.status, error_info.value.operation) == (
        Api.CUFILE,
        status,
        "cuFileDriverOpen",
    )


@NEEDS_TWIN
def test_error_of_the_child_is_raised_by_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault_plan_path = tmp_path / "plan"
    # If the cuFile twin (a library that emulates libcufile) cannot parse the plan, its cuFileDriverOpen returns
    # CU_FILE_INVALID_VALUE (5022).
    fault_plan_path.write_text("no plan at all\n")
    monkeypatch.setenv("GDRKIT_TWINS_FAULTS", str(fault_plan_path))
    with pytest.raises(SetupMissing) as error_info:
        cufile.probe()
    assert error_info.value.status == 5022


@NEEDS_TWIN
def test_interrupted_probe_leaves_no_child() -> None:
    """In an older version, an interrupt right after the fork left the child running."""
    run_sweep("cufile.interrupt_sweep", points_min=51)


@pytest.mark.parametrize("leaves_process_group", [False, True])
def test_probe_does_not_wait_for_a_grandchild(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, leaves_process_group: bool
) -> None:
    # The child of the probe imports this sitecustomize, which starts a grandchild. Both then wait, so the probe times
    # out and kills the process group of the child. A grandchild that has called setsid() survives. It has inherited the
    # output pipe of the child and keeps it open, so the probe must not wait for the end of the pipe.
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys
if "gdrkit.cufile.probe" in sys.orig_argv:
    if os.fork() == 0:
        {"os.setsid()" if leaves_process_group else "pass"}
        signal.alarm(40)
    signal.pause()
"""
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    start_s = time.monotonic()
    with pytest.raises(SetupMissing) as error_info:
        cufile.probe(timeout_s=2)
    assert error_info.value.reason is Reason.TIMEOUT
    assert time.monotonic() - start_s < 20
