"""Errors of gdrkit have the error numbers of cuFile. After invalid arguments, the driver and the file stay usable.

The scenarios that these cases run are functions in ``support/cufile_child.py``.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, needs, software

if TYPE_CHECKING:
    from pathlib import Path

    from support.cufile_scenarios import ScenarioRunner

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver, cufile.udev_present)
NEEDS_TWIN = needs(software(Api.CUFILE))


def test_invalid_arguments_are_typed_errors(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    results = scenarios.run_cached("bad_input")
    evidence["answers"] = results
    error_types = {name: result["failure"]["kind"] for name, result in results.items() if "failure" in result}
    usage_error_calls = ["negative_offset", "overflowing_offset", "negative_length", "beyond_memory", "no_batch"]
    assert {error_types[name] for name in usage_error_calls} == {"UsageError"}
    assert {error_types[name] for name in ("closed_handle", "closed_driver")} == {"ClosedResource"}
    refused_calls = [
        "directory",
        "closed_descriptor",
        "twice",
        "large_batch",
        "registered_twice",
        "parameter_while_open",
    ]
    for name in refused_calls:
        # The error codes of cuFile itself are greater than CUFILEOP_BASE_ERR (5000).
        failure = results[name]["failure"]
        assert (failure["api"], 5000 < failure["status"] < 5100, failure["errno"]) == ("cufile", True, None), name
    assert results["still_works"] == {"value": [1 << 20, True]}


def test_end_of_file_is_a_short_count(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    results = scenarios.run_cached("bad_input")
    evidence["answers"] = {name: results[name] for name in ("beyond_end", "over_the_end", "nothing")}
    assert results["beyond_end"] == {"value": 0}
    assert results["over_the_end"] == {"value": 64 << 10}
    assert results["nothing"] == {"value": 0}


@NEEDS_TWIN
def test_stream_that_does_not_exist_is_refused(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    """The case needs the cuFile twin (a library that emulates libcufile): libcufile does not check a stream handle."""
    evidence["answer"] = result = scenarios.run("bad_input", twin=True)["no_stream"]
    assert result["failure"]["operation"] == "cuFileStreamRegister"


@NEEDS_TWIN
def test_statistics_do_not_start_at_level_off(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    """The case needs the cuFile twin, because libcufile 1.15 accepts level 0 (off) and returns success."""
    evidence["answer"] = result = scenarios.run_cached("bad_input")["level"]
    assert result["failure"]["operation"] == "cuFileStatsStart"


def test_write_to_a_read_only_file_fails(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    result = scenarios.run("read_only_file")
    evidence["answer"] = result
    assert "failure" in result
    assert result["failure"]["status"] is not None


# Each entry has a rule of the fault plan, the call that the rule makes fail, and the operation and errno of the
# expected error. The scenario makes the calls in this order. Status 5010 is CU_FILE_NVFS_DRIVER_ERROR, and a status
# below 5000 is an errno.
FAULTS = [
    ("cuFileRead call=1 status=5", "read", "cuFileRead", errno.EIO),
    ("cuFileRead call=2 status=5010", "read", "cuFileRead", None),
    ("cuFileWrite call=1 status=28", "write", "cuFileWrite", errno.ENOSPC),
    ("cuFileWrite call=2 status=5010", "write", "cuFileWrite", None),
    ("cuFileReadv call=1 status=5010", "readv", "cuFileReadv", None),
    ("cuFileReadAsync call=1 status=5010", "read_async", "cuFileReadAsync", None),
    ("cufile.async_io call=1 status=5010", "read_async", "cuFileReadAsync", None),
    ("cufile.async_io call=2 status=5", "read_async", "cuFileReadAsync", errno.EIO),
    ("cuFileBatchIOSubmit call=1 status=5010", "batch_read", "cuFileBatchIOSubmit", None),
    ("cufile.batch_io call=1-16 status=5010", "batch_read", "batch read", None),
    ("cufile.batch_io call=17-32 status=5", "batch_read", "batch read", errno.EIO),
    ("cuFileBufRegister call=1 status=5010", "read_registered", "cuFileBufRegister", None),
    ("cuFileStreamRegister call=1 status=5010", "read_async_registered", "cuFileStreamRegister", None),
]


@NEEDS_TWIN
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].replace(" ", "-"))
def test_error_keeps_its_number(
    scenarios: ScenarioRunner, tmp_path: Path, fault: tuple[str, str, str, int | None]
) -> None:
    faulty_scenarios = scenarios.with_faults(tmp_path, *(rule for rule, *_ in FAULTS))
    results = faulty_scenarios.run_cached("every_call", calls=[call for _, call, *_ in FAULTS])["calls"]
    rule, _, operation, error_number = fault
    failure = results[FAULTS.index(fault)]["failure"]
    assert (failure["operation"], failure["status"]) == (operation, int(rule.rpartition("=")[2]))
    assert failure["errno"] == error_number


@NEEDS_TWIN
def test_stalled_batch_times_out_and_can_be_canceled(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    # 10 s is the longest delay that a fault plan allows. Only the cancellation can end the transfer earlier.
    result = scenarios.with_faults(tmp_path, "cufile.batch_io call=2 delay_us=10000000").run("batch_stall")
    assert result == {
        "first": ["COMPLETE"],
        "stalled": [],
        "canceled": ["CANCELED"] * 3,
        "outstanding": 0,
        "is_data_correct": True,
    }
