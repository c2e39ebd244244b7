"""Which nox sessions fit a machine, and why the rest do not: what `nox -s hardware` goes by."""

from __future__ import annotations

import re

from gdrkit.errors import Api
from gdrkit.install_paths import install_paths
from gdrkit.launch import TWINNED
from gdrkit.qualify import fitting_sessions

GPU, NIC = {Api.CUDA: "NVIDIA GPUs 0000:1b:00.0"}, {Api.VERBS: "RDMA devices mlx5_0"}


def fitting(hardware: dict[Api, str]) -> set[str]:
    found = fitting_sessions(hardware, TWINNED)
    assert all(entry["why"] for entry in found.values())
    return {name for name, entry in found.items() if entry["fits"]}


def test_a_bare_machine_has_the_twins_alone() -> None:
    assert fitting({}) == {"qualify", "suites"}
    assert fitting_sessions({}, TWINNED)["qualify"]["arguments"] == ["--software"]


def test_a_gpu_without_a_nic_needs_no_lab() -> None:
    assert fitting(GPU) == {"qualify", "direct", "suites"}
    assert "no RDMA device here" in str(fitting_sessions(GPU, TWINNED)["lab"]["why"])
    assert fitting(GPU | NIC) == {"qualify", "direct", "lab", "suites"}


def test_every_session_that_is_named_is_in_the_noxfile() -> None:
    noxfile = install_paths().root / "noxfile.py"
    if install_paths().is_checkout:
        assert set(fitting_sessions({}, TWINNED)) <= set(
            re.findall(r"^def (\w+)\(session", noxfile.read_text(), re.MULTILINE)
        )
