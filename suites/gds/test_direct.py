"""gdrkit uses a direct path only if it is proven. Each result reports its route, or why the path is not direct."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gds import direct_scenario
from support import udev
from support.cufile_scenarios import ScenarioRunner

from gdrkit import pattern
from gdrkit.errors import Api
from gdrkit.harness.case import CASE_KEY
from gdrkit.harness.needs import cuda, cufile, needs, software
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.evidence import Evidence
    from gdrkit.inventory import Facts

pytestmark = needs(cuda.device(), cufile.driver)
# Cases with direct transfers between GPU and disk need the software twin (a library that emulates the hardware), whose
# fault plan selects the route.
NEEDS_CUFILE_TWIN = needs(software(Api.CUFILE), cufile.udev_present)
# The runner passes this name to direct_scenario.py, which has only one scenario and ignores the name.
SCENARIO = "there_and_back"


@pytest.fixture
def runner(request: pytest.FixtureRequest, seed: int, facts: Facts) -> Iterator[ScenarioRunner]:
    """Yield the runner of scenarios with a file of 1 MiB on a disk."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-gds-", dir=DISK_FOLDER) as folder:
        path = Path(folder) / "data"
        path.write_bytes(pattern.payload(MIB, seed=seed))
        yield replace(ScenarioRunner(path, seed, request.node.stash[CASE_KEY], facts), program=direct_scenario.__file__)


def has_expected_bytes(report: dict[str, Any]) -> bool:
    """Return whether all reads and writes of a scenario transferred the expected bytes, by its report."""
    return bool(
        report["read_is_expected"]
        and report["readv_is_expected"]
        and report["unaligned_read_is_expected"]
        and report["is_written"]
    )


@pytest.mark.parametrize("route", ["p2p", "nvfs"])
@pytest.mark.parametrize("direct", ["preferred", "required"])
@NEEDS_CUFILE_TWIN
def test_proven_direct_path_is_used(
    runner: ScenarioRunner, tmp_path: Path, evidence: Evidence, route: str, direct: str
) -> None:
    report = runner.with_faults(tmp_path, f"cufile.route call=* route={route}").run(SCENARIO, direct=direct)
    evidence["answer"] = report
    for call in ("read", "readv", "write", "started_read"):
        assert report[call] == {"bytes": MIB, "route": route, "why_not_direct": ""}, call
    if direct == "preferred":
        # A direct transfer must consist of whole blocks. The engine transfers any other range, and the result has the
        # reason.
        assert report["unaligned_read"]["route"] == "engine"
        assert "multiple of 4096" in report["unaligned_read"]["why_not_direct"]
        assert has_expected_bytes(report)
        assert len(report["warnings"]) == 1
    else:
        assert report["unaligned_read"]["reason"] == "not_direct"
        assert report["warnings"] == []


@needs(cufile.udev_present)
def test_cufile_fallback_uses_the_engine_and_names_the_cause(runner: ScenarioRunner, evidence: Evidence) -> None:
    report = runner.run(SCENARIO)
    evidence["answer"] = report
    assert has_expected_bytes(report)
    for call in ("read", "readv", "write", "started_read"):
        assert (report[call]["bytes"], report[call]["route"]) == (MIB, "engine"), call
        assert "nvidia-fs is not loaded" in report[call]["why_not_direct"]
    assert len(report["warnings"]) == 1


@needs(cufile.udev_present)
def test_required_direct_path_fails_without_one(runner: ScenarioRunner, evidence: Evidence) -> None:
    report = runner.run(SCENARIO, direct="required")
    evidence["answer"] = report
    for call in ("read", "readv", "unaligned_read", "write", "started_read"):
        assert (report[call]["error_class"], report[call]["reason"]) == ("Unsupported", "not_direct"), call
        assert "nvidia-fs is not loaded" in report[call]["message"]
    assert not report["is_written"]


