"""A direct path is taken where it is proven, and each result says which way its bytes went; else why they did not."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import gds_child, udev
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
# What only a plan can make of a machine: GPUs and disks that reach each other.
ON_TWIN = needs(software(Api.CUFILE), cufile.udev_present)
SCENARIO = "there_and_back"


@pytest.fixture
def scene(request: pytest.FixtureRequest, seed: int, facts: Facts) -> Iterator[Scene]:
    """A file of 1 MiB on a disk."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-gds-", dir=DISK) as folder:
        path = Path(folder) / "data"
        path.write_bytes(pattern.payload(MIB, seed=seed))
        yield replace(Scene(path, seed, request.node.stash[CASE], facts), program=gds_child.__file__)


def is_right(answer: dict[str, Any]) -> bool:
    return bool(answer["read_right"] and answer["readv_right"] and answer["odd_right"] and answer["written"])


@pytest.mark.parametrize("route", ["p2p", "nvfs"])
@pytest.mark.parametrize("direct", ["preferred", "required"])
@ON_TWIN
def test_where_a_direct_path_is_proven_it_is_taken(
    scene: Scene, tmp_path: Path, evidence: Evidence, route: str, direct: str
) -> None:
    answer = scene.plan(tmp_path, f"cufile.route call=* route={route}").play(SCENARIO, direct=direct)
    evidence["answer"] = answer
    for call in ("read", "readv", "write", "future"):
        assert answer[call] == {"bytes": MIB, "route": route, "why": ""}, call
    if direct == "preferred":
        # No disk moves parts of a block into a device: the engine does, and says so.
        assert answer["odd"]["route"] == "engine"
        assert "multiple of 4096" in answer["odd"]["why"]
        assert is_right(answer)
        assert len(answer["warnings"]) == 1
    else:
        assert answer["odd"]["reason"] == "not_direct"
        assert answer["warnings"] == []


@needs(cufile.udev_present)
def test_where_cufile_falls_back_the_engine_moves_the_bytes_and_the_cause_is_said(
    scene: Scene, evidence: Evidence
) -> None:
    answer = scene.play(SCENARIO)
    evidence["answer"] = answer
    assert is_right(answer)
    for call in ("read", "readv", "write", "future"):
        assert (answer[call]["bytes"], answer[call]["route"]) == (MIB, "engine"), call
        assert "nvidia-fs is not loaded" in answer[call]["why"]
    assert len(answer["warnings"]) == 1


@needs(cufile.udev_present)
def test_a_run_that_asked_for_direct_and_fell_back_fails(scene: Scene, evidence: Evidence) -> None:
    answer = scene.play(SCENARIO, direct="required")
    evidence["answer"] = answer
    for call in ("read", "readv", "odd", "write", "future"):
        assert (answer[call]["kind"], answer[call]["reason"]) == ("Unsupported", "not_direct"), call
        assert "nvidia-fs is not loaded" in answer[call]["message"]
    assert not answer["written"]


@ON_TWIN
def test_what_was_not_counted_is_unproven_and_not_taken(scene: Scene, tmp_path: Path, evidence: Evidence) -> None:
    planned = scene.plan(tmp_path, "cufile.route call=* route=p2p", "cuFileGetStatsL3 call=* status=5022")
    answer = planned.play(SCENARIO)
    evidence["answer"] = answer
    assert is_right(answer)
    assert answer["read"]["route"] == "engine"
    assert "CU_FILE_INVALID_VALUE (5022)" in answer["read"]["why"]
    assert planned.play(SCENARIO, direct="required")["read"]["reason"] == "not_direct"


@pytest.mark.parametrize("direct", ["preferred", "required"])
@ON_TWIN
def test_a_path_that_is_lost_later_is_seen_at_once(
    scene: Scene, tmp_path: Path, evidence: Evidence, direct: str
) -> None:
    """The first block goes directly and what follows does not: the very transfer says so, and those after it."""
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
def test_what_is_counted_no_more_is_unknown(scene: Scene, tmp_path: Path, evidence: Evidence) -> None:
    # Looked at before and after: the first two looks are of the first block.
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
def test_a_direct_transfer_that_fails_keeps_its_number(
    scene: Scene, tmp_path: Path, rule: str, api: str, status: int, number: int | None
) -> None:
    answer = scene.plan(tmp_path, "cufile.route call=* route=p2p", rule).play(SCENARIO)
    failed = answer["read"]
    assert (failed["kind"], failed["api"], failed["status"], failed["errno"]) == ("TransferFailed", api, status, number)
    assert (failed["bytes"], failed["parts"]) == (0, [0])
    assert answer["readv"]["bytes"] == MIB


@needs(cufile.udev_absent)
def test_without_udev_nothing_is_opened_and_the_cause_is_said(scene: Scene, evidence: Evidence) -> None:
    with udev.absent(scene.path.parent):
        answer = scene.play_as_it_is(SCENARIO)
    evidence["answer"] = answer
    assert is_right(answer)
    assert answer["read"]["route"] == "engine"
    assert "ID_FS_USAGE" in answer["read"]["why"]
    assert "libcufile" not in answer["opened"]
