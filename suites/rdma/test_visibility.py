"""The GPU sees the writes of a NIC after a flush. Without a flush, a GPU with weak ordering reads old data."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from rdma.litmus import SHAPES, FlagPlace, Litmus, Method
from support.memory_kinds import NEEDS_DMABUF
from support.python_child import module_command, suites_environ

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, needs, software, verbs
from gdrkit.registration import FlushOption

if TYPE_CHECKING:
    from rdma.litmus import Shape

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

pytestmark = NEEDS_DMABUF

# Each case repeats its transfers for this time.
DURATION_S = 0.2

NEEDS_OF_FLAG_PLACE = {FlagPlace.OTHER_NIC: needs(verbs.nic(count_min=2))}
SHAPE_CASES = [
    pytest.param(shape, id=shape.name, marks=NEEDS_OF_FLAG_PLACE.get(shape.flag_place, ())) for shape in SHAPES
]
METHODS = [
    pytest.param(Method.MAKE_VISIBLE, id="make_visible"),
    pytest.param(Method.HOST_FLUSH, id="host_flush", marks=needs(cuda.flush(FlushOption.HOST))),
    pytest.param(Method.STREAM_FLUSH, id="stream_flush", marks=needs(cuda.flush(FlushOption.MEMOPS))),
    pytest.param(Method.POLLING, id="polling", marks=needs(cuda.ordered_writes)),
]


@pytest.mark.qualify
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPE_CASES)
def test_gpu_sees_what_nics_wrote(
    device: Device, nics: tuple[Nic, ...], evidence: Evidence, shape: Shape, method: Method
) -> None:
    evidence.claim_hardware(Api.VERBS, Api.CUDA)
    with Litmus(device, nics, shape) as litmus:
        result = litmus.run(method, duration_s=DURATION_S)
        evidence["visibility"] = result
        if litmus.reader.obstacle:
            evidence.unproven(f"copies of a stream read the memory, because no kernel can: {litmus.reader.obstacle}")
    assert result.is_visible, f"the GPU saw old data: {result}"


# With CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE (0), the GPU sees the writes of NICs only after a flush. With OWNER (100)
# and ALL_DEVICES (200), it sees them at once. The software twins, libraries that emulate the hardware, support both
# flush options here.
@needs(software(Api.VERBS), software(Api.CUDA))
@pytest.mark.parametrize(("ordering", "is_ordered"), [(0, False), (100, True), (200, True)])
def test_missing_flush_shows_old_data_if_the_gpu_needs_it(ordering: int, is_ordered: bool) -> None:  # noqa: FBT001
    child = subprocess.run(
        module_command("rdma.litmus"),
        env=suites_environ()
        | {
            "GDRKIT_TWINS_WRITES_ORDERING": str(ordering),
            "GDRKIT_TWINS_FLUSH_OPTIONS": str(int(FlushOption.HOST | FlushOption.MEMOPS)),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    flush_methods = {Method.MAKE_VISIBLE, Method.HOST_FLUSH, Method.STREAM_FLUSH}
    expected_visibility = {method.value: is_ordered or method in flush_methods for method in Method}
    assert json.loads(child.stdout) == {shape.name: expected_visibility for shape in SHAPES}
