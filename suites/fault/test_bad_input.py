"""An unusable environment (permissions, limits, a failing driver) raises an error with operation, errno and advice.

Each case makes a call in a child process, because limits and fault plans apply to a whole process. The cases for
missing, truncated and incompatible libraries are in suites/contract/test_loading.py.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api, Reason
from gdrkit.harness.needs import cuda, needs, software, verbs

if TYPE_CHECKING:
    from pathlib import Path

# This program makes a call, and prints the fields of its error as JSON.
CHILD_PROGRAM = """
import json
from gdrkit import cuda, verbs
from gdrkit.errors import ApiError
try:
    {call}
except ApiError as error:
    print(json.dumps([type(error).__name__, error.api.value, error.operation, error.errno, error.reason.value,
                      error.what_to_do]))
"""
OPEN_NIC_CALL = "verbs.Nic.open(verbs.list_nics()[0].name)"
REGISTER_16_MIB_CALL = "verbs.Nic.open(verbs.list_nics()[0].name).register_host(bytearray(16 << 20))"


def make_call_and_get_error(call: str, *, command_prefix: tuple[str, ...] = (), **environ: str) -> list[object]:
    """Make `call` in a child process with additional environment variables, and return the fields of its error."""
    command = [*command_prefix, sys.executable, "-c", CHILD_PROGRAM.format(call=call)]
    child = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=60)
    assert child.stdout.count("\n") == 1, child.stdout + child.stderr
    error_fields: list[object] = json.loads(child.stdout)
    return error_fields


def write_plan(folder: Path, plan_text: str) -> str:
    """Write a fault plan, and return its path."""
    path = folder / "plan"
    path.write_text(plan_text)
    return str(path)


@needs(verbs.nic(), software(Api.VERBS))
@pytest.mark.parametrize("expected_errno", [errno.EACCES, errno.EPERM])
def test_missing_rdma_permission_names_the_files(tmp_path: Path, expected_errno: int) -> None:
    # list_nics() calls ibv_open_device to list the ports, and ignores its error. Nic.open() reports the error.
    plan_path = write_plan(tmp_path, f"gdrkit-faults 1\nibv_open_device call=* errno={expected_errno}\n")
    error_type, api, operation, error_number, reason, what_to_do = make_call_and_get_error(
        OPEN_NIC_CALL, GDRKIT_TWINS_FAULTS=plan_path
    )
    assert (error_type, api, operation, error_number) == ("SetupMissing", "verbs", "ibv_open_device", expected_errno)
    assert reason == Reason.NO_PERMISSION.value
    assert "/dev/infiniband" in str(what_to_do)


# 100 is CUDA_ERROR_NO_DEVICE, 304 is CUDA_ERROR_OPERATING_SYSTEM, and 999 is CUDA_ERROR_UNKNOWN.
@needs(cuda.device(), software(Api.CUDA))
@pytest.mark.parametrize(("status", "reason"), [(100, Reason.NO_DEVICE), (304, Reason.OTHER), (999, Reason.OTHER)])
def test_cuda_init_failure_has_advice(tmp_path: Path, status: int, reason: Reason) -> None:
    plan_path = write_plan(tmp_path, f"gdrkit-faults 1\ncuInit call=* status={status}\n")
    error_type, api, operation, error_number, error_reason, what_to_do = make_call_and_get_error(
        "cuda.device_count()", GDRKIT_TWINS_FAULTS=plan_path
    )
    assert (error_type, api, operation) == ("SetupMissing", "cuda", "cuInit")
    # A CUresult is not an errno, so errno is None.
    assert error_number is None
    assert error_reason == reason.value
    assert what_to_do


@needs(verbs.nic())
def test_low_memlock_limit_is_named_with_advice() -> None:
    # The limit does not apply to a process with CAP_IPC_LOCK, such as a process of root. So the child process drops
    # this capability.
    low_limit_prefix = (
        "setpriv",
        "--bounding-set=-ipc_lock",
        "--inh-caps=-ipc_lock",
        "prlimit",
        "--memlock=65536:65536",
    )
    error_type, api, operation, error_number, reason, what_to_do = make_call_and_get_error(
        REGISTER_16_MIB_CALL, command_prefix=low_limit_prefix
    )
    assert (error_type, api, operation, error_number) == ("SetupMissing", "verbs", "ibv_reg_mr", errno.ENOMEM)
    assert reason == Reason.MEMLOCK_TOO_LOW.value
    assert "RLIMIT_MEMLOCK" in str(what_to_do)


MALFORMED_PLANS = [
    pytest.param("", id="empty"),
    pytest.param("gdrkit-faults 2\n", id="another-version"),
    pytest.param("gdrkit-faults 1\nibv_reg_mr call=0 errno=14\n", id="call-zero"),
    pytest.param("gdrkit-faults 1\nibv_reg_mr call=1 errno=EWHATEVER\n", id="unknown-errno"),
    pytest.param("gdrkit-faults 1\nibv_reg_mr call=1\n", id="no-code"),
    pytest.param("gdrkit-faults 1\nrubbish\n", id="no-function"),
]


@needs(verbs.nic(), cuda.device(), software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize("plan_text", MALFORMED_PLANS)
def test_malformed_fault_plan_is_refused_before_the_start(tmp_path: Path, plan_text: str) -> None:
    command = [
        sys.executable,
        "-m",
        "gdrkit",
        "run",
        "--software",
        "--faults",
        write_plan(tmp_path, plan_text),
        "--",
        "true",
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 2
    assert not child.stdout
    (line,) = child.stderr.splitlines()
    assert "read fault plan" in line
    assert "EINVAL" in line
    assert "line" in line
    assert "To do:" in line


@needs(verbs.nic(), cuda.device(), software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize(
    ("call", "expected_operation", "expected_errno"),
    [("verbs.list_nics()", "ibv_get_device_list", errno.EINVAL), ("cuda.device_count()", "cuInit", None)],
)
def test_twin_with_a_malformed_plan_fails_at_its_first_call(
    tmp_path: Path, call: str, expected_operation: str, expected_errno: int | None
) -> None:
    plan_path = write_plan(tmp_path, "gdrkit-faults 1\nibv_reg_mr call=x errno=14\ncuMemAlloc_v2 call=x status=2\n")
    _type, _api, failed_operation, error_number, _reason, what_to_do = make_call_and_get_error(
        call, GDRKIT_TWINS_FAULTS=plan_path
    )
    assert (failed_operation, error_number) == (expected_operation, expected_errno)
    assert what_to_do
