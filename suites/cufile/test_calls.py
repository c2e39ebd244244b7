"""Each call of cuFile moves its bytes, and the statistics of level 3 count its route."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, needs, software
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from support.cufile_scene import Scene

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver, cufile.udev_present)

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
ALL = [str(param.values[0]) for param in CALLS]
THROUGH_THE_HOST = ("posix", "fell_back", "cufile statistics")
# For batches and vectors, libcufile counts how they were submitted, and not their route (observed with 1.15 and 1.20).
WITHOUT_ROUTE = dict.fromkeys(("readv", "writev", "batch_read", "batch_write"), ("unknown", "unproven", ""))
DIRECT_COUNTERS = {f"n_{route}_{direction}" for route in ("p2p", "nvfs") for direction in ("reads", "writes")} | {
    f"batch_{route}_submit_ops" for route in ("p2p", "nvfs")
}


@pytest.mark.parametrize(("call", "length_bytes"), CALLS)
def test_call_moves_its_bytes_and_its_route_is_counted(
    scene: Scene, evidence: Evidence, call: str, length_bytes: int
) -> None:
    """Without nvidia-fs, each call copies through host memory. The bytes are right, and no counter says direct."""
    names = [name for name in ALL if scene.has_vectors or not name.endswith("v")]
    answer = scene.play_once("every_call", calls=names)["calls"][names.index(call)]
    evidence["call"] = answer
    assert "failure" not in answer
    assert answer["bytes"] == length_bytes
    assert answer["right"]
    proof = answer["proof"]
    assert (proof["route"], proof["state"], proof["evidence"]) == WITHOUT_ROUTE.get(call, THROUGH_THE_HOST)
    assert "no_nvidia_fs" in proof["causes"]
    assert not DIRECT_COUNTERS & proof["moved"].keys()


@needs(software(Api.CUFILE))
def test_async_write_that_moved_nothing_returns_0(scene: Scene, tmp_path: Path) -> None:
    """libcufile 1.15 in compat mode was observed to do this: the result is 0, and the file is unchanged."""
    answer = scene.plan(tmp_path, "cufile.async_io call=1 status=0").play("every_call", calls=["write_async"])
    (call,) = answer["calls"]
    assert (call["unmoved"], call["bytes"], call["right"]) == (1, MIB, True)


@needs(cufile.vectors)
def test_vectors_have_separate_counters(scene: Scene) -> None:
    answer = scene.play_once("every_call", calls=ALL)["calls"]
    moved = {name: answer[ALL.index(name)]["proof"]["moved"] for name in ("read", "readv")}
    assert moved["read"]["n_posix_reads"] == 1
    assert "n_posix_reads" not in moved["readv"]
    assert moved["readv"]["batch_total_submit_ops"] == 2


def test_driver_opened_twice_is_closed_twice(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play("driver_twice")
    evidence["driver"] = answer
    assert (answer["both"], answer["one"]) == (2, 1)


def test_parameters_are_staged_while_the_driver_is_closed(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play_once("staged_parameters")
    evidence["parameters"] = answer
    assert answer["batch_limits"][0] == 1
    assert answer["negative"]["failure"]["kind"] == "UsageError"
    assert answer["set_open"]["failure"]["status"] in {5026, None}
    assert answer["use_count"] == 1


@needs(cufile.staged_sizes)
def test_staged_size_is_used_by_the_open_driver(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play_once("staged_parameters")
    evidence["parameters"] = answer
    assert answer["batch_staged"] == answer["batch_open"] == 32
    assert answer["set_open"]["failure"]["status"] == 5026


def test_calls_without_a_cuda_context_fail(scene: Scene, evidence: Evidence) -> None:
    """Memory and streams of gdrkit make their own context current, so their calls do not fail."""
    answer = scene.play("without_context")
    evidence["answers"] = answer
    assert answer["register"]["failure"]["status"] == 5011
    assert "cu_err=201" in answer["register"]["failure"]["message"]
    assert answer["read_async"]["failure"]["errno"] == errno.ENOMEM
    assert all("context" in answer[call]["failure"]["message"] for call in ("register", "read_async"))
    assert answer["read"] == answer["registered"] == {"value": [MIB, True]}
    assert (answer["batch"], answer["register_stream"]) == ({"value": MIB}, {"value": "RegisteredStream"})


@needs(software(Api.CUFILE))
def test_async_transfer_is_not_done_before_its_execution(scene: Scene, tmp_path: Path) -> None:
    """libcufile writes a result of 0 at the call. A file that was closed then would be read after its close."""
    answer = scene.plan(tmp_path, "cufile.async_io call=1 delay_us=3000000").play("async_in_its_turn")
    assert not answer["done"]
    assert {answer[call]["failure"]["reason"] for call in ("bytes", "close")} == {"busy"}
    assert (answer["done_later"], answer["bytes_later"], answer["right"]) == (True, MIB, True)
