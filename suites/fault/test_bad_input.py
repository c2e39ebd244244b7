"""What is wrong around gdrkit gives one error: api, operation, errno, what to do.

Each case runs in a process of its own, since limits and plans are those of a process. A library that is missing, cut
off or of another ABI is in suites/contract/test_loading.py.
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

CHILD = """
import json
from gdrkit import cuda, verbs
from gdrkit.errors import ApiError
try:
    {call}
except ApiError as error:
    print(json.dumps([type(error).__name__, error.api.value, error.operation, error.errno, error.reason.value,
                      error.what_to_do]))
"""
OPEN_NIC = "verbs.Nic.open(verbs.list_nics()[0].name)"
REGISTER = "verbs.Nic.open(verbs.list_nics()[0].name).register_host(bytearray(16 << 20))"


def error_of(call: str, *, prefix: tuple[str, ...] = (), **environ: str) -> list[object]:
    """What `call` raises in a child, with these variables more."""
    command = [*prefix, sys.executable, "-c", CHILD.format(call=call)]
    child = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=60)
    assert child.stdout.count("\n") == 1, child.stdout + child.stderr
    found: list[object] = json.loads(child.stdout)
    return found


def plan_at(folder: Path, text: str) -> str:
    path = folder / "plan"
    path.write_text(text)
    return str(path)


@needs(verbs.nic(), software(Api.VERBS))
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_no_permission_on_the_rdma_device_says_which_files(tmp_path: Path, number: int) -> None:
    # The first call opens the device to list its ports and forgives; the second one is what the caller asked for.
    plan = plan_at(tmp_path, f"gdrkit-faults 1\nibv_open_device call=* errno={number}\n")
    kind, api, operation, found, reason, what_to_do = error_of(OPEN_NIC, GDRKIT_TWINS_FAULTS=plan)
    assert (kind, api, operation, found) == ("SetupMissing", "verbs", "ibv_open_device", number)
    assert reason == Reason.NO_PERMISSION.value
    assert "/dev/infiniband" in str(what_to_do)


@needs(cuda.device(), software(Api.CUDA))
@pytest.mark.parametrize(("status", "reason"), [(100, Reason.NO_DEVICE), (304, Reason.OTHER), (999, Reason.OTHER)])
def test_a_driver_that_cannot_start_says_what_to_check(tmp_path: Path, status: int, reason: Reason) -> None:
    plan = plan_at(tmp_path, f"gdrkit-faults 1\ncuInit call=* status={status}\n")
    kind, api, operation, number, found, what_to_do = error_of("cuda.device_count()", GDRKIT_TWINS_FAULTS=plan)
    assert (kind, api, operation) == ("SetupMissing", "cuda", "cuInit")
    # A CUresult is no errno, and none is invented.
    assert number is None
    assert found == reason.value
    assert what_to_do


@needs(verbs.nic())
def test_a_memlock_limit_that_is_too_low_is_named_with_the_remedy() -> None:
    # Also root is under the limit once CAP_IPC_LOCK is gone from what an exec may give.
    limited = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536:65536")
    kind, api, operation, number, reason, what_to_do = error_of(REGISTER, prefix=limited)
    assert (kind, api, operation, number) == ("SetupMissing", "verbs", "ibv_reg_mr", errno.ENOMEM)
    assert reason == Reason.MEMLOCK_TOO_LOW.value
    assert "RLIMIT_MEMLOCK" in str(what_to_do)


MALFORMED = [
    pytest.param("", id="empty"),
    pytest.param("gdrkit-faults 2\n", id="another-version"),
    pytest.param("gdrkit-faults 1\nibv_reg_mr call=0 errno=14\n", id="call-zero"),
    pytest.param("gdrkit-faults 1\nibv_reg_mr call=1 errno=EWHATEVER\n", id="unknown-errno"),
    pytest.param("gdrkit-faults 1\nibv_reg_mr call=1\n", id="no-code"),
    pytest.param("gdrkit-faults 1\nrubbish\n", id="no-function"),
]


@needs(verbs.nic(), cuda.device(), software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_fault_plan_is_refused_before_anything_starts(tmp_path: Path, text: str) -> None:
    command = [sys.executable, "-m", "gdrkit", "run", "--software", "--faults", plan_at(tmp_path, text), "--", "true"]
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
    ("call", "operation", "number"),
    [("verbs.list_nics()", "ibv_get_device_list", errno.EINVAL), ("cuda.device_count()", "cuInit", None)],
)
def test_a_library_that_finds_its_plan_malformed_fails_at_its_first_call(
    tmp_path: Path, call: str, operation: str, number: int | None
) -> None:
    plan = plan_at(tmp_path, "gdrkit-faults 1\nibv_reg_mr call=x errno=14\ncuMemAlloc_v2 call=x status=2\n")
    _kind, _api, asked, found, _reason, what_to_do = error_of(call, GDRKIT_TWINS_FAULTS=plan)
    assert (asked, found) == (operation, number)
    assert what_to_do
