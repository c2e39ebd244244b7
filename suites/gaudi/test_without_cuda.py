"""Export, registration, RDMA WRITE and RDMA READ of Gaudi memory, without any CUDA library in either process."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from support.python_child import module_command, suites_environ

from gdrkit.harness.needs import gaudi, needs, software, verbs

GENERATIONS = [
    pytest.param(name, marks=needs(software("hlthunk"), verbs.nic(), verbs.dmabuf_region))
    for name in ("gaudi", "gaudi2", "gaudi3")
]


def run_pair(**variables: str) -> dict[str, Any]:
    """Run pair_without_cuda.py with additional environment variables, and return the object that it prints."""
    command = module_command("gaudi.pair_without_cuda")
    environ = suites_environ() | variables
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 0, completed.stderr
    report: dict[str, Any] = json.loads(completed.stdout)
    return report


def assert_no_cuda(report: dict[str, Any]) -> None:
    gaudi_libraries, peer_libraries = report["libraries"]
    assert any(name.startswith(("libhl-thunk", "libhlthunk")) for name in gaudi_libraries)
    # The peer needs only an address and an rkey. It opens no Gaudi device and loads no hl-thunk.
    assert not any(name.startswith("libhl") for name in peer_libraries)
    assert not [name for name in (*gaudi_libraries, *peer_libraries) if name.startswith(("libcuda", "libnvidia"))]
    assert "libcuda" not in str(report["memory_map"])
    assert "cuda" not in {name for modules in report["modules"] for name in modules}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_two_processes_exchange_bytes_on_every_generation(generation: str) -> None:
    report = run_pair(GDRKIT_TWINS_GAUDI=generation)
    assert report["generation"] == generation
    assert_no_cuda(report)


@needs(gaudi.device(), verbs.nic(), verbs.dmabuf_region)
def test_two_processes_exchange_bytes_on_a_present_gaudi() -> None:
    assert_no_cuda(run_pair())
