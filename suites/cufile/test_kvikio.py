"""Transfers by kvikio without cupy, with every byte compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, host, needs, software
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from support.cufile_scene import Scene

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda.device(), cufile.driver, cufile.udev_present, host.module("kvikio"), host.module("numpy"))


@pytest.mark.parametrize("mode", ["on", "auto", "off"])
def test_kvikio_moves_every_byte(scene: Scene, evidence: Evidence, mode: str) -> None:
    """If kvikio copies through host memory itself, libcufile counts nothing, and the route is unproven."""
    answer = scene.play_once("by_kvikio", modes=["on", "auto", "off"])
    evidence["kvikio"] = answer
    result = answer[mode]
    assert (result["read"], result["right"], result["write"], result["written"]) == (MIB, True, MIB, True)
    expected = {"on": ("unknown", "unproven"), "off": ("posix", "fell_back")}
    if mode in expected:
        assert (result["proof"]["route"], result["proof"]["state"]) == expected[mode]


def test_missing_file_keeps_its_errno(scene: Scene, evidence: Evidence) -> None:
    failure = scene.play_once("by_kvikio", modes=["on", "auto", "off"])["missing"]["failure"]
    evidence["failure"] = failure
    assert failure["operation"] == "kvikio.CuFile"


@needs(software(Api.CUFILE))
def test_kvikio_with_a_direct_cufile_is_proven(scene: Scene, tmp_path: Path) -> None:
    planned = scene.plan(tmp_path, "cufile.route call=* route=nvfs")
    proof = planned.play("by_kvikio", modes=["off"])["off"]["proof"]
    assert (proof["route"], proof["state"]) == ("nvfs", "proven")
