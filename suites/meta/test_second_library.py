"""The Python binding of usrbio works with a client library that was built without the GPU extension."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdrkit.harness.needs import host, needs

PROJECT_ROOT = Path(__file__).resolve().parents[2]
# The fixture compiles the client library, which takes minutes on a busy machine.
pytestmark = [needs(host.compiler), pytest.mark.timeout(600)]

# This program reads a file with the library in GDRKIT_USRBIO_LIBRARY. It checks that the library reports no GPU, and
# that calls with GPU memory fail with ENOTSUP.
CLIENT_PROGRAM = """
import errno, os, sys
from pathlib import Path
from support.application import Application
from support.raw_usrbio import AgentProcess
from gdrkit import pattern, usrbio
from gdrkit.errors import Unsupported

mount = Path(sys.argv[1])
(mount / "file").write_bytes(pattern.payload(100_003, seed=7))
list_mapped_libraries = lambda: {
    line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "hf3fs_api" in line
}
with AgentProcess(mount) as agent:
    fd = os.open(mount / "file", os.O_RDONLY)
    usrbio.register_fd(fd)
    with Application(mount, memory_kind="host", length_bytes=200_000) as application:
        # The read is 100000 bytes from offset 3 of the file to offset 77 of the memory.
        assert application.read((fd, 77, 3, 100_000)) == [100_000]
        application.check(77, 100_000, seed=7, file_offset=3)
    usrbio.deregister_fd(fd)
    assert list_mapped_libraries() == {os.environ["GDRKIT_USRBIO_LIBRARY"]}, list_mapped_libraries()
    assert not usrbio.gdr_available()
    assert usrbio.gdr_device_count() == 0
    for call in (
        lambda: usrbio.make_gpu_iovec(str(mount), length_bytes=4096),
        lambda: usrbio.open_gpu_iovec(str(mount), "0" * 8 + "-0000-0000-0000-" + "0" * 12, length_bytes=4096),
        lambda: usrbio.import_gpu_iovec(str(mount), bytes(80)),
    ):
        try:
            call()
        except Unsupported as error:
            assert error.errno == errno.ENOTSUP, error
        else:
            raise AssertionError("a library without the extension accepted device memory")
    assert agent.terminate() == 0, agent.error_output
"""


@pytest.fixture(scope="module")
def library_without_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the usrbio client library without the GPU extension (CMake: ENABLE_GDR=OFF), built without CMake."""
    folder = tmp_path_factory.mktemp("second")
    path, unit_path, native_folder = folder / "libhf3fs_api_shared.so", folder / "all.cpp", PROJECT_ROOT / "native"
    sources = sorted([*native_folder.glob("usrbio/client/*.cpp"), *native_folder.glob("usrbio/ring/*.cpp")])
    # The compiler spends most of its time on headers, so one file that includes all sources takes a fifth of the time.
    unit_path.write_text("".join(f'#include "{source}"\n' for source in sources))
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", '-DGDRKIT_VERSION="second"']
    include_options = [f"-I{native_folder}", f"-I{native_folder / 'usrbio' / 'include'}"]
    libraries = ["-lpthread", "-lrt", "-ldl"]
    subprocess.run(["c++", *options, *include_options, str(unit_path), "-o", str(path), *libraries], check=True)
    return path


def test_binding_works_without_the_gpu_extension(library_without_gpu: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated", "--"]
    command = [*launcher, sys.executable, "-c", CLIENT_PROGRAM, str(tmp_path)]
    python_path = os.pathsep.join([str(PROJECT_ROOT / "suites"), *filter(None, sys.path)])
    result = subprocess.run(
        command,
        env=os.environ | {"GDRKIT_USRBIO_LIBRARY": str(library_without_gpu), "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