@NEEDS_CUFILE_TWIN
def test_unproven_direct_path_is_not_used(runner: ScenarioRunner, tmp_path: Path, evidence: Evidence) -> None:
    faulty_runner = runner.with_faults(tmp_path, "cufile.route call=* route=p2p", "cuFileGetStatsL3 call=* status=5022")
    report = faulty_runner.run(SCENARIO)
    evidence["answer"] = report
    assert has_expected_bytes(report)
    assert report["read"]["route"] == "engine"
    assert "CU_FILE_INVALID_VALUE (5022)" in report["read"]["why_not_direct"]
    assert faulty_runner.run(SCENARIO, direct="required")["read"]["reason"] == "not_direct"


@pytest.mark.parametrize("direct", ["preferred", "required"])
@NEEDS_CUFILE_TWIN
def test_lost_direct_path_is_reported_by_that_transfer(
    runner: ScenarioRunner, tmp_path: Path, evidence: Evidence, direct: str
) -> None:
    """Only the probe of the first block takes the direct route. All transfers report another route."""
    faulty_runner = runner.with_faults(tmp_path, "cufile.route call=1 route=nvfs", "cufile.route call=* route=posix")
    report = faulty_runner.run(SCENARIO, direct=direct)
    evidence["answer"] = report
    assert (report["read"]["bytes"], report["read"]["route"]) == (MIB, "posix")
    assert report["read"]["why_not_direct"]
    assert report["read_is_expected"]
    if direct == "preferred":
        assert [report[call]["route"] for call in ("readv", "write", "started_read")] == ["engine"] * 3
        assert has_expected_bytes(report)
    else:
        assert report["read"]["reason"] == "not_direct"
        assert report["readv"]["reason"] == "not_direct"


@NEEDS_CUFILE_TWIN
def test_route_is_unknown_if_counting_stops(runner: ScenarioRunner, tmp_path: Path, evidence: Evidence) -> None:
    # gdrkit reads the counters before and after each transfer. Calls 1 and 2 of cuFileGetStatsL3 belong to the probe.
    # Calls 3 and 4, which fail, belong to the first transfer.
    faulty_runner = runner.with_faults(
        tmp_path, "cufile.route call=* route=p2p", "cuFileGetStatsL3 call=3-4 status=5022"
    )
    report = faulty_runner.run(SCENARIO, direct="required")
    evidence["answer"] = report
    assert (report["read"]["route"], report["read"]["reason"]) == ("unknown", "not_direct")
    assert "not_counted" in report["read"]["why_not_direct"]


@pytest.mark.parametrize(
    ("fault_rule", "api", "status", "expected_errno"),
    [
        ("cuFileRead call=2 status=5", "kernel", 5, 5),
        ("cuFileRead call=2 status=5010", "cufile", 5010, None),
    ],
    ids=["EIO", "CU_FILE_NVFS_DRIVER_ERROR"],
)
@NEEDS_CUFILE_TWIN
def test_failed_direct_transfer_keeps_its_number(
    runner: ScenarioRunner, tmp_path: Path, fault_rule: str, api: str, status: int, expected_errno: int | None
) -> None:
    report = runner.with_faults(tmp_path, "cufile.route call=* route=p2p", fault_rule).run(SCENARIO)
    failed_read = report["read"]
    assert (failed_read["error_class"], failed_read["api"], failed_read["status"], failed_read["errno"]) == (
        "TransferFailed",
        api,
        status,
        expected_errno,
    )
    assert (failed_read["bytes"], failed_read["range_bytes"]) == (0, [0])
    assert report["readv"]["bytes"] == MIB


@needs(cufile.udev_absent)
def test_missing_udev_is_a_cause_and_libcufile_is_not_loaded(runner: ScenarioRunner, evidence: Evidence) -> None:
    with udev.remove_entry(runner.path.parent):
        report = runner.run_without_adding_udev_entry(SCENARIO)
    evidence["answer"] = report
    assert has_expected_bytes(report)
    assert report["read"]["route"] == "engine"
    assert "ID_FS_USAGE" in report["read"]["why_not_direct"]
    assert "libcufile" not in report["library_paths"]
