"""The choice of `nox -s hardware`: the nox sessions that can run on the hardware of the machine."""

from __future__ import annotations

import re

from gdrkit.errors import Api
from gdrkit.install_paths import install_paths
from gdrkit.launch import APIS_WITH_TWINS
from gdrkit.qualify import list_nox_sessions

# gdrkit.launch.present_hardware() returns these values on a machine with a GPU, and on a machine with a NIC.
GPU_HARDWARE, NIC_HARDWARE = {Api.CUDA: "NVIDIA GPUs 0000:1b:00.0"}, {Api.VERBS: "RDMA devices mlx5_0"}


def find_fitting_session_names(hardware_by_api: dict[Api, str]) -> set[str]:
    sessions = list_nox_sessions(hardware_by_api, APIS_WITH_TWINS)
    assert all(session["why"] for session in sessions.values())
    return {name for name, session in sessions.items() if session["fits"]}


def test_machine_without_hardware_has_the_sessions_on_twins() -> None:
    assert find_fitting_session_names({}) == {"qualify", "suites"}
    assert list_nox_sessions({}, APIS_WITH_TWINS)["qualify"]["arguments"] == ["--software"]


def test_lab_does_not_fit_a_machine_without_a_nic() -> None:
    assert find_fitting_session_names(GPU_HARDWARE) == {"qualify", "direct", "suites"}
    assert "no RDMA device here" in str(list_nox_sessions(GPU_HARDWARE, APIS_WITH_TWINS)["lab"]["why"])
    assert find_fitting_session_names(GPU_HARDWARE | NIC_HARDWARE) == {"qualify", "direct", "lab", "suites"}


def test_fitting_sessions_exist_in_the_noxfile() -> None:
    noxfile_path = install_paths().root / "noxfile.py"
    if install_paths().is_checkout:
        assert set(list_nox_sessions({}, APIS_WITH_TWINS)) <= set(
            re.findall(r"^def (\w+)\(session", noxfile_path.read_text(), re.MULTILINE)
        )
