"""The C examples of the GPU interface: built with the installed package, and run with an agent."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.raw_usrbio import AgentProcess, list_shared_memory_files

import gdrkit
from gdrkit import pattern
from gdrkit.harness.needs import cuda, host, needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export, host.compiler)

FILE_BYTES = 5 * MIB + 4099
EXAMPLES = ("availability", "create_read", "wrap", "exporter", "importer", "utility")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The built examples by name. pkg-config of the installed package provides the compiler flags."""
    from pathlib import Path

    package_folder = Path(gdrkit.__file__).parent / "usrbio"
    pkg_config_flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "hf3fs_api_shared"],
        env=os.environ | {"PKG_CONFIG_PATH": str(package_folder / "lib" / "pkgconfig")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    programs_folder = tmp_path_factory.mktemp("examples")
    compiler_options = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1"]
    for name in EXAMPLES:
        source_path = package_folder / "examples" / f"{name}.c"
        library_options = [*pkg_config_flags, f"-Wl,-rpath,{package_folder / 'lib'}", "-ldl"]
        subprocess.run(
            ["cc", *compiler_options, str(source_path), "-o", str(programs_folder / name), *library_options], check=True
        )
    return {name: programs_folder / name for name in EXAMPLES}


@pytest.fixture
def agent(tmp_path: Path, seed: int) -> Iterator[AgentProcess]:
    """Yield a running agent. After the case, check that no link of an iov and no shared memory is left."""
    (tmp_path / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    with AgentProcess(tmp_path) as agent_process:
        yield agent_process
        memory_files = list_shared_memory_files(tmp_path)
        link_names = [link.name for link in (tmp_path / "3fs-virt" / "iovs").iterdir()]
    assert [name for name in link_names if not name.startswith("submit-ios")] == []
    assert agent_process.process.returncode == 0, agent_process.error_output
    assert [path for path in memory_files if path.exists()] == []


def run_example(program: Path, *arguments: object) -> bytes:
    completed = subprocess.run([program, *map(str, arguments)], capture_output=True, check=False, timeout=120)
    assert completed.returncode == 0, (completed.returncode, completed.stderr.decode())
    return completed.stdout


@pytest.mark.parametrize("name", ["create_read", "wrap"])
def test_example_reads_a_file_into_device_memory(
    agent: AgentProcess, programs: dict[str, Path], name: str, seed: int, evidence: Evidence
) -> None:
    output = run_example(programs[name], agent.mount, agent.mount / "file", 0)
    assert len(output) == FILE_BYTES
    pattern.check(output, seed=seed)
    evidence["bytes"] = FILE_BYTES


def test_importer_reads_into_memory_of_the_exporter(
    agent: AgentProcess, programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    # The path of a socket has at most 107 bytes, so the socket is not in the folder of the case, whose path is longer.
    socket_path = tmp_path_factory.getbasetemp().parent / f"socket-{os.getpid()}"
    command = [str(programs["exporter"]), str(agent.mount), str(FILE_BYTES), "0", str(socket_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as exporter:
        try:
            wait_for_listener(exporter, socket_path)
            importer_output = run_example(programs["importer"], agent.mount, agent.mount / "file", socket_path).decode()
            output, errors = exporter.communicate(timeout=120)
        finally:
            exporter.kill()
            socket_path.unlink(missing_ok=True)
    assert exporter.returncode == 0, errors.decode()
    assert importer_output == f"{FILE_BYTES} bytes were read into the memory of another process, on device 0\n"
    assert len(output) == FILE_BYTES
    pattern.check(output, seed=seed)


def wait_for_listener(exporter: subprocess.Popen[bytes], socket_path: Path) -> None:
    """Wait until the kernel's table of sockets has a listener at this path. Fail if the exporter has ended."""
    from pathlib import Path

    # The fourth field of a line is the flags of the socket. The flag __SO_ACCEPTCON means that the socket listens.
    listening_flag = "00010000"
    while exporter.poll() is None:
        for line in Path("/proc/net/unix").read_text().splitlines():
            fields = line.split()
            if fields[-1] == str(socket_path) and fields[3] == listening_flag:
                return
    assert exporter.stderr is not None
    raise AssertionError(exporter.stderr.read().decode())


def test_examples_report_devices_and_iovs(agent: AgentProcess, programs: dict[str, Path]) -> None:
    assert run_example(programs["availability"]).startswith(b"GDR is available with ")
    assert run_example(programs["utility"], agent.mount, 0) == b"device: GPU iov on device 0\nhost: host iov\n"
