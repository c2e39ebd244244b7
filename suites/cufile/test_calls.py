"""Each cuFile call transfers the right bytes, and its reported route agrees with the statistics of libcufile.

Other cases are about the driver, its parameters, the CUDA context and streams.

The scenarios that these cases run are functions in ``support/cufile_child.py``.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, needs, software
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from support.cufile_scenarios import ScenarioRunner

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver, cufile.udev_present)

# Each entry has a call and the number of bytes that the call transfers.
CALLS = [
    pytest.param("read", MIB, id="read"),
    pytest.param("read_registered", MIB, id="read_registered"),
    pytest.param("write", MIB, id="write"),
    pytest.param("readv", 128 * KIB, id="readv", marks=needs(cufile.vectors)),
    pytest.param("writev", 128 * KIB, id="writev", marks=needs(cufile.vectors)),
    pytest.param("read_async", MIB, id="read_async"),
    pytest.param("read_async_registered", MIB, id="read_async_registered"),
    pytest.param("write_async", MIB, id="write_async"),
    pytest.param("batch_read", MIB, id="batch_read"),
    pytest.param("batch_write", MIB, id="batch_write"),
]
CALL_NAMES = [str(param.values[0]) for param in CALLS]
# The proof of a call that copied through host memory has this route, state and evidence.
HOST_COPY_PROOF = ("posix", "fell_back", "cufile statistics")
# libcufile 1.15 and 1.20 count batches and vectors only when they are submitted (batch_*_submit_ops). These counters do
# not prove the route of the bytes.
PROOF_BY_UNCOUNTED_CALL = dict.fromkeys(("readv", "writev", "batch_read", "batch_write"), ("unknown", "unproven", ""))
# Names of counters that libcufile increases only for the direct routes, p2p and nvfs.
DIRECT_ROUTE_COUNTERS = {f"n_{route}_{direction}" for route in ("p2p", "nvfs") for direction in ("reads", "writes")} | {
    f"batch_{route}_submit_ops" for route in ("p2p", "nvfs")
}


@pytest.mark.parametrize(("call", "length_bytes"), CALLS)
def test_call_moves_its_bytes_and_its_route_is_counted(
    scenarios: ScenarioRunner, evidence: Evidence, call: str, length_bytes: int
) -> None:
    """Without nvidia-fs, each call copies through host memory. The bytes are right, and no counter of a direct route
    increases.
    """
    # Only the names of the vector calls readv and writev end with v.
    supported_calls = [name for name in CALL_NAMES if scenarios.has_vectors or not name.endswith("v")]
    result = scenarios.run_cached("every_call", calls=supported_calls)["calls"][supported_calls.index(call)]
    evidence["call"] = result
    assert "failure" not in result
    assert result["bytes"] == length_bytes
    assert result["is_data_correct"]
    proof = result["proof"]
    assert (proof["route"], proof["state"], proof["evidence"]) == PROOF_BY_UNCOUNTED_CALL.get(call, HOST_COPY_PROOF)
    assert "no_nvidia_fs" in proof["causes"]
    assert not DIRECT_ROUTE_COUNTERS & proof["counter_increases"].keys()


@needs(software(Api.CUFILE))
def test_async_write_that_moved_nothing_returns_0(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    """libcufile 1.15 in compat mode was observed to complete a write with 0 bytes written.

    The scenario counts such a write in ``empty_write_count``, and repeats it. ``bytes`` is from the repetition.
    """
    result = scenarios.with_faults(tmp_path, "cufile.async_io call=1 status=0").run("every_call", calls=["write_async"])
    (write_result,) = result["calls"]
    assert (write_result["empty_write_count"], write_result["bytes"], write_result["is_data_correct"]) == (1, MIB, True)


@needs(cufile.vectors)
def test_vectors_have_separate_counters(scenarios: ScenarioRunner) -> None:
    results = scenarios.run_cached("every_call", calls=CALL_NAMES)["calls"]
    increased_counters = {
        name: results[CALL_NAMES.index(name)]["proof"]["counter_increases"] for name in ("read", "readv")
    }
    assert increased_counters["read"]["n_posix_reads"] == 1
    assert "n_posix_reads" not in increased_counters["readv"]
    assert increased_counters["readv"]["batch_total_submit_ops"] == 2  # The scenario reads two ranges.


def test_driver_opened_twice_is_closed_twice(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    result = scenarios.run("driver_twice")
    evidence["driver"] = result
    assert (result["while_both_open"], result["while_one_open"]) == (2, 1)


def test_parameters_are_staged_while_the_driver_is_closed(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    # A parameter that is set now is staged: it takes effect when the driver opens.
    result = scenarios.run_cached("staged_parameters")
    evidence["parameters"] = result
    assert result["batch_limits"][0] == 1
    assert result["negative"]["failure"]["kind"] == "UsageError"
    # 5026 is CU_FILE_DRIVER_ALREADY_OPEN. The status is None if gdrkit refuses the call before it reaches libcufile.
    assert result["set_while_open"]["failure"]["status"] in {5026, None}
    assert result["use_count"] == 1


@needs(cufile.staged_sizes)
def test_staged_size_is_used_by_the_open_driver(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    result = scenarios.run_cached("staged_parameters")
    evidence["parameters"] = result
    assert result["batch_staged"] == result["batch_open"] == 32
    assert result["set_while_open"]["failure"]["status"] == 5026  # CU_FILE_DRIVER_ALREADY_OPEN


def test_calls_without_a_cuda_context_fail(scenarios: ScenarioRunner, evidence: Evidence) -> None:
    """A registration of foreign memory and a read_async on a foreign stream fail.

    Calls with memory and streams of gdrkit succeed, because gdrkit makes their CUDA context current.
    """
    result = scenarios.run("without_context")
    evidence["answers"] = result
    # 5011 is CU_FILE_CUDA_DRIVER_ERROR, and 201 is CUDA_ERROR_INVALID_CONTEXT.
    assert result["register"]["failure"]["status"] == 5011
    assert "cu_err=201" in result["register"]["failure"]["message"]
    assert result["read_async"]["failure"]["errno"] == errno.ENOMEM
    assert all("context" in result[call]["failure"]["message"] for call in ("register", "read_async"))
    assert result["read"] == result["registered"] == {"value": [MIB, True]}
    assert (result["batch"], result["register_stream"]) == ({"value": MIB}, {"value": "RegisteredStream"})


@needs(software(Api.CUFILE))
def test_async_transfer_is_not_done_before_its_execution(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    """libcufile writes 0 as the count of bytes during the call already. So a count of 0 does not mean that it ended.

    If gdrkit closed the file at that time, libcufile would read the file after the close.
    """
    result = scenarios.with_faults(tmp_path, "cufile.async_io call=1 delay_us=3000000").run("pending_read")
    assert not result["done"]
    assert {result[call]["failure"]["reason"] for call in ("bytes", "close")} == {"busy"}
    assert (result["done_later"], result["bytes_later"], result["is_data_correct"]) == (True, MIB, True)


# On the cuFile twin (a library that emulates libcufile), each read is in progress while the next ones are queued.
SLOW_READS = "cufile.async_io call=* delay_us=200000"


@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "not_registered"])
def test_streams_with_one_memory_read_right_bytes(
    scenarios: ScenarioRunner, tmp_path: Path, evidence: Evidence, *, is_registered: bool
) -> None:
    """libcufile 1.15 in compat mode was observed to mix up the bytes of several streams that use one registration."""
    result = scenarios.with_faults(tmp_path, SLOW_READS).run("several_streams", is_registered=is_registered)
    evidence["answer"] = result
    assert result["bytes"] == [MIB // 4] * 4
    assert result["is_data_correct"]


@needs(software(Api.CUFILE))
def test_second_stream_of_a_registration_is_refused(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    result = scenarios.with_faults(tmp_path, SLOW_READS).run("several_streams", is_registered=True)
    assert [refusal["reason"] for refusal in result["refusals"]] == ["busy"] * 3
    streams = result["streams"]
    for refusal, busy_stream, refused_stream in zip(result["refusals"], streams, streams[1:], strict=False):
        assert f"cuFileReadAsync on stream {refused_stream:#x}" in refusal["message"]
        assert f"registered at {result['address']:#x} ({MIB} bytes)" in refusal["message"]
        assert f"stream {busy_stream:#x} has not finished" in refusal["message"]
        assert f"synchronize stream {busy_stream:#x} first" in refusal["message"]


@needs(software(Api.CUFILE))
def test_streams_without_compat_mode_are_not_refused(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    """If compat mode is not allowed, every transfer is direct or fails. So no bytes can be mixed up."""
    direct_scenarios = scenarios.with_faults(tmp_path, "cufile.route call=* route=p2p", SLOW_READS)
    result = direct_scenarios.run("several_streams", is_registered=True, flags={"ALLOW_COMPAT_MODE": False})
    assert (result["refusals"], result["is_data_correct"]) == ([], True)
