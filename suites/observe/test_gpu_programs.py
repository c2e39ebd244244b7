"""`gdrkit observe` of programs that load a file into a real GPU, and of an all-reduce between two GPUs.

The programs contain no code for `gdrkit observe`. The cases compare the bytes that NVML counts with the size of the
file, and with the bytes that the algorithm of NCCL moves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from observe.file_loader import BLOCK_BYTES
from support.python_child import module_command, suites_environ

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, host, needs, verbs, without_twin
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.observe import Observation
from gdrkit.units import GIB, MIB
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.evidence import Evidence

# The CUDA twin (a library that emulates the driver and its GPUs) has no NVML.
pytestmark = [needs(cuda.device(), without_twin(Api.CUDA)), pytest.mark.timeout(110)]

FILE_BLOCKS_COUNT = 4 * GIB // BLOCK_BYTES
# The route that the verdict must name for each loader.
ROUTE_BY_LOADER = {"gdrkit": "engine", "kvikio": "posix", "torch": "posix"}
# Allowed ratio of the bytes that the GPU received over PCIe to the bytes of the file. The headers of PCIe packets with
# 256 bytes of data add about 8 %.
PCIE_RATIO_MIN, PCIE_RATIO_MAX = 0.98, 1.12
REDUCED_BYTES, ROUNDS_COUNT = 256 * MIB, 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder on a disk, and remove it at the end."""
    path = Path(tempfile.mkdtemp(prefix="gdrkit-observe-", dir=DISK_FOLDER))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def observe(report_path: Path, *command: str) -> Observation:
    """Run a command, which must succeed, by `gdrkit observe`, and return the observation."""
    command_line = [sys.executable, "-m", "gdrkit", "observe", "--report", str(report_path), "--", *command]
    completed = subprocess.run(
        command_line, env=suites_environ(os.environ), capture_output=True, text=True, check=False, timeout=100
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return Observation.from_json(report_path.read_text())


def record_observation(evidence: Evidence, observation: Observation) -> None:
    """Record the verdicts and the counters."""
    evidence["routes"] = observation.routes
    evidence["gpus"] = observation.gpus
    evidence["not_seen"] = observation.not_seen
    evidence["processes"] = [
        {"program": process.program, "libraries": process.libraries, "read_bytes": process.read_bytes}
        for process in observation.processes
    ]


@pytest.mark.parametrize(
    "loader",
    [
        "gdrkit",
        pytest.param("kvikio", marks=needs(host.module("kvikio"), host.module("numpy"))),
        pytest.param("torch", marks=needs(host.module("torch"))),
    ],
)
def test_file_load_has_its_route_and_bytes(folder: Path, evidence: Evidence, loader: str) -> None:
    path = folder / "file"
    create_command = module_command("observe.file_loader", f"create-for-{loader}", path, FILE_BLOCKS_COUNT)
    subprocess.run(create_command, env=suites_environ(os.environ), check=True, timeout=60)
    observation = observe(folder / "report.json", *module_command("observe.file_loader", loader, path))
    record_observation(evidence, observation)
    file_bytes = path.stat().st_size
    received_bytes = sum(gpu.pcie_received_bytes or 0 for gpu in observation.gpus)
    evidence.number("file_bytes", file_bytes)
    evidence.number("pcie_received_bytes", received_bytes)
    evidence.number("pcie_over_file_ratio", received_bytes / file_bytes)
    assert PCIE_RATIO_MIN <= received_bytes / file_bytes <= PCIE_RATIO_MAX
    route = observation.route(ROUTE_BY_LOADER[loader])
    assert route is not None
    assert route.outcome is RouteOutcome.PROVEN, route.cause
    assert observation.route("nvlink") is None


@needs(cuda.device(count_min=2), cuda.vmm, verbs.nic(), verbs.dmabuf_region, host.module("nvidia.nccl"))
def test_all_reduce_moves_its_bytes_over_nvlink(folder: Path, evidence: Evidence) -> None:
    """In an all-reduce of two ranks, each GPU sends the bytes of the buffer once."""
    ranks_command = module_command("observe.ranks_program", folder, REDUCED_BYTES, ROUNDS_COUNT)
    observation = observe(folder / "report.json", *ranks_command)
    record_observation(evidence, observation)
    evidence["log"] = observation.log
    expected_bytes = REDUCED_BYTES * (ROUNDS_COUNT + 1)  # The program makes one all-reduce before the rounds.
    evidence.number("algorithm_bytes", expected_bytes)
    gpus = [gpu for gpu in observation.gpus if gpu.nvlink_sent_bytes]
    assert len(gpus) == 2
    for gpu in gpus:
        ratio = (gpu.nvlink_sent_bytes or 0) / expected_bytes
        evidence.number(f"gpu{gpu.minor}_nvlink_over_algorithm_ratio", ratio)
        assert 0.98 <= ratio <= 1.02
    route = observation.route("nvlink")
    assert route is not None
    assert route.outcome is RouteOutcome.PROVEN, route.cause
