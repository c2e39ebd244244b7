"""Errors of cuFile keep their numbers, and invalid arguments leave everything usable."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, needs, software

if TYPE_CHECKING:
    from pathlib import Path

    from support.cufile_scene import Scene

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver, cufile.udev_present)
ON_TWIN = needs(software(Api.CUFILE))


def test_invalid_arguments_are_typed_errors(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play_once("bad_input")
    evidence["answers"] = answer
    kinds = {name: result["failure"]["kind"] for name, result in answer.items() if "failure" in result}
    usage = ["negative_offset", "overflowing_offset", "negative_length", "beyond_memory", "no_batch"]
    assert {kinds[name] for name in usage} == {"UsageError"}
    assert {kinds[name] for name in ("closed_handle", "closed_driver")} == {"ClosedResource"}
    calls = ["directory", "closed_descriptor", "twice", "large_batch", "registered_twice"]
    refused = [*calls, "parameter_while_open"]
    for name in refused:
        failure = answer[name]["failure"]
        assert (failure["api"], 5000 < failure["status"] < 5100, failure["errno"]) == ("cufile", True, None), name
    assert answer["still_works"] == {"value": [1 << 20, True]}


def test_end_of_file_is_a_short_count(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play_once("bad_input")
    evidence["answers"] = {name: answer[name] for name in ("beyond_end", "over_the_end", "nothing")}
    assert answer["beyond_end"] == {"value": 0}
    assert answer["over_the_end"] == {"value": 64 << 10}
    assert answer["nothing"] == {"value": 0}


@ON_TWIN
def test_stream_that_does_not_exist_is_refused(scene: Scene, evidence: Evidence) -> None:
    """Run on the twin alone, because the real libcufile uses an invalid stream handle without a check."""
    evidence["answer"] = answer = scene.play("bad_input", twin=True)["no_stream"]
    assert answer["failure"]["operation"] == "cuFileStreamRegister"


@ON_TWIN
def test_statistics_do_not_start_at_level_off(scene: Scene, evidence: Evidence) -> None:
    """Run on the twin alone, because libcufile 1.15 on an H200 starts its statistics at level 0 and returns success."""
    evidence["answer"] = answer = scene.play_once("bad_input")["level"]
    assert answer["failure"]["operation"] == "cuFileStatsStart"


def test_write_to_a_read_only_file_fails(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play("read_only_file")
    evidence["answer"] = answer
    assert "failure" in answer
    assert answer["failure"]["status"] is not None


# Fault rules, each with the call that it makes fail, and with the operation and the errno of the expected error. The
# calls are made in this order.
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


@ON_TWIN
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].replace(" ", "-"))
def test_error_keeps_its_number(scene: Scene, tmp_path: Path, fault: tuple[str, str, str, int | None]) -> None:
    planned = scene.plan(tmp_path, *(rule for rule, *_ in FAULTS))
    results = planned.play_once("every_call", calls=[call for _, call, *_ in FAULTS])["calls"]
    rule, _, operation, number = fault
    failure = results[FAULTS.index(fault)]["failure"]
    assert (failure["operation"], failure["status"]) == (operation, int(rule.rpartition("=")[2]))
    assert failure["errno"] == number


@ON_TWIN
def test_stalled_batch_times_out_and_can_be_canceled(scene: Scene, tmp_path: Path) -> None:
    # The longest delay of a fault plan: only the cancellation can end the transfer within the time of the case.
    answer = scene.plan(tmp_path, "cufile.batch_io call=2 delay_us=10000000").play("batch_stall")
    assert answer == {
        "first": ["COMPLETE"],
        "meanwhile": [],
        "rest": ["CANCELED"] * 3,
        "outstanding": 0,
        "right": True,
    }
