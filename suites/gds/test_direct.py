"""A direct path is used only if it is proven, and each result reports its route, or why it is not direct."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gds import direct_scenario
from support import udev
from support.cufile_scene import Scene

from gdrkit import pattern
from gdrkit.errors import Api
from gdrkit.harness.case import CASE
from gdrkit.harness.needs import cuda, cufile, needs, software
from gdrkit.harness.needs.cufile import DISK
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.evidence import Evidence
    from gdrkit.inventory import Facts

pytestmark = needs(cuda.device(), cufile.driver)
# Direct transfers between GPU and disk need the twin, whose fault plan selects the route.
ON_TWIN = needs(software(Api.CUFILE), cufile.udev_present)
SCENARIO = "there_and_back"


@pytest.fixture
def scene(request: pytest.FixtureRequest, seed: int, facts: Facts) -> Iterator[Scene]:
    """Yield a scene with a file of 1 MiB on a disk."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-gds-", dir=DISK) as folder:
        path = Path(folder) / "data"
        path.write_bytes(pattern.payload(MIB, seed=seed))
        yield replace(Scene(path, seed, request.node.stash[CASE], facts), program=direct_scenario.__file__)


def is_right(answer: dict[str, Any]) -> bool:
    return bool(answer["read_right"] and answer["readv_right"] and answer["odd_right"] and answer["written"])


@pytest.mark.parametrize("route", ["p2p", "nvfs"])
@pytest.mark.parametrize("direct", ["preferred", "required"])
@ON_TWIN
def test_proven_direct_path_is_used(scene: Scene, tmp_path: Path, evidence: Evidence, route: str, direct: str) -> None:
    answer = scene.plan(tmp_path, f"cufile.route call=* route={route}").play(SCENARIO, direct=direct)
    evidence["answer"] = answer
    for call in ("read", "readv", "write", "future"):
        assert answer[call] == {"bytes": MIB, "route": route, "why": ""}, call
    if direct == "preferred":
        # A disk cannot transfer parts of a block directly. The engine moves them, and the result states the reason.
        assert answer["odd"]["route"] == "engine"
        assert "multiple of 4096" in answer["odd"]["why"]
        assert is_right(answer)
        assert len(answer["warnings"]) == 1
    else:
        assert answer["odd"]["reason"] == "not_direct"
        assert answer["warnings"] == []


@needs(cufile.udev_present)
def test_cufile_fallback_uses_the_engine_and_names_the_cause(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play(SCENARIO)
    evidence["answer"] = answer
    assert is_right(answer)
    for call in ("read", "readv", "write", "future"):
        assert (answer[call]["bytes"], answer[call]["route"]) == (MIB, "engine"), call
        assert "nvidia-fs is not loaded" in answer[call]["why"]
    assert len(answer["warnings"]) == 1


@needs(cufile.udev_present)
def test_required_direct_path_fails_without_one(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play(SCENARIO, direct="required")
    evidence["answer"] = answer
    for call in ("read", "readv", "odd", "write", "future"):
        assert (answer[call]["kind"], answer[call]["reason"]) == ("Unsupported", "not_direct"), call
        assert "nvidia-fs is not loaded" in answer[call]["message"]
    assert not answer["written"]


@ON_TWIN
def test_unproven_direct_path_is_not_used(scene: Scene, tmp_path: Path, evidence: Evidence) -> None:
    planned = scene.plan(tmp_path, "cufile.route call=* route=p2p", "cuFileGetStatsL3 call=* status=5022")
    answer = planned.play(SCENARIO)
    evidence["answer"] = answer
    assert is_right(answer)
    assert answer["read"]["route"] == "engine"
    assert "CU_FILE_INVALID_VALUE (5022)" in answer["read"]["why"]
    assert planned.play(SCENARIO, direct="required")["read"]["reason"] == "not_direct"


@pytest.mark.parametrize("direct", ["preferred", "required"])
@ON_TWIN
def test_lost_direct_path_is_reported_by_that_transfer(
    scene: Scene, tmp_path: Path, evidence: Evidence, direct: str
) -> None:
    """The first block goes directly, and the bytes after it do not. That transfer and those after it report it."""
    planned = scene.plan(tmp_path, "cufile.route call=1 route=nvfs", "cufile.route call=* route=posix")
    answer = planned.play(SCENARIO, direct=direct)
    evidence["answer"] = answer
    assert (answer["read"]["bytes"], answer["read"]["route"]) == (MIB, "posix")
    assert answer["read"]["why"]
    assert answer["read_right"]
    if direct == "preferred":
        assert [answer[call]["route"] for call in ("readv", "write", "future")] == ["engine"] * 3
        assert is_right(answer)
    else:
        assert answer["read"]["reason"] == "not_direct"
        assert answer["readv"]["reason"] == "not_direct"


@ON_TWIN
def test_route_is_unknown_if_counting_stops(scene: Scene, tmp_path: Path, evidence: Evidence) -> None:
    # The counters are read before and after each transfer. The first two reads are those of the probe.
    planned = scene.plan(tmp_path, "cufile.route call=* route=p2p", "cuFileGetStatsL3 call=3-4 status=5022")
    answer = planned.play(SCENARIO, direct="required")
    evidence["answer"] = answer
    assert (answer["read"]["route"], answer["read"]["reason"]) == ("unknown", "not_direct")
    assert "not_counted" in answer["read"]["why"]


@pytest.mark.parametrize(
    ("rule", "api", "status", "number"),
    [
        ("cuFileRead call=2 status=5", "kernel", 5, 5),
        ("cuFileRead call=2 status=5010", "cufile", 5010, None),
    ],
    ids=["EIO", "internal-error"],
)
@ON_TWIN
def test_failed_direct_transfer_keeps_its_number(
    scene: Scene, tmp_path: Path, rule: str, api: str, status: int, number: int | None
) -> None:
    answer = scene.plan(tmp_path, "cufile.route call=* route=p2p", rule).play(SCENARIO)
    failed = answer["read"]
    assert (failed["kind"], failed["api"], failed["status"], failed["errno"]) == ("TransferFailed", api, status, number)
    assert (failed["bytes"], failed["parts"]) == (0, [0])
    assert answer["readv"]["bytes"] == MIB


@needs(cufile.udev_absent)
def test_missing_udev_is_a_cause_and_libcufile_is_not_loaded(scene: Scene, evidence: Evidence) -> None:
    with udev.absent(scene.path.parent):
        answer = scene.play_as_it_is(SCENARIO)
    evidence["answer"] = answer
    assert is_right(answer)
    assert answer["read"]["route"] == "engine"
    assert "ID_FS_USAGE" in answer["read"]["why"]
    assert "libcufile" not in answer["opened"]
