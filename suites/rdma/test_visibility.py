"""The GPU sees the writes of a NIC after make_visible, and a program that leaves it out reads old data."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from rdma.litmus import CASES, Litmus
from support.memory_kinds import DMABUF
from support.python_child import module_command, suites_environ

from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software
from gdrkit.registration import Ordering

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

pytestmark = DMABUF


@pytest.mark.qualify
@pytest.mark.parametrize("name", CASES)
def test_written_data_is_visible_after_make_visible(
    device: Device, nics: tuple[Nic, ...], seed: int, name: str
) -> None:
    with Litmus(device, nics, seed=seed) as litmus:
        sees = CASES[name](litmus)
        Ordering.of(device).make_visible(device)
        assert sees()


# The ordering of the GPUs, and whether a stream sees the data before the flush.
@needs(software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize(("ordering", "is_visible"), [(0, False), (100, True), (200, True)])
def test_missing_flush_shows_old_data_if_the_gpu_needs_it(ordering: int, is_visible: bool) -> None:  # noqa: FBT001
    child = subprocess.run(
        module_command("rdma.litmus"),
        env=suites_environ() | {"GDRKIT_TWINS_WRITES_ORDERING": str(ordering)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert json.loads(child.stdout) == {name: [is_visible, True] for name in CASES}
