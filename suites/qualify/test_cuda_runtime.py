"""Programs on the CUDA runtime run on its software twins, one for each version. Kernels do not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gdrkit import launch
from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software

pytestmark = needs(software(Api.CUDA))

RUN_COMMAND = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated", "--apis", "cuda", "--"]
PROGRAM = str(Path(__file__).with_name("cuda_runtime_program.py"))
RUNTIMES = ["libcudart.so.12", "libcudart.so.13"]
CALLS_PROGRAM = Path(__file__).with_name("cuda_runtime_calls.py")
GRAPH_CALLS_PROGRAM = Path(__file__).with_name("cuda_runtime_graph_calls.py")
SUITES = CALLS_PROGRAM.parents[1]
# Each of these calls has another result on the twin than on an H200, for this reason.
DIFFERENCES = {
    "cudaGetDeviceCount: one device": "the machine of the twins has two GPUs",
    "cudaDeviceGetAttribute: value of 119": "the machine of the twins has no fabric, by which an H200 shares pools too",
    "cudaGetSymbolAddress: unknown": "symbols are not implemented",
    "cudaFuncGetAttributes: unknown": "the real runtime has no module in this program, and reports that instead",
    "cudaThreadExchangeStreamCaptureMode: unknown mode": "the twin refuses undocumented modes",
}
PRINT_MAPS = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"


def run_on_twins(*command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN_COMMAND, sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )


@pytest.mark.parametrize(("program", "differences"), [(CALLS_PROGRAM, DIFFERENCES), (GRAPH_CALLS_PROGRAM, {})])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_results_and_errors_are_those_of_a_real_runtime(
    runtime: str, program: Path, differences: dict[str, str]
) -> None:
    process = run_on_twins(str(program), runtime, environment={**os.environ, "PYTHONPATH": str(SUITES)})
    assert process.returncode == 0, process.stderr
    twin_results, gpu_results = json.loads(process.stdout), json.loads(program.with_suffix(".json").read_text())
    assert twin_results.keys() == gpu_results.keys()
    different_titles = {title for title, result in gpu_results.items() if twin_results[title] != result}
    assert different_titles == differences.keys(), {
        title: (twin_results[title], gpu_results[title]) for title in different_titles
    }


def copy_twin(name: str, target: Path) -> Path:
    """Copy a twin to the path `target`, where the copy represents a program's own library."""
    environment = launch.environment(launch.Launch(twin_apis=frozenset({Api.CUDA})), base={})
    (twin,) = [path for path in environment["GDRKIT_TWINS_LIBRARIES"].split(":") if Path(path).name == name]
    target.write_bytes(Path(twin).read_bytes())
    return target


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_program_moves_memory_and_kernel_is_refused(runtime: str) -> None:
    process = run_on_twins(PROGRAM, runtime)
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
    refusal, *report = process.stderr.splitlines()
    assert refusal == (
        "gdrkit: the launch of the kernel scale(float*, float) fails with cudaErrorNotSupported: "
        "the software twin of CUDA runs no kernels"
    )
    assert re.match(r"gdrkit: cuda: twin opened by \S+ \(pid \d+, \d+\); \d+ memory allocations; ", report[0])
    assert re.fullmatch(rf"gdrkit: cuda: twin of {re.escape(runtime)} opened by \S+ \(pid \d+, \d+\)", report[1])
    assert len(report) == 2


@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        ("libcudart.so.12", "libcudart.so.12"),
        ("libcudart-c3a75b33.so.13.0.96", "libcudart.so.13"),
        ("libcudart.so", "libcudart.so.13"),  # The SONAME has the version.
    ],
)
def test_twin_of_the_same_version_replaces_a_runtime(name: str, runtime: str, tmp_path: Path) -> None:
    copy = copy_twin("libcudart.so.13", tmp_path / name)
    process = run_on_twins("-c", PRINT_MAPS, str(copy))
    assert process.returncode == 0, process.stderr
    assert f"/{runtime}\n" in process.stdout
    assert str(copy) not in process.stdout


def test_link_to_a_runtime_tells_its_version(tmp_path: Path) -> None:
    """In a CUDA toolkit, the link libcudart.so leads to a file whose name has the version."""
    copy_twin("libcudart.so.12", tmp_path / "libcudart.so.13.0.96")
    (tmp_path / "libcudart.so.13").symlink_to("libcudart.so.13.0.96")
    (tmp_path / "libcudart.so").symlink_to("libcudart.so.13")
    (tmp_path / "empty").mkdir()
    process_by_path = run_on_twins("-c", PRINT_MAPS, str(tmp_path / "libcudart.so"))
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path / 'empty'}:{tmp_path}"}
    process_by_name = run_on_twins("-c", PRINT_MAPS, "libcudart.so", environment=environment)
    for process in (process_by_path, process_by_name):
        assert process.returncode == 0, process.stderr
        assert "/libcudart.so.13\n" in process.stdout
        assert str(tmp_path) not in process.stdout


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF", b"\x7fELF" + b"\xff" * 4096])
def test_runtime_of_unknown_version_is_replaced(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "libcudart.so"
    if content is not None:
        path.write_bytes(content)
    process = run_on_twins("-c", PRINT_MAPS, str(path))
    assert process.returncode == 0, process.stderr
    assert "/libcudart.so.12\n" in process.stdout


def test_runtime_of_another_version_is_not_replaced(tmp_path: Path) -> None:
    copy = copy_twin("libcudart.so.12", tmp_path / "libcudart.so.11.0")
    process = run_on_twins("-c", PRINT_MAPS, str(copy))
    assert process.returncode == 0, process.stderr
    assert str(copy) in process.stdout
