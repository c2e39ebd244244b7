"""The rdma-core programs ibv_devices and ibv_devinfo (Debian: ibverbs-utils) run on the twins, as in docs/twins.md.

Twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import host, needs, software, verbs


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["ibv_devices"], marks=needs(software(Api.VERBS), verbs.nic(), host.program("ibv_devices"))),
        pytest.param(["ibv_devinfo", "-v"], marks=needs(software(Api.VERBS), verbs.nic(), host.program("ibv_devinfo"))),
    ],
    ids=" ".join,
)
def test_rdma_core_program_lists_the_twins(command: list[str]) -> None:
    run_on_twins = [sys.executable, "-m", "gdrkit", "run", "--software", "--quiet", "--"]
    completed = subprocess.run([*run_on_twins, *command], capture_output=True, text=True, check=False, timeout=60)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert all(name in completed.stdout for name in ("twin0", "twin1"))
