"""gdrkit-hf3fs has the modules that programs for 3FS import, and refuses to work beside the package of 3FS itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gdrkit import pattern
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB

PACKAGE_FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "hf3fs"
# The program makes the calls of SGLang's client for 3FS: it creates rings, publishes shared memory, and then unlinks
# the shared memory. Like that client, it does not import multiprocessing.shared_memory, so hf3fs_fuse.io must import
# it. The program writes two chunks from standard input to a file, with a gap of one chunk between them, and reads them
# again.
CLIENT_PROGRAM = """
import datetime, multiprocessing, os, subprocess, sys
from hf3fs_fuse.io import deregister_fd, extract_mount_point, make_ioring, make_iovec, register_fd
folder, chunk_bytes = sys.argv[1], int(sys.argv[2])
command = [sys.executable, "-m", "gdrkit", "agent", folder, "--store", folder]
agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
assert agent.stdout.readline().startswith(b"ready")
path = os.path.join(folder, "file")
file = os.open(path, os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4 * chunk_bytes)
register_fd(file)
mount = extract_mount_point(path)
blocks = [multiprocessing.shared_memory.SharedMemory(size=2 * chunk_bytes, create=True) for _ in range(2)]
rings = [make_ioring(mount, 2, for_read=for_read, timeout=1, numa=-1) for for_read in (False, True)]
iovs = [make_iovec(block, mount) for block in blocks]
for block in blocks:
    block.unlink()
blocks[0].buf[:] = sys.stdin.buffer.read(2 * chunk_bytes)
for ring, iov, for_read in zip(rings, iovs, (False, True)):
    for index in range(2):
        chunk = iov[index * chunk_bytes : (index + 1) * chunk_bytes]
        ring.prepare(chunk, for_read, file, 2 * index * chunk_bytes)
    completions = ring.submit().wait(min_results=2, timeout=datetime.timedelta(seconds=30))
    assert [completion.result for completion in completions] == [chunk_bytes] * 2, completions
sys.stdout.buffer.write(bytes(blocks[1].buf))
sys.stdout.flush()
deregister_fd(file)
del rings, ring, iov, iovs, chunk, completions
for block in blocks:
    block.close()
agent.terminate()
assert agent.wait() == 0
"""
RUN_ON_TWINS = ("-m", "gdrkit", "run", "--software", "--isolated", "--quiet", "--", sys.executable)


def run_python(folder: Path, *arguments: str, stdin_data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run Python with `folder` first in PYTHONPATH, and with `stdin_data` as standard input."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *arguments], input=stdin_data, env=environ, capture_output=True, check=False)


def test_names_of_3fs_write_and_read_blocks(tmp_path: Path) -> None:
    payload = pattern.payload(128 * KIB, seed=6)
    result = run_python(
        PACKAGE_FOLDER, *RUN_ON_TWINS, "-c", CLIENT_PROGRAM, str(tmp_path), str(64 * KIB), stdin_data=payload
    )
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout == payload
    file_data = (tmp_path / "file").read_bytes()
    assert file_data[: 64 * KIB] + file_data[128 * KIB : 192 * KIB] == payload


def test_names_beside_the_native_module_are_refused(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE_FOLDER, tmp_path / "both", ignore=shutil.ignore_patterns("__pycache__"))
    # Python imports a package rather than a module of the same name. This empty package stands for the native module
    # of 3FS.
    (tmp_path / "both" / "hf3fs_py_usrbio").mkdir()
    (tmp_path / "both" / "hf3fs_py_usrbio" / "__init__.py").touch()
    result = run_python(tmp_path / "both", "-c", "import hf3fs_fuse.io")
    assert result.returncode == 1
    assert b"ImportError: gdrkit-hf3fs and the package of 3FS are both installed" in result.stderr


@needs(host.module("setuptools"))
def test_build_beside_the_package_of_3fs_is_refused(tmp_path: Path) -> None:
    # The first argument of the program becomes the folder of the installed packages.
    program = (
        "import sys, sysconfig; sysconfig.get_path = lambda name: sys.argv[1]\n"
        "import backend; backend.build_wheel(sys.argv[2])"
    )
    metadata_folder = tmp_path / "site" / "hf3fs_py_usrbio-1.2.9.dist-info"
    metadata_folder.mkdir(parents=True)
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hf3fs_py_usrbio\nVersion: 1.2.9\n")
    result = run_python(PACKAGE_FOLDER, "-c", program, str(tmp_path / "site"), str(tmp_path))
    assert b"hf3fs_py_usrbio 1.2.9 of 3FS is installed" in result.stderr
    assert not list(tmp_path.glob("*.whl"))
