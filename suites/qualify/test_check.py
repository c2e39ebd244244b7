"""`gdrkit check` prints one line with the verdict or the cause, and ends within its budget if a driver hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs(software(Api.VERBS), software(Api.CUDA)), pytest.mark.timeout(240)]

# Each cause has a rule of a fault plan (a file that makes calls of the software twins fail), the exit code of
# `gdrkit check`, and a text that the printed line must contain. With the status 0, a transfer completes with success
# but moves no bytes.
EXPECTATION_BY_CAUSE = {
    "no dma-buf regions": ("ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP", 1, "no dma-buf regions on twin0"),
    "no peer memory": ("ibv_reg_mr call=* errno=EFAULT", 1, "ibv_reg_mr"),
    "lost writes": ("wc.rdma_write call=* status=12", 1, "IBV_WC_RETRY_EXC_ERR (12)"),
    "writes without effect": ("wc.rdma_write call=* status=0", 1, "differs: expected"),
    "reads without effect": ("wc.rdma_read call=* status=0", 1, "differs: expected"),
    "refused reads": ("wc.rdma_read call=* status=10", 1, "IBV_WC_REM_ACCESS_ERR (10)"),
    "NIC does not open": ("ibv_open_device call=* errno=ENODEV", 1, "0 of 2 have one"),
    "no protection domain": ("ibv_alloc_pd call=* errno=ENOMEM", 1, "ibv_alloc_pd"),
    "no queue pair": ("ibv_create_qp call=* errno=ENOMEM", 1, "ibv_create_qp"),
    "no connection": ("ibv_modify_qp call=* errno=ETIMEDOUT", 1, "ibv_modify_qp"),
    "no CUDA device": ("cuInit call=* status=100", 1, "cuInit"),  # CUDA_ERROR_NO_DEVICE.
    "no device memory": ("cuMemAlloc_v2 call=* status=2", 1, "cuMemAlloc"),  # CUDA_ERROR_OUT_OF_MEMORY.
}


def run_gdrkit_check(folder: Path, rules: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `gdrkit check` on the software twins with a fault plan that has these rules. Write the plan to `folder`."""
    plan_path = folder / "plan"
    plan_path.write_text(f"gdrkit-faults 1\n{rules}\n")
    return subprocess.run(
        [sys.executable, "-m", "gdrkit", "check", "--software", *options],
        env={**os.environ, "GDRKIT_TWINS_FAULTS": str(plan_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_check_without_a_fault_is_one_line_and_exit_0(tmp_path: Path) -> None:
    result = run_gdrkit_check(tmp_path, "", "--budget", "120")
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert ": software only: The code passed on software twins [" in line


@pytest.mark.parametrize("cause", EXPECTATION_BY_CAUSE)
def test_check_names_the_cause_in_one_line(tmp_path: Path, cause: str) -> None:
    rule, exit_code, expected_text = EXPECTATION_BY_CAUSE[cause]
    result = run_gdrkit_check(tmp_path, rule, "--budget", "120")
    (line,) = result.stdout.splitlines()
    assert expected_text in line
    assert ". To do: " in line
    assert result.returncode == exit_code


def test_check_ends_in_time_if_a_driver_hangs(tmp_path: Path) -> None:
    # ibv_modify_qp() of the twin hangs as long as this file exists.
    hold_file = tmp_path / "held"
    hold_file.touch()
    start_s = time.monotonic()
    result = run_gdrkit_check(tmp_path, f"ibv_modify_qp call=* hold={hold_file}", "--budget", "30")
    duration_s = time.monotonic() - start_s
    hold_file.unlink()
    assert result.returncode == 1
    assert duration_s < 30
    # How far the check comes depends on the speed of the machine.
    assert re.search(
        r"no result within 30 s, while (querying CUDA, |running \d+ cases|running the case after )", result.stdout
    )


def test_check_with_an_impossible_budget_is_refused(tmp_path: Path) -> None:
    result = run_gdrkit_check(tmp_path, "", "--budget", "3")
    assert result.returncode == 2
    assert "10" in result.stderr  # The smallest budget is 10 s.
