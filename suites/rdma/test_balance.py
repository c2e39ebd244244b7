"""All GPUs and NICs transfer at once. The balance shows which NICs carry less than their share by link rate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.memory_kinds import NEEDS_DMABUF

from gdrkit import serialization
from gdrkit.errors import Api, DataMismatch
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import measure_balance

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

pytestmark = NEEDS_DMABUF

DURATION_S = 2.0


# A program that measures the balance of all NICs and GPUs. The case starts it with `gdrkit run`, because the program
# needs port counters, and more devices than this process has.
BALANCE_PROGRAM = """
import json
from contextlib import ExitStack
from gdrkit import cuda, serialization, verbs
from gdrkit.registration import measure_balance

with ExitStack() as stack:
    nics = [stack.enter_context(nic) for nic in verbs.open_active_nics()]
    devices = [stack.enter_context(cuda.Device(index)) for index in range(cuda.device_count())]
    print(json.dumps(serialization.to_json_data(measure_balance(devices, nics, duration_s=2))))
"""


@pytest.mark.qualify
@needs(verbs.nic(count_min=2))
def test_nics_carry_the_shares_of_their_links(
    devices: tuple[Device, ...], nics: tuple[Nic, ...], evidence: Evidence
) -> None:
    balance = measure_balance(devices, nics, duration_s=DURATION_S)
    # The report page shows this evidence as a matrix.
    evidence["balance"] = serialization.to_json_data(balance)
    for load in balance.loads:
        evidence.number(f"{load.nic}_share_percent", load.share_percent)
    if not balance.is_counted:
        evidence.unproven("a port has no byte counters, so the shares were counted by the initiators")
    if balance.slow_nics:
        slow_nic_names = ", ".join(balance.slow_nics)
        evidence.unproven(f"these NICs carry less than 70 % of the share of their links: {slow_nic_names}")
    assert all(load.moved_bytes for load in balance.loads)


@needs(software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize("operation", ["rdma_write", "rdma_read"])
def test_transfers_that_lose_their_bytes_are_an_error(
    devices: tuple[Device, ...], nics: tuple[Nic, ...], operation: str
) -> None:
    """A NIC completes transfers with success, and moves no bytes."""
    with inject_faults(Api.VERBS, f"wc.{operation} call=* status=0"), pytest.raises(DataMismatch):
        measure_balance(devices, nics, duration_s=0.1)


@needs(software(Api.VERBS), software(Api.CUDA))
@pytest.mark.timeout(240)
def test_slow_nic_among_eight_is_named_and_its_share_is_counted(tmp_path: Path) -> None:
    fault_plan = tmp_path / "fault_plan"
    fault_rules = [f"wc.{operation} call=* delay_us=20000 nic=twin5" for operation in ("rdma_write", "rdma_read")]
    fault_plan.write_text("\n".join(["gdrkit-faults 1", *fault_rules, ""]))
    device_variables = {"GDRKIT_TWINS_NICS": "8", "GDRKIT_TWINS_GPUS": "8"}
    run_command = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated", "--quiet", "--"]
    child = subprocess.run(
        [*run_command, sys.executable, "-c", BALANCE_PROGRAM],
        env={**os.environ, **device_variables, "GDRKIT_TWINS_FAULTS": str(fault_plan), "GDRKIT_TWINS_LATE_US": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr
    balance = json.loads(child.stdout)
    assert balance["is_counted"]
    load_by_nic = {load["nic"]: load for load in balance["loads"]}
    assert len(load_by_nic) == len(balance["matrix"]) == 8
    total_bytes = sum(load["moved_bytes"] for load in load_by_nic.values())
    slow_load = load_by_nic.pop("twin5")
    assert slow_load["share_percent"] < 0.7 * slow_load["expected_percent"]
    # share_percent is computed from port counters. They include packet headers, and in loopback they count the payload
    # twice. This applies to all NICs alike, so a share of the counted bytes is nearly the share of the payload.
    assert slow_load["share_percent"] == pytest.approx(100 * slow_load["moved_bytes"] / total_bytes, rel=0.05)
    assert all(load["share_percent"] > 0.7 * load["expected_percent"] for load in load_by_nic.values())
