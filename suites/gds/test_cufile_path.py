"""Large and many small transfers by cuFile: threads, batches, registered memory, errors in the middle, cancellation.

A twin is a library that emulates the hardware below an API. A fault plan is a file that tells the twin which calls must
fail or take longer, and which route each transfer takes. :mod:`gds.cufile_path_scenarios` has the scenarios.
"""

from __future__ import annotations

import errno
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gds import cufile_path_scenarios
from gds.cufile_path_scenarios import FILE_BYTES, RANGE_BYTES
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

pytestmark = needs(cuda.device(), cufile.driver, software(Api.CUFILE), cufile.udev_present)

ROUTES = ["p2p", "nvfs"]
RANGE_COUNT = 256
# Before the first transfer of a file, gdrkit reads the first block by cuFileRead, and makes two reads in a batch. The
# batch shows whether libcufile counts the routes of batches.
PROBE_READS, PROBE_BATCH_READS = 1, 2


@pytest.fixture
def runner(request: pytest.FixtureRequest, seed: int, facts: Facts) -> Iterator[ScenarioRunner]:
    """Yield the runner of scenarios with a file of 8 MiB on a disk."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-gds-", dir=DISK_FOLDER) as folder:
        path = Path(folder) / "data"
        path.write_bytes(pattern.payload(FILE_BYTES, seed=seed))
        standard_runner = ScenarioRunner(path, seed, request.node.stash[CASE_KEY], facts)
        yield replace(standard_runner, program=cufile_path_scenarios.__file__)


@pytest.mark.parametrize("route", ROUTES)
def test_large_transfer_uses_registered_memory(
    runner: ScenarioRunner, tmp_path: Path, evidence: Evidence, route: str
) -> None:
    report = runner.with_faults(tmp_path, f"cufile.route call=* route={route}").run("transfer_whole_file")
    evidence["answer"] = report
    for call in ("read", "second_read", "foreign_read", "write"):
        assert (report[call]["bytes"], report[call]["route"]) == (FILE_BYTES, route), call
        direction = "writes" if call == "write" else "reads"
        # The workers share the 8 MiB in parts of 1 MiB.
        assert report[call]["counters"] == {f"n_{route}_{direction}": 8, f"n_total_{direction}": 8}, call
    assert report["is_expected"]
    assert report["foreign_read_is_expected"]
    assert report["is_written"]
    # Memory that gdrkit allocated stays registered until it is freed. Memory of another library is registered only
    # during the transfer.
    assert report["registered_bytes"] == report["registered_bytes_after_foreign"] == FILE_BYTES
    assert report["registered_bytes_at_end"] == 0
    assert report["registrations"] == {"buf_register_ops": 2, "buf_deregister_ops": 2}


def test_parts_of_a_large_read_run_at_the_same_time(runner: ScenarioRunner, tmp_path: Path) -> None:
    # Call 1 reads the first block as a probe. Calls 2 to 9 read the 8 parts.
    delay_s = 1.0
    report = runner.with_faults(
        tmp_path, "cufile.route call=* route=p2p", f"cuFileRead call=2-9 delay_us={delay_s * 1e6:.0f}"
    ).run("transfer_whole_file")
    assert report["is_expected"]
    # Parts that run one after another would take 8 delays.
    assert report["read_s"] < 8 * delay_s - 1


@pytest.mark.parametrize("route", ROUTES)
def test_many_ranges_are_one_batch_with_a_proof(
    runner: ScenarioRunner, tmp_path: Path, evidence: Evidence, route: str
) -> None:
    report = runner.with_faults(tmp_path, f"cufile.route call=* route={route}").run("transfer_many_ranges")
    evidence["answer"] = report
    for call in ("read", "second_read", "write"):
        assert (report[call]["bytes"], report[call]["route"]) == (RANGE_COUNT * RANGE_BYTES, route), call
        assert report[call]["range_bytes"] == [RANGE_BYTES] * RANGE_COUNT
        assert report[call]["counters"][f"batch_{route}_submit_ops"] == RANGE_COUNT
    assert report["wrong_indexes"] == report["second_wrong_indexes"] == []
    assert report["written_ranges"] == RANGE_COUNT


def test_adjacent_ranges_are_joined(runner: ScenarioRunner, tmp_path: Path) -> None:
    report = runner.with_faults(tmp_path, "cufile.route call=* route=p2p").run("read_adjacent_ranges")
    assert report["read"]["range_bytes"] == [RANGE_BYTES] * RANGE_COUNT
    # The 256 ranges of 4 KiB are one call of 1 MiB.
    assert report["read"]["counters"] == {"n_p2p_reads": 1, "n_total_reads": 1}
    assert report["wrong_indexes"] == []


def test_batches_without_counted_route_are_not_used(runner: ScenarioRunner, tmp_path: Path) -> None:
    # Calls 2 and 3 are the reads of the probe batch. They show no direct route, so gdrkit uses no batches.
    rules = ("cufile.route call=1 route=p2p", "cufile.route call=2-3 route=posix", "cufile.route call=* route=p2p")
    report = runner.with_faults(tmp_path, *rules).run("transfer_many_ranges")
    for call in ("read", "second_read"):
        assert report[call]["route"] == "p2p"
        assert report[call]["counters"] == {"n_p2p_reads": RANGE_COUNT, "n_total_reads": RANGE_COUNT}
    assert report["wrong_indexes"] == report["second_wrong_indexes"] == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("status", "expected_errno"), [(5, errno.EIO), (5010, None)], ids=["EIO", "CU_FILE_NVFS_DRIVER_ERROR"]
)
def test_error_in_a_batch_names_its_range_and_loses_nothing(
    runner: ScenarioRunner, tmp_path: Path, evidence: Evidence, route: str, status: int, expected_errno: int | None
) -> None:
    failed_index = 100
    rules = (
        f"cufile.route call=* route={route}",
        f"cufile.batch_io call={PROBE_BATCH_READS + failed_index + 1} status={status}",
    )
    report = runner.with_faults(tmp_path, *rules).run("transfer_many_ranges")
    evidence["answer"] = report
    failed_read = report["read"]
    assert (failed_read["error_class"], failed_read["operation"], failed_read["errno"], failed_read["status"]) == (
        "TransferFailed",
        "batch read",
        expected_errno,
        status,
    )
    assert failed_read["route"] == route
    failed_arguments = {name: value for name, value in failed_read["arguments"].items() if name.startswith("failed_")}
    assert failed_arguments == {
        "failed_range_index": failed_index,
        "failed_offset_bytes": report["offsets"][failed_index],
        "failed_length_bytes": RANGE_BYTES,
    }
    # All ranges before the failed range arrived, and also the other ranges of its batch.
    assert failed_read["range_bytes"][:failed_index] == [RANGE_BYTES] * failed_index
    assert failed_read["range_bytes"][failed_index] == 0
    assert failed_read["bytes"] == failed_read["counters"][f"batch_{route}_submit_ops"] * RANGE_BYTES
    assert report["wrong_indexes"] == []
    assert report["second_read"]["bytes"] == RANGE_COUNT * RANGE_BYTES


def test_refused_batch_names_its_range(runner: ScenarioRunner, tmp_path: Path) -> None:
    rules = ("cufile.route call=* route=p2p", "cuFileBatchIOSubmit call=2 status=5035")  # batch submit failed
    report = runner.with_faults(tmp_path, *rules).run("transfer_many_ranges")
    assert (report["read"]["operation"], report["read"]["status"]) == ("cuFileBatchIOSubmit", 5035)
    assert report["read"]["arguments"]["failed_offset_bytes"] == report["offsets"][0]
    assert report["read"]["bytes"] == 0
    assert report["second_read"]["bytes"] == RANGE_COUNT * RANGE_BYTES


@pytest.mark.parametrize("route", ROUTES)
def test_error_of_one_transfer_is_not_that_of_others(runner: ScenarioRunner, tmp_path: Path, route: str) -> None:
    """Transfers that wait for a delayed read run as one batch later, and the sixth of them fails."""
    rules = (
        f"cufile.route call=* route={route}",
        f"cuFileRead call={PROBE_READS + 1} delay_us=2000000",
        f"cufile.batch_io call={PROBE_BATCH_READS + 6} status=5",
    )
    report = runner.with_faults(tmp_path, *rules).run("start_many_reads")
    assert report["delayed"]["bytes"] == RANGE_BYTES
    failed_indexes = [index for index, outcome in enumerate(report["outcomes"]) if "error_class" in outcome]
    assert failed_indexes == [5]
    assert report["outcomes"][5]["arguments"]["failed_offset_bytes"] == report["offsets"][5]
    assert all(outcome["route"] == route for outcome in report["outcomes"])
    assert report["outcomes"][0]["counters"][f"batch_{route}_submit_ops"] == len(report["outcomes"]) - 1
    assert report["wrong_indexes"] == []


@pytest.mark.parametrize("route", ROUTES)
def test_error_in_a_large_read_names_its_part(runner: ScenarioRunner, tmp_path: Path, route: str) -> None:
    rules = (f"cufile.route call=* route={route}", f"cuFileRead call={PROBE_READS + 4} status=5")
    report = runner.with_faults(tmp_path, *rules).run("transfer_whole_file")
    failed_read = report["read"]
    assert (failed_read["errno"], failed_read["operation"], failed_read["route"]) == (errno.EIO, "cuFileRead", route)
    assert failed_read["arguments"]["failed_length_bytes"] == MIB
    # The parts before the failed part arrived. Later parts may have arrived, too, but they are not counted.
    assert failed_read["range_bytes"] == [failed_read["arguments"]["failed_offset_bytes"]]
    assert report["second_read"]["bytes"] == FILE_BYTES


@pytest.mark.parametrize("uses_batches", [False, True], ids=["calls", "batch"])
def test_cancelled_transfer_ends_early(
    runner: ScenarioRunner, tmp_path: Path, evidence: Evidence, *, uses_batches: bool
) -> None:
    # A delayed transfer of a batch has not started, so the cancellation need not wait for it.
    delay_rule = "cufile.batch_io call=6 delay_us=10000000" if uses_batches else "cuFileRead call=3-9 delay_us=1000000"
    report = runner.with_faults(tmp_path, "cufile.route call=* route=p2p", delay_rule).run(
        "cancel_transfer", uses_batches=uses_batches
    )
    evidence["answer"] = report
    # If all calls of the large read have started, cancel() returns False.
    if report["is_cancelled"]:
        assert report["outcome"]["reason"] == "cancelled"
        assert report["outcome"]["bytes"] < (report["ranges_count"] * RANGE_BYTES if uses_batches else FILE_BYTES)
    assert report["is_cancelled"] or not uses_batches
    assert report["cancel_duration_s"] < 9
    assert report["wrong_indexes"] == []
    assert report["second_read"]["bytes"] == RANGE_BYTES


def test_memory_of_a_running_transfer_cannot_be_freed(runner: ScenarioRunner, tmp_path: Path) -> None:
    rules = ("cufile.route call=* route=p2p", "cuFileRead call=2-9 delay_us=2000000")
    report = runner.with_faults(tmp_path, *rules).run("free_memory_early")
    assert report["early_close_error"] == {"error_class": "UsageError", "reason": "busy"}
    assert report["read"]["bytes"] == FILE_BYTES
    assert report["is_expected"]
    assert report["registered_bytes"] == 0


@pytest.mark.parametrize("failing_calls", ["1", "*"], ids=["once", "always"])
def test_refused_registration_fails_no_transfer(runner: ScenarioRunner, tmp_path: Path, failing_calls: str) -> None:
    """cuFileBufRegister fails with CU_FILE_INVALID_MAPPING_SIZE (5016) if too much memory is pinned."""
    rules = ("cufile.route call=* route=nvfs", f"cuFileBufRegister call={failing_calls} status=5016")
    report = runner.with_faults(tmp_path, *rules).run("transfer_whole_file")
    assert report["is_expected"]
    assert report["foreign_read_is_expected"]
    assert report["is_written"]
    assert report["registered_bytes_at_end"] == 0


def test_file_that_was_dropped_does_not_block_others(runner: ScenarioRunner, tmp_path: Path) -> None:
    """In an older version, a dropped file stayed registered and blocked the next one with its descriptor number."""
    report = runner.with_faults(tmp_path, "cufile.route call=* route=p2p").run("drop_open_files")
    assert [outcome["bytes"] for outcome in report["outcomes"]] == 5 * [RANGE_BYTES]


def test_read_needs_no_new_thread(runner: ScenarioRunner, tmp_path: Path) -> None:
    """In an older version, a read that could not start a thread failed, and its calls wrote to the memory later."""
    report = runner.with_faults(tmp_path, "cufile.route call=* route=p2p").run("read_without_new_threads")
    assert report["read"]["bytes"] == FILE_BYTES
    assert report["is_expected"]


def test_error_in_a_part_ends_all_calls_first(runner: ScenarioRunner, tmp_path: Path) -> None:
    """In an older version, a call of cuFile wrote to the memory after the transfer had ended with the error."""
    rules = ("cufile.route call=* route=p2p", "cuFileRead call=3-12 delay_us=500000")
    report = runner.with_faults(tmp_path, *rules).run("raise_in_worker")
    assert report == {"error_class": "MemoryError", "is_clear": True, "in_progress": 0}
