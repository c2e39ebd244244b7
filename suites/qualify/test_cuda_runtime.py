"""Tests of programs that use the CUDA runtime, with the software twin of their version of the runtime.

A software twin is a library that emulates the hardware. The twins of CUDA execute everything but kernels.
"""

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
MEMORY_PROGRAM = str(Path(__file__).with_name("cuda_runtime_program.py"))
RUNTIME_SONAMES = ["libcudart.so.12", "libcudart.so.13"]
CALLS_PROGRAM = Path(__file__).with_name("cuda_runtime_calls.py")
GRAPH_CALLS_PROGRAM = Path(__file__).with_name("cuda_runtime_graph_calls.py")
SUITES_FOLDER = CALLS_PROGRAM.parents[1]
# Calls whose result on the twin differs from the result on an H200, each with the reason of the difference.
# Attribute 119 is cudaDevAttrMemoryPoolSupportedHandleTypes.
EXPECTED_DIFFERENCES = {
    "cudaGetDeviceCount: one device": "the machine of the twins has two GPUs",
    "cudaDeviceGetAttribute: value of 119": "an H200 also has fabric handles of memory pools",
    "cudaGetSymbolAddress: unknown": "symbols are not implemented",
    "cudaFuncGetAttributes: unknown": "the real runtime reports that this program has no CUDA module",
    "cudaThreadExchangeStreamCaptureMode: unknown mode": "the twin refuses undocumented modes",
}
# The program opens the library in its first argument. /proc/self/maps then names the library that was loaded.
PRINT_MAPS_PROGRAM = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"


def run_on_twins(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on the twins of CUDA, and return its exit code and output."""
    return subprocess.run(
        [*RUN_COMMAND, sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )


@pytest.mark.parametrize(
    ("program", "expected_differences"), [(CALLS_PROGRAM, EXPECTED_DIFFERENCES), (GRAPH_CALLS_PROGRAM, {})]
)
@pytest.mark.parametrize("runtime_soname", RUNTIME_SONAMES)
def test_results_and_errors_are_those_of_a_real_runtime(
    runtime_soname: str, program: Path, expected_differences: dict[str, str]
) -> None:
    process = run_on_twins(str(program), runtime_soname, environment={**os.environ, "PYTHONPATH": str(SUITES_FOLDER)})
    assert process.returncode == 0, process.stderr
    twin_results, gpu_results = json.loads(process.stdout), json.loads(program.with_suffix(".json").read_text())
    assert twin_results.keys() == gpu_results.keys()
    titles_with_differences = {title for title, result in gpu_results.items() if twin_results[title] != result}
    assert titles_with_differences == expected_differences.keys(), {
        title: (twin_results[title], gpu_results[title]) for title in titles_with_differences
    }


def copy_twin(soname: str, target: Path) -> Path:
    """Copy the twin with this SONAME to the path `target`. The copy plays the CUDA runtime that a program ships."""
    environment = launch.environment(launch.Launch(twin_apis=frozenset({Api.CUDA})), base={})
    (twin_path,) = [path for path in environment["GDRKIT_TWINS_LIBRARIES"].split(":") if Path(path).name == soname]
    target.write_bytes(Path(twin_path).read_bytes())
    return target


@pytest.mark.parametrize("runtime_soname", RUNTIME_SONAMES)
def test_program_moves_memory_and_kernel_is_refused(runtime_soname: str) -> None:
    process = run_on_twins(MEMORY_PROGRAM, runtime_soname)
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
    refusal_line, *report_lines = process.stderr.splitlines()
    assert refusal_line == (
        "gdrkit: the launch of the kernel scale(float*, float) fails with cudaErrorNotSupported: "
        "the software twin of CUDA runs no kernels"
    )
    assert re.match(r"gdrkit: cuda: twin opened by \S+ \(pid \d+, \d+\); \d+ memory allocations; ", report_lines[0])
    assert re.fullmatch(
        rf"gdrkit: cuda: twin of {re.escape(runtime_soname)} opened by \S+ \(pid \d+, \d+\)", report_lines[1]
    )
    assert len(report_lines) == 2


@pytest.mark.parametrize(
    ("file_name", "expected_twin_soname"),
    [
        ("libcudart.so.12", "libcudart.so.12"),
        ("libcudart-c3a75b33.so.13.0.96", "libcudart.so.13"),
        ("libcudart.so", "libcudart.so.13"),  # Only the SONAME in the file has the version.
    ],
)
def test_twin_of_the_same_version_replaces_a_runtime(file_name: str, expected_twin_soname: str, tmp_path: Path) -> None:
    copied_runtime_path = copy_twin("libcudart.so.13", tmp_path / file_name)
    process = run_on_twins("-c", PRINT_MAPS_PROGRAM, str(copied_runtime_path))
    assert process.returncode == 0, process.stderr
    assert f"/{expected_twin_soname}\n" in process.stdout
    assert str(copied_runtime_path) not in process.stdout


def test_link_to_a_runtime_tells_its_version(tmp_path: Path) -> None:
    """In a CUDA toolkit, the link libcudart.so leads to a file whose name has the version.

    The SONAME in this file has the version 12, so only the name of the file can give the version 13.
    """
    copy_twin("libcudart.so.12", tmp_path / "libcudart.so.13.0.96")
    (tmp_path / "libcudart.so.13").symlink_to("libcudart.so.13.0.96")
    (tmp_path / "libcudart.so").symlink_to("libcudart.so.13")
    (tmp_path / "empty").mkdir()
    process_opening_path = run_on_twins("-c", PRINT_MAPS_PROGRAM, str(tmp_path / "libcudart.so"))
    # The search must continue after a folder without the library.
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path / 'empty'}:{tmp_path}"}
    process_opening_name = run_on_twins("-c", PRINT_MAPS_PROGRAM, "libcudart.so", environment=environment)
    for process in (process_opening_path, process_opening_name):
        assert process.returncode == 0, process.stderr
        assert "/libcudart.so.13\n" in process.stdout
        assert str(tmp_path) not in process.stdout


# With None, the file does not exist.
@pytest.mark.parametrize("library_content", [None, b"", b"\x7fELF", b"\x7fELF" + b"\xff" * 4096])
def test_runtime_of_unknown_version_is_replaced(library_content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "libcudart.so"
    if library_content is not None:
        path.write_bytes(library_content)
    process = run_on_twins("-c", PRINT_MAPS_PROGRAM, str(path))
    assert process.returncode == 0, process.stderr
    assert "/libcudart.so.12\n" in process.stdout


def test_runtime_of_another_version_is_not_replaced(tmp_path: Path) -> None:
    copied_runtime_path = copy_twin("libcudart.so.12", tmp_path / "libcudart.so.11.0")
    process = run_on_twins("-c", PRINT_MAPS_PROGRAM, str(copied_runtime_path))
    assert process.returncode == 0, process.stderr
    assert str(copied_runtime_path) in process.stdout
