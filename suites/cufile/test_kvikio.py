"""kvikio, used without cupy, transfers every byte correctly, and gdrkit reports the route of the transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, host, needs, software
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from support.cufile_scenarios import ScenarioRunner

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver, cufile.udev_present, host.module("kvikio"), host.module("numpy"))


@pytest.mark.parametrize("compat_mode", ["on", "auto", "off"])
def test_kvikio_moves_every_byte(scenarios: ScenarioRunner, evidence: Evidence, compat_mode: str) -> None:
    """With compat mode `on`, kvikio copies through host memory without libcufile, so the route is unproven."""
    results = scenarios.run_cached("by_kvikio", modes=["on", "auto", "off"])
    evidence["kvikio"] = results
    result = results[compat_mode]
    assert (result["read"], result["is_data_correct"], result["write"], result["written"]) == (MIB, True, MIB, True)
    # The proof has this route and state. Mode `auto` is missing, because its use of libcufile depends on the machine.
    expected_proofs = {"on": ("unknown", "unproven"), "off": ("posix", "fell_back")}
    if compat_mode in expected_proofs:
        assert (result["proof"]["route"], result["proof"]["state"]) == expected_proofs[compat_mode]


def test_missing_file_keeps_its_errno(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    failure = scenarios.run_cached("by_kvikio", modes=["on", "auto", "off"])["missing"]["failure"]
    evidence["failure"] = failure
    assert failure["operation"] == "kvikio.CuFile"


@needs(software(Api.CUFILE))
def test_kvikio_with_a_direct_cufile_is_proven(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    direct_scenarios = scenarios.with_faults(tmp_path, "cufile.route call=* route=nvfs")
    proof = direct_scenarios.run("by_kvikio", modes=["off"])["off"]["proof"]
    assert (proof["route"], proof["state"]) == ("nvfs", "proven")
