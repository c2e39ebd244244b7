"""The reported route of transfers, with its causes, follows from the counters of libcufile."""

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
    from support.cufile_scene import Scene

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver)
# Direct transfers between GPU and disk need the twin, whose fault plan selects the route.
ON_TWIN = needs(software(Api.CUFILE), cufile.udev_present)
CALLS = ["read", "write", "readv", "read_async", "batch_read", "batch_write"]


@pytest.mark.qualify
@needs(cufile.udev_present)
def test_compat_mode_is_reported_as_fell_back(scene: Scene, evidence: Evidence) -> None:
    """The bytes are right, the statistics count posix, and require_direct() fails with the cause."""
    answer = scene.play("one_read")
    evidence["read"] = answer
    assert answer["right"]
    assert answer["proof"]["moved"]["n_posix_reads"] >= 1
    assert (answer["proof"]["route"], answer["proof"]["state"]) == ("posix", "fell_back")
    assert "no_nvidia_fs" in answer["proof"]["causes"]
    assert answer["fell_back"]["kind"] == "DirectPathError"
    assert "nvidia-fs is not loaded" in answer["fell_back"]["message"]


@needs(cufile.udev_absent)
def test_missing_udev_database_is_a_cause(scene: Scene, evidence: Evidence) -> None:
    with udev.absent(scene.path.parent):
        answer = scene.play_as_it_is("one_read")
    evidence["read"] = answer
    assert answer["failure"]["status"] == 5027
    assert answer["proof"]["state"] == "not_possible"
    assert answer["proof"]["causes"][0] == "no_udev_database"


@needs(cufile.udev_present)
def test_tmpfs_is_a_cause(scene: Scene, evidence: Evidence) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        scene.path = Path(folder) / "data"
        scene.path.write_bytes(pattern.payload(MIB, seed=scene.seed))
        answer = scene.play_as_it_is("one_read", direct=_takes_direct(scene.path))
    evidence["read"] = answer
    assert answer["proof"]["causes"][0] == "tmpfs"
    # cuFile 1.18 and newer register the file, and copy through host memory.
    status = answer.get("failure", {}).get("status")
    assert (answer["proof"]["state"], status) in {("not_possible", 5027), ("fell_back", None)}


@pytest.mark.parametrize("setting", ["variable", "parameter"])
@needs(cufile.udev_present)
def test_forced_compat_mode_is_a_cause(scene: Scene, evidence: Evidence, setting: str) -> None:
    flags = {"FORCE_COMPAT_MODE": True} if setting == "parameter" else {}
    forced = scene.with_environ(CUFILE_FORCE_COMPAT_MODE="true") if setting == "variable" else scene
    answer = forced.play("one_read", flags=flags)
    evidence["read"] = answer
    assert answer["right"]
    assert (answer["proof"]["route"], answer["proof"]["state"]) == ("posix", "fell_back")
    assert "compat_forced" in answer["proof"]["causes"]


@needs(cufile.udev_present)
def test_file_without_o_direct_is_a_cause(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play("one_read", direct=False)
    evidence["read"] = answer
    assert answer["right"]
    assert answer["proof"]["state"] == "fell_back"
    assert "not_o_direct" in answer["proof"]["causes"]


@pytest.mark.parametrize("level", [0, 1, 2])
@needs(cufile.udev_present)
def test_uncounted_transfer_is_unproven(scene: Scene, evidence: Evidence, level: int) -> None:
    answer = scene.play("one_read", level=level)
    evidence["read"] = answer
    assert answer["right"]
    assert (answer["proof"]["route"], answer["proof"]["state"]) == ("unknown", "unproven")
    assert answer["proof"]["causes"] == ["not_counted"]
    assert answer["fell_back"]["kind"] == "DirectPathError"


@pytest.mark.qualify
@pytest.mark.parametrize("route", ["p2p", "nvfs"])
@ON_TWIN
def test_direct_read_is_proven_by_its_counters(scene: Scene, tmp_path: Path, evidence: Evidence, route: str) -> None:
    answer = scene.plan(tmp_path, f"cufile.route call=* route={route}").play("one_read")
    evidence["read"] = answer
    assert answer["right"]
    assert (answer["proof"]["route"], answer["proof"]["state"]) == (route, "proven")
    assert answer["proof"]["moved"] == {f"n_{route}_reads": 1, "n_total_reads": 1}
    assert "fell_back" not in answer


@pytest.mark.parametrize("call", CALLS)
@ON_TWIN
def test_every_call_can_be_proven(scene: Scene, tmp_path: Path, evidence: Evidence, call: str) -> None:
    planned = scene.plan(tmp_path, "cufile.route call=* route=nvfs")
    answer = planned.play_once("every_call", calls=CALLS)["calls"][CALLS.index(call)]
    evidence["call"] = answer
    assert answer["right"]
    assert (answer["proof"]["route"], answer["proof"]["state"]) == ("nvfs", "proven")


@ON_TWIN
def test_batch_with_one_host_transfer_is_unproven(scene: Scene, tmp_path: Path) -> None:
    planned = scene.plan(tmp_path, "cufile.route call=5 route=posix", "cufile.route call=* route=p2p")
    proof = planned.play("every_call", calls=["batch_read"])["calls"][0]["proof"]
    assert (proof["moved"]["batch_p2p_submit_ops"], proof["moved"]["batch_aio_submit_ops"]) == (15, 1)
    assert (proof["route"], proof["state"]) == ("unknown", "unproven")


@ON_TWIN
def test_failed_statistics_are_unproven(scene: Scene, tmp_path: Path) -> None:
    planned = scene.plan(tmp_path, "cufile.route call=* route=p2p", "cuFileGetStatsL3 call=* status=5022")
    answer = planned.play("one_read")
    assert answer["right"]
    assert (answer["proof"]["route"], answer["proof"]["state"]) == ("unknown", "unproven")
    assert "CU_FILE_INVALID_VALUE (5022)" in answer["proof"]["why"]


@needs(cufile.udev_present)
def test_driver_without_compat_mode_does_not_open(scene: Scene, evidence: Evidence) -> None:
    failure = scene.play("driver_opens", flags={"ALLOW_COMPAT_MODE": False})["failure"]
    evidence["failure"] = failure
    assert (failure["operation"], failure["status"]) == ("cuFileDriverOpen", 5001)
    assert "allow compat mode" in failure["message"]


@ON_TWIN
def test_read_without_compat_mode_does_not_fall_back(scene: Scene, tmp_path: Path, evidence: Evidence) -> None:
    planned = scene.plan(tmp_path, "cufile.route call=* route=posix")
    answer = planned.play("one_read", flags={"ALLOW_COMPAT_MODE": False})
    evidence["read"] = answer
    assert answer["failure"]["kind"] == "Unsupported"
    assert answer["failure"]["status"] == 5008


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True
