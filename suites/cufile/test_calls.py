"""Each call of cuFile once: its bytes, and what the statistics of level 3 say of its route."""

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
# libcufile counts of batches, and of vectors, how they were submitted, and no route (seen with 1.15 and 1.20).
UNTOLD = dict.fromkeys(("readv", "writev", "batch_read", "batch_write"), ("unknown", "unproven", ""))
DIRECT = {f"n_{route}_{what}" for route in ("p2p", "nvfs") for what in ("reads", "writes")} | {
    f"batch_{route}_submit_ops" for route in ("p2p", "nvfs")
}


@pytest.mark.parametrize(("call", "length_bytes"), CALLS)
def test_a_call_moves_its_bytes_and_the_statistics_say_how(
    scene: Scene, evidence: Evidence, call: str, length_bytes: int
) -> None:
    """Without nvidia-fs each goes through the host; the bytes are right all the same, and nothing is called direct."""
    names = [name for name in ALL if scene.has_vectors or not name.endswith("v")]
    answer = scene.play_once("every_call", calls=names)["calls"][names.index(call)]
    evidence["call"] = answer
    assert "failure" not in answer
    assert answer["bytes"] == length_bytes
    assert answer["right"]
    proof = answer["proof"]
    assert (proof["route"], proof["state"], proof["evidence"]) == UNTOLD.get(call, THROUGH_THE_HOST)
    assert "no_nvidia_fs" in proof["causes"]
    assert not DIRECT & proof["moved"].keys()


@needs(software(Api.CUFILE))
def test_a_write_of_a_stream_that_moved_nothing_is_not_called_done(scene: Scene, tmp_path: Path) -> None:
    """libcufile 1.15 in compat mode was seen to: its result is 0, and the file is as it was."""
    answer = scene.plan(tmp_path, "cufile.async_io call=1 status=0").play("every_call", calls=["write_async"])
    (call,) = answer["calls"]
    assert (call["unmoved"], call["bytes"], call["right"]) == (1, MIB, True)


@needs(cufile.vectors)
def test_vectors_have_counters_of_their_own(scene: Scene) -> None:
    answer = scene.play_once("every_call", calls=ALL)["calls"]
    moved = {name: answer[ALL.index(name)]["proof"]["moved"] for name in ("read", "readv")}
    assert moved["read"]["n_posix_reads"] == 1
    assert "n_posix_reads" not in moved["readv"]
    assert moved["readv"]["batch_total_submit_ops"] == 2


def test_a_driver_that_is_open_twice_is_closed_twice(scene: Scene, evidence: Evidence) -> None:
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
def test_a_size_that_was_staged_holds_once_the_driver_is_open(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play_once("staged_parameters")
    evidence["parameters"] = answer
    assert answer["batch_staged"] == answer["batch_open"] == 32
    assert answer["set_open"]["failure"]["status"] == 5026


def test_without_a_current_context_libcufile_registers_no_memory_and_reads_in_no_stream(
    scene: Scene, evidence: Evidence
) -> None:
    """What gdrkit's own memory and streams spare a caller: they know their context, whatever is current."""
    answer = scene.play("without_context")
    evidence["answers"] = answer
    assert answer["register"]["failure"]["status"] == 5011
    assert "cu_err=201" in answer["register"]["failure"]["message"]
    assert answer["read_async"]["failure"]["errno"] == errno.ENOMEM
    assert all("context" in answer[call]["failure"]["message"] for call in ("register", "read_async"))
    assert answer["read"] == answer["registered"] == {"value": [MIB, True]}
    assert (answer["batch"], answer["register_stream"]) == ({"value": MIB}, {"value": "RegisteredStream"})


@needs(software(Api.CUFILE))
def test_a_transfer_of_a_stream_is_not_done_before_its_turn(scene: Scene, tmp_path: Path) -> None:
    """libcufile writes a result of 0 at once; a file that was closed then would be read by nobody's leave."""
    answer = scene.plan(tmp_path, "cufile.async_io call=1 delay_us=3000000").play("async_in_its_turn")
    assert not answer["done"]
    assert {answer[call]["failure"]["reason"] for call in ("bytes", "close")} == {"busy"}
    assert (answer["done_later"], answer["bytes_later"], answer["right"]) == (True, MIB, True)
