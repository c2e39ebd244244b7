"""gdrkit reports the route of a transfer from the counters of libcufile, and the causes of a fallback.

The scenarios that these cases run are functions in ``support/cufile_child.py``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import udev

from gdrkit import pattern
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, needs, software
from gdrkit.units import MIB

if TYPE_CHECKING:
    from support.cufile_scenarios import ScenarioRunner

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver)
# The cases of direct routes need the cuFile twin (a library that emulates libcufile), whose fault plan selects the
# route.
NEEDS_TWIN = needs(software(Api.CUFILE), cufile.udev_present)
CALLS = ["read", "write", "readv", "read_async", "batch_read", "batch_write"]


@pytest.mark.qualify
@needs(cufile.udev_present)
def test_compat_mode_is_reported_as_fell_back(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    """The bytes are right, the statistics count a POSIX read, and require_direct() raises an error with the cause."""
    result = scenarios.run("one_read")
    evidence["read"] = result
    assert result["is_data_correct"]
    assert result["proof"]["counter_increases"]["n_posix_reads"] >= 1
    assert (result["proof"]["route"], result["proof"]["state"]) == ("posix", "fell_back")
    assert "no_nvidia_fs" in result["proof"]["causes"]
    assert result["fell_back"]["kind"] == "DirectPathError"
    assert "nvidia-fs is not loaded" in result["fell_back"]["message"]


@needs(cufile.udev_absent)
def test_missing_udev_database_is_a_cause(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    # Remove the entry for the disk from udev's database, if it has one. run() would add the entry again.
    with udev.remove_entry(scenarios.path.parent):
        result = scenarios.run_without_adding_udev_entry("one_read")
    evidence["read"] = result
    assert result["failure"]["status"] == 5027  # CU_FILE_HANDLE_NOT_REGISTERED
    assert result["proof"]["state"] == "not_possible"
    assert result["proof"]["causes"][0] == "no_udev_database"


@needs(cufile.udev_present)
def test_tmpfs_is_a_cause(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        scenarios.path = Path(folder) / "data"
        scenarios.path.write_bytes(pattern.payload(MIB, seed=scenarios.seed))
        result = scenarios.run_without_adding_udev_entry("one_read", direct=_allows_o_direct(scenarios.path))
    evidence["read"] = result
    assert result["proof"]["causes"][0] == "tmpfs"
    # cuFile 1.18 and newer register the file, and copy through host memory. Older versions refuse the file with
    # CU_FILE_HANDLE_NOT_REGISTERED (5027).
    status = result.get("failure", {}).get("status")
    assert (result["proof"]["state"], status) in {("not_possible", 5027), ("fell_back", None)}


@pytest.mark.parametrize("forced_by", ["variable", "parameter"])
@needs(cufile.udev_present)
def test_forced_compat_mode_is_a_cause(scenarios: ScenarioRunner, evidence: Evidence, forced_by: str) -> None:
    flags = {"FORCE_COMPAT_MODE": True} if forced_by == "parameter" else {}
    forced_scenarios = scenarios.with_environ(CUFILE_FORCE_COMPAT_MODE="true") if forced_by == "variable" else scenarios
    result = forced_scenarios.run("one_read", flags=flags)
    evidence["read"] = result
    assert result["is_data_correct"]
    assert (result["proof"]["route"], result["proof"]["state"]) == ("posix", "fell_back")
    assert "compat_forced" in result["proof"]["causes"]


@needs(cufile.udev_present)
def test_file_without_o_direct_is_a_cause(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    result = scenarios.run("one_read", direct=False)
    evidence["read"] = result
    assert result["is_data_correct"]
    assert result["proof"]["state"] == "fell_back"
    assert "not_o_direct" in result["proof"]["causes"]


@pytest.mark.parametrize("statistics_level", [0, 1, 2])
@needs(cufile.udev_present)
def test_uncounted_transfer_is_unproven(scenarios: ScenarioRunner, evidence: Evidence, statistics_level: int) -> None:
    """Only level 3 of the statistics of libcufile counts the route of a transfer."""
    result = scenarios.run("one_read", level=statistics_level)
    evidence["read"] = result
    assert result["is_data_correct"]
    assert (result["proof"]["route"], result["proof"]["state"]) == ("unknown", "unproven")
    assert result["proof"]["causes"] == ["not_counted"]
    assert result["fell_back"]["kind"] == "DirectPathError"


@pytest.mark.qualify
@pytest.mark.parametrize("route", ["p2p", "nvfs"])
@NEEDS_TWIN
def test_direct_read_is_proven_by_its_counters(
    scenarios: ScenarioRunner, tmp_path: Path, evidence: Evidence, route: str
) -> None:
    result = scenarios.with_faults(tmp_path, f"cufile.route call=* route={route}").run("one_read")
    evidence["read"] = result
    assert result["is_data_correct"]
    assert (result["proof"]["route"], result["proof"]["state"]) == (route, "proven")
    assert result["proof"]["counter_increases"] == {f"n_{route}_reads": 1, "n_total_reads": 1}
    assert "fell_back" not in result


@pytest.mark.parametrize("call", CALLS)
@NEEDS_TWIN
def test_every_call_can_be_proven(scenarios: ScenarioRunner, tmp_path: Path, evidence: Evidence, call: str) -> None:
    scenarios_with_faults = scenarios.with_faults(tmp_path, "cufile.route call=* route=nvfs")
    result = scenarios_with_faults.run_cached("every_call", calls=CALLS)["calls"][CALLS.index(call)]
    evidence["call"] = result
    assert result["is_data_correct"]
    assert (result["proof"]["route"], result["proof"]["state"]) == ("nvfs", "proven")


@NEEDS_TWIN
def test_batch_with_one_host_transfer_is_unproven(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    scenarios_with_faults = scenarios.with_faults(
        tmp_path, "cufile.route call=5 route=posix", "cufile.route call=* route=p2p"
    )
    proof = scenarios_with_faults.run("every_call", calls=["batch_read"])["calls"][0]["proof"]
    # The batch has 16 reads. The fault plan sends one of them through host memory.
    assert (proof["counter_increases"]["batch_p2p_submit_ops"], proof["counter_increases"]["batch_aio_submit_ops"]) == (
        15,
        1,
    )
    assert (proof["route"], proof["state"]) == ("unknown", "unproven")


@NEEDS_TWIN
def test_failed_statistics_are_unproven(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    scenarios_with_faults = scenarios.with_faults(
        tmp_path, "cufile.route call=* route=p2p", "cuFileGetStatsL3 call=* status=5022"
    )
    result = scenarios_with_faults.run("one_read")
    assert result["is_data_correct"]
    assert (result["proof"]["route"], result["proof"]["state"]) == ("unknown", "unproven")
    assert "CU_FILE_INVALID_VALUE (5022)" in result["proof"]["why"]


@needs(cufile.udev_present)
def test_driver_without_compat_mode_does_not_open(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    failure = scenarios.run("driver_opens", flags={"ALLOW_COMPAT_MODE": False})["failure"]
    evidence["failure"] = failure
    # 5001 is CU_FILE_DRIVER_NOT_INITIALIZED.
    assert (failure["operation"], failure["status"]) == ("cuFileDriverOpen", 5001)
    assert "allow compat mode" in failure["message"]


@NEEDS_TWIN
def test_read_without_compat_mode_does_not_fall_back(
    scenarios: ScenarioRunner, tmp_path: Path, evidence: Evidence
) -> None:
    scenarios_with_faults = scenarios.with_faults(tmp_path, "cufile.route call=* route=posix")
    result = scenarios_with_faults.run("one_read", flags={"ALLOW_COMPAT_MODE": False})
    evidence["read"] = result
    assert result["failure"]["kind"] == "Unsupported"
    assert result["failure"]["status"] == 5008  # CU_FILE_IO_NOT_SUPPORTED


def _allows_o_direct(path: Path) -> bool:
    """Return whether the file can be opened with O_DIRECT."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True
